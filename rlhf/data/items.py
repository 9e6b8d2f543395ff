"""Comparisons as the reward model sees them: one item a prompt, with all its answers and every labeler's judgement."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf.data.prompts import encode_prompt_within
from rlhf.data.records import Ranking
from rlhf.tokenizer import encode_response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(slots=True)
class Item:
    """One prompt with K answers: one batch element."""

    key: str  # prompt and responses, which several labelers' records share
    rows: list[list[int]]  # K token lists, prompt + response
    lengths: list[int]  # K response lengths in tokens, for the length baseline
    records: list[Ranking] = field(default_factory=list)  # one a labeler

    def pairs(self) -> list[tuple[int, int]]:
        """(better, worse) of every labeler, repeats included."""
        return [pair for record in self.records for pair in record.pair_list()]

    def weights(self) -> list[list[float]]:
        """(K, K): how many labelers found i better than j."""
        matrix = [[0.0] * len(self.rows) for _ in self.rows]
        for better, worse in self.pairs():
            matrix[better][worse] += 1.0
        return matrix


def make_items(
    records: Sequence[Ranking], tokenizer: "PreTrainedTokenizerFast", context_length: int, room: int
) -> tuple[list[Item], int]:
    """Items of rankings with at least one ordered pair, and how many rankings gave none.

    A prompt keeps at most context_length - room tokens, cut from the left; a response that is longer than what is left
    is truncated, and then has no end token.
    """
    items: dict[str, Item] = {}
    unpaired = 0
    for record in records:
        if not record.pair_list():
            unpaired += 1
            continue
        texts = [response.text for response in record.responses]
        key = repr(([(m.role, m.content) for m in record.prompt], texts))
        if key not in items:
            fitted = encode_prompt_within(tokenizer, record.prompt, context_length - room)
            if fitted is None:
                unpaired += 1
                continue
            prompt = fitted[0]
            answers = [
                encode_response(tokenizer, r.text, ended=bool(r.metadata.get("ended", True))) for r in record.responses
            ]
            rows = [(prompt + answer)[:context_length] for answer in answers]
            items[key] = Item(key, rows, [len(answer) for answer in answers])
        items[key].records.append(record)
    return list(items.values()), unpaired

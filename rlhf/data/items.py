"""Comparisons for the reward model: one item per prompt, with all its answers and every labeler's judgement."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlhf.config.setting import listed
from rlhf.data.chat_template import encode_response
from rlhf.data.prompts import encode_prompt_within
from rlhf.data.records import Message, Ranking
from rlhf.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

MOST_ANSWERS = 64  # most answers of one item; further rankings of the prompt make another item

Answer = tuple[str, bool]  # text, and whether it ended
# Prompt and answers to one model input an answer (anything with a length) and the answers' lengths in tokens; None if
# the prompt does not fit.
Encode = Callable[[Sequence[Message], Sequence[Answer]], tuple[list[Any], list[int]] | None]


@dataclass(slots=True)
class Judgement:
    """One ranking, by the positions of its answers in the item."""

    labeler: str | None
    pairs: list[tuple[int, int]]  # (better, worse), each once
    gaps: list[int] | None  # rank difference of each pair; None if the judgements are pairs without ranks
    weight: float = 1.0  # of the labeler
    ranks: dict[int, int] | None = None  # ranks of answers, by position; None if the judgements are pairs


@dataclass(slots=True)
class Item:
    """One prompt with K different answers: one batch element."""

    key: str
    rows: list[Any]  # K model inputs, prompt + response
    lengths: list[int]  # K response lengths in tokens, for the length baseline
    record: Ranking | None = None  # the prompt's first record, for its metadata
    answers: list[Answer] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)

    def pairs(self) -> list[tuple[int, int]]:
        """(better, worse) of every labeler, repeats included."""
        return [pair for judgement in self.judgements for pair in judgement.pairs]

    def weights(self) -> "Tensor":
        """(K, K) float32: the labelers who found i better than j, each by weight; 0 without a judgement."""
        import torch

        from rlhf.ops.ranking import combine_pair_weights, pair_weights, pair_weights_from_pairs

        K = len(self.rows)
        judged = [
            pair_weights_from_pairs(j.pairs, K)
            if j.ranks is None
            else pair_weights(torch.tensor([j.ranks.get(place, -1) for place in range(K)]))
            for j in self.judgements
        ]
        return combine_pair_weights(judged, [j.weight for j in self.judgements]) if judged else torch.zeros(K, K)

    def of_labelers(self, labelers: Collection[str | None]) -> "Item":
        """The same answers with the judgements of these labelers only."""
        kept = [judgement for judgement in self.judgements if judgement.labeler in labelers]
        return Item(self.key, self.rows, self.lengths, self.record, self.answers, kept)


def token_encoder(tokenizer: "PreTrainedTokenizerFast", context_length: int, room: int) -> Encode:
    """For reward models on the policy's own tokens.

    A prompt keeps at most context_length - room tokens, cut from the left; a response that is longer than what is left
    is truncated, and then has no end token.
    """

    def encode(prompt: Sequence[Message], answers: Sequence[Answer]) -> tuple[list[Any], list[int]] | None:
        fitted = encode_prompt_within(tokenizer, prompt, context_length - room)
        if fitted is None:
            return None
        encoded = [encode_response(tokenizer, text, ended=ended) for text, ended in answers]
        rows = [(fitted[0] + answer)[:context_length] for answer in encoded]
        return rows, [len(row) - len(fitted[0]) for row in rows]

    return encode


def join_rankings(
    records: Sequence[Ranking], encode: Encode, labeler_weights: Mapping[str, float] | None = None
) -> tuple[list[Item], int]:
    """One item per prompt with at least one ordered pair, and how many rankings gave none.

    Rankings of one prompt share an item, whoever judged, in any order of the answers, and even if only some answers are
    the same: each different answer appears once. Answers with the same text and ending are one, and a pair of them is
    ignored. Rankings of a labeler with weight 0, or whose prompt does not fit, give no pair.

    labeler_weights: labelers that are not named have weight 1.
    """
    weights = labeler_weights or {}
    items_of: dict[str, list[Item]] = {}  # by prompt
    unpaired = 0
    for record in records:
        weight = 1.0 if record.labeler is None else float(weights.get(record.labeler, 1.0))
        answers = [(response.text, bool(response.metadata.get("ended", True))) for response in record.responses]
        pairs = [(i, j) for i, j in record.pair_list() if answers[i] != answers[j]]
        if not pairs or not weight > 0:
            unpaired += 1
            continue
        key = repr([(m.role, m.content) for m in record.prompt])
        item = _item_for(items_of.setdefault(key, []), key, record, list(dict.fromkeys(answers)))
        place = {answer: i for i, answer in enumerate(item.answers)}
        ranks = record.ranks() if record.pairs is None else None
        gap_of: dict[tuple[int, int], int] = {}
        for i, j in pairs:
            gap_of.setdefault((place[answers[i]], place[answers[j]]), ranks[j] - ranks[i] if ranks else 0)
        judgement = Judgement(record.labeler, sorted(gap_of), None, weight)
        if ranks:
            judgement.gaps = [gap_of[pair] for pair in judgement.pairs]
            if len(set(answers)) == len(answers):  # equal answers can have different ranks
                judgement.ranks = {place[answer]: rank for answer, rank in zip(answers, ranks, strict=True)}
        item.judgements.append(judgement)

    items = []
    for item in chain.from_iterable(items_of.values()):
        assert item.record is not None
        encoded = encode(item.record.prompt, item.answers)
        if encoded is None:
            unpaired += len(item.judgements)
        else:
            item.rows, item.lengths = encoded
            items.append(item)
    return items, unpaired


def _item_for(items: list[Item], key: str, record: Ranking, answers: list[Answer]) -> Item:
    """The prompt's item that these answers join: the newest one, or a new one if it would grow too large."""
    joined = list(dict.fromkeys([*items[-1].answers, *answers])) if items else []
    if items and len(joined) <= MOST_ANSWERS:
        items[-1].answers = joined
    else:
        items.append(Item(f"{key}#{len(items)}" if items else key, [], [], record, answers))
    return items[-1]


def names_of(given: Any) -> list[str]:
    """The labelers of a setting: none, one, or a list; numbers are names too."""
    return [str(name) for name in listed(given)]


def check_labelers(setting: str, names: Collection[str], records: Sequence[Ranking]) -> None:
    """Raises: UserError if `names` contains someone who judged nothing; the message lists those who did."""
    seen = sorted({record.labeler for record in records if record.labeler is not None})
    unknown = [name for name in names if name not in seen]
    if unknown:
        shown = ", ".join(seen[:20]) + (f" and {len(seen) - 20} more" if len(seen) > 20 else "")
        wanted = f"want some of the labelers seen: {shown or 'none has a name'}"
        raise UserError(f"{setting}: no ranking is by {', '.join(unknown)}: {wanted}")

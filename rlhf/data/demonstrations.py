"""Demonstrations for SFT, encoded as tokens that fit the context."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf.data.chat_template import encode_dialogue, encode_prompts, encode_responses
from rlhf.data.formats.shapes import is_learned
from rlhf.data.prompts import drop_oldest, encode_prompt_within
from rlhf.data.records import Demonstration, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Row = dict[str, list[int]]


def encode_demonstrations(
    records: Sequence[Demonstration],
    tokenizer: "PreTrainedTokenizerFast",
    context_length: int,
    *,
    turns: str = "last",
    min_response: int | None = None,
    counts: Counter[str] | None = None,
) -> list[Row]:
    """Encode demonstrations as {"prompt": ids, "response": ids}, together at most `context_length` tokens.

    A response that fits ends with its end token. One that does not is truncated and has no end token, because the
    author did not end it there. A prompt that leaves a response fewer than `min_response` tokens (a quarter of
    the context by default; all of a shorter response) is cut from the left, see `encode_prompt_within`; if that
    is not enough, the demonstration is skipped. `counts`, if given, is increased: kept,
    truncated_responses, cut_prompts, skipped; earlier_turns and further_rows of turns="all".

    turns: "all" also learns the assistant's earlier turns, see `encode_dialogue_rows`.
    """
    least = context_length // 4 if min_response is None else min_response
    counts = Counter() if counts is None else counts
    prompts = encode_prompts(tokenizer, [record.prompt for record in records])
    responses = encode_responses(tokenizer, [record.response for record in records])
    encoded = []
    for record, prompt, response in zip(records, prompts, responses, strict=True):
        if turns == "all" and (rows := encode_dialogue_rows(record, tokenizer, context_length, least)):
            earlier = sum(map(_is_learned, record.prompt))
            cut = sum(len(row["prompt"] + row["response"]) > context_length for row in rows)
            counts.update(kept=1, earlier_turns=earlier, further_rows=len(rows) - 1, truncated_responses=cut)
            encoded += [row | {"response": row["response"][: context_length - len(row["prompt"])]} for row in rows]
            continue
        room_for_prompt = context_length - min(least, len(response))
        if len(prompt) > room_for_prompt:
            fitting = encode_prompt_within(tokenizer, record.prompt, room_for_prompt)
            if fitting is None:
                counts["skipped"] += 1
                continue
            prompt = fitting[0]
            counts["cut_prompts"] += 1
        room = context_length - len(prompt)
        if len(response) > room:
            response = response[:room]
            counts["truncated_responses"] += 1
        counts["kept"] += 1
        encoded.append({"prompt": prompt, "response": response})
    return encoded


def _is_learned(turn: Message) -> bool:
    return is_learned(turn.model_dump())


def encode_dialogue_rows(record: Demonstration, tokenizer: Any, context_length: int, least: int) -> list[Row]:
    """A dialogue in which the assistant spoke before: its row has `earlier` besides, 1 for each token of the prompt that the
    assistant wrote. None if no earlier turn is to be learned, or if a turn alone is too long for the context.

    If the dialogue does not fit, its oldest turns make rows of their own, so that each turn is learned once; a response may
    still reach past the context. `least`: as `min_response`.
    """
    if not any(map(_is_learned, record.prompt)):
        return []
    rows: list[Row] = []
    left = [*record.prompt, Message(role="assistant", content=record.response)]
    while left:
        turns = list(left)
        while True:
            silent = [i for i, turn in enumerate(turns[:-1]) if not _is_learned(turn)]
            ids, mask = encode_dialogue(tokenizer, turns, silent)
            start = max((i + 1 for i, learned in enumerate(mask) if not learned), default=0)
            if start <= context_length - min(least, len(ids) - start):
                break
            if not drop_oldest(turns):
                return []
        rows.append({"prompt": ids[:start], "response": ids[start:], "earlier": [int(x) for x in mask[:start]]})
        left = left[: len(left) - len(turns) + (turns[0].role == "system")]
        while left and not _is_learned(left[-1]):
            left.pop()
    return rows


def labels_of(row: Row, ignored: int) -> list[int]:
    """A row's tokens as labels, with `ignored` for those that are not learned."""
    earlier = row.get("earlier", [0] * len(row["prompt"]))
    prompt = [token if learned else ignored for token, learned in zip(row["prompt"], earlier, strict=True)]
    return prompt + row["response"]

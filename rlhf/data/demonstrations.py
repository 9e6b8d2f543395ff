"""Demonstrations: what SFT imitates, loaded and made into tokens that fit the context."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf.chat_template import encode_prompts, encode_responses
from rlhf.data.importers import SourceInfo, load_kind
from rlhf.data.prompts import encode_prompt_within
from rlhf.data.records import Demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_demonstrations(
    sources: Any, format: str = "auto", allow_partial: bool = False
) -> tuple[list[Demonstration], SourceInfo]:
    """The demonstrations of the sources in order.

    Raises: UserError if a source cannot be read, a row is bad or there is no demonstration.
    """
    return load_kind(sources, format, Demonstration, allow_partial)


def encode_demonstrations(
    records: Sequence[Demonstration],
    tokenizer: "PreTrainedTokenizerFast",
    context_length: int,
    *,
    min_response: int | None = None,
    counts: Counter[str] | None = None,
) -> list[dict[str, list[int]]]:
    """Encode demonstrations as {"prompt": ids, "response": ids}, together at most `context_length` tokens.

    A response that fits ends with its end token. One that does not is truncated and gets no end token, which its
    author did not write there. A prompt that leaves a response fewer than `min_response` tokens (a quarter of
    the context by default; all of a shorter response) is cut from the left, see `encode_prompt_within`; where
    not even that helps, the demonstration is skipped. `counts`, where given, is increased: kept,
    truncated_responses, cut_prompts, skipped.
    """
    least = context_length // 4 if min_response is None else min_response
    counts = Counter() if counts is None else counts
    prompts = encode_prompts(tokenizer, [record.prompt for record in records])
    responses = encode_responses(tokenizer, [record.response for record in records])
    encoded = []
    for record, prompt, response in zip(records, prompts, responses, strict=True):
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

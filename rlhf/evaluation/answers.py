"""A policy's responses to a list of prompts, as text: for `rlhf sample`, `rlhf generate` and the API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.data.chat_template import end_ids, response_text
from rlhf.data.prompts import encode_prompt_within
from rlhf.data.records import Message
from rlhf.engines.sampler import Key, sample


@dataclass(frozen=True, slots=True)
class Drawing:
    """How responses are sampled. A response depends only on (seed, key), the prompt and the model, not on its batch."""

    seed: int
    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False
    batch_size: int | None = None  # sequences decoded at once; None: as memory allows


@dataclass(frozen=True, slots=True)
class Answer:
    """One response. `ids` ends with the end token if there is one; `logprobs` are the ids', in nats, at the sampling temperature."""

    text: str
    ended: bool
    ids: list[int]
    logprobs: list[float]


def room_for(tokenizer: Any, max_new_tokens: int) -> tuple[int, int]:
    """The maximum tokens of a response, at most half of the context, and the tokens left for the prompt."""
    length = min(max_new_tokens, tokenizer.model_max_length // 2)
    return length, tokenizer.model_max_length - length


def fit_prompts(
    tokenizer: Any, prompts: Sequence[str | Sequence[Message]], room: int
) -> list[tuple[list[int], bool] | None]:
    """The tokens of each prompt, and whether it was cut to fit; None if it cannot fit."""
    return [encode_prompt_within(tokenizer, prompt, room) for prompt in prompts]


def draw_answers(
    policy: Any, tokenizer: Any, prompts: Sequence[list[int]], keys: Sequence[Key], how: Drawing
) -> list[Answer]:
    """One response to each prompt, in order; the keys distinguish several responses to one prompt."""
    samples = sample(
        policy,
        prompts,
        seed=how.seed,
        keys=keys,
        max_new_tokens=how.max_new_tokens,
        eos_token_id=end_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        temperature=how.temperature,
        greedy=how.greedy,
        batch_size=how.batch_size,
        settled=True,
    )
    return [
        Answer(response_text(tokenizer, ids), ended, ids, row[: len(ids)])
        for ids, ended, row in zip(samples.responses, samples.ended.tolist(), samples.logprobs.tolist(), strict=True)
    ]

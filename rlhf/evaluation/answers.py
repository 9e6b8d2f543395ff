"""Responses of a policy to prompts, as text; and of every policy of a run, which `rlhf evaluate` compares."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf.config import Config
from rlhf.data.chat_template import decode_response, end_ids, response_text
from rlhf.data.prompts import encode_prompt_within
from rlhf.data.records import Message, PromptRecord
from rlhf.data.tokenizer import encode_texts
from rlhf.engines.choosing import Key
from rlhf.engines.local import Samples
from rlhf.engines.sampling import SamplingEngine, make_sampler
from rlhf.evaluation.statistics import batched
from rlhf.gold.truth import Truth
from rlhf.runs.progress import progress
from rlhf.training.setup import load_frozen

TOGETHER = 32  # prompts whose responses are drawn together by `draw_in_turn`


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
    engine: SamplingEngine, tokenizer: Any, prompts: Sequence[list[int]], keys: Sequence[Key]
) -> list[Answer]:
    """One response to each prompt, in order; the keys distinguish several responses to one prompt."""
    samples = engine.sample(prompts, keys)
    return [
        Answer(response_text(tokenizer, ids), ended, ids, row[: len(ids)])
        for ids, ended, row in zip(samples.responses, samples.ended.tolist(), samples.logprobs.tolist(), strict=True)
    ]


def draw_in_turn(
    engine: SamplingEngine, tokenizer: Any, asked: Sequence[tuple[list[int], tuple]], count: int
) -> Iterator[list[Answer]]:
    """`count` responses to each prompt, which is given with its key; a few prompts are answered together."""
    for part in batched(asked, TOGETHER):
        prompts = [ids for ids, _ in part for _ in range(count)]
        keys = [(*key, j) for _, key in part for j in range(count)]
        yield from batched(draw_answers(engine, tokenizer, prompts, keys), count)


# One policy's responses, as `answer_all` gives them.
Answers = dict[str, list[Any]]


def answer_all(
    config: Config,
    models: dict[str, Path],
    records: list[PromptRecord],
    prompts: list[list[int]],
    tokenizer: Any,
    device: torch.device,
    truth: Truth | None = None,
) -> dict[str, Answers]:
    """{"ids", "texts", "ended"}, lists per prompt of `evaluate.samples` responses at temperature 1, and the greedy ones, of each policy.

    If the truth knows how a text begins that asks for an answer, the base model is prompted twice: with the chat template, which
    it has never seen, and with that text ("GPT" and "GPT prompted" of Ouyang et al. 2022, section 3.5).
    """
    answers, decode, count = {}, functools.partial(decode_response, tokenizer), config.evaluate.samples
    with progress(len(models) * len(prompts), "evaluate", unit="prompt") as bar:
        for name, folder in models.items():
            policy, policy_prompts, ends = load_frozen(config, folder, device), prompts, end_ids(tokenizer)
            read: Callable[[list[int]], str] = functools.partial(response_text, tokenizer)
            if name == "base_prompted" and truth is not None:  # the beginning of a text like those it was trained on
                texts: list[Any] = [truth.base_text(record) for record in records]
                policy_prompts = encode_texts(tokenizer, texts)  # the answer follows a line with the speaker's name
                ends, read = [tokenizer.bos_token_id], lambda ids: decode(ids).split("\n", 1)[-1].strip()
            engine = make_sampler(config, policy, tokenizer, eos_token_id=ends)
            repeated = [prompt for prompt in policy_prompts for _ in range(count)]
            keys = [("evaluate", name, i, j) for i in range(len(prompts)) for j in range(count)]
            drawn = unpack(engine.sample(repeated, keys), ends, read, count)
            greedy = unpack(engine.sample(policy_prompts, greedy=True), ends, read, 1)
            greedy = {f"greedy_{key}": value for key, value in greedy.items()}
            answers[name] = {"prompts": policy_prompts} | drawn | greedy
            bar.update(len(prompts))
    return answers


def unpack(
    samples: Samples, ends: list[int], read: Callable[[list[int]], str], count: int
) -> dict[str, list[list[Any]]]:
    """read: the text of a response's tokens without its end token."""
    texts = [read(ids[:-1] if ids and ids[-1] in ends else ids) for ids in samples.responses]
    flat: dict[str, list[Any]] = {"ids": samples.responses, "texts": texts, "ended": samples.ended.tolist()}
    return {name: batched(values, count) for name, values in flat.items()}

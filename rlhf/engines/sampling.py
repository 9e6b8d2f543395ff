"""Who samples: the interface of all engines, and `make_sampler`, which chooses one for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlhf.config import Config
from rlhf.data.chat_template import end_ids
from rlhf.engines.choosing import Key
from rlhf.engines.local import Prompts, Samples, Sampling
from rlhf.engines.native import NativeEngine
from rlhf.engines.transformers_generate import GenerateEngine
from rlhf.model.interface import lm


class SamplingEngine(Protocol):
    """Draws responses from one model. `changes` are fields of `Sampling` that differ from the engine's own for this call."""

    load_seconds: float  # of the last `load`

    def sample(self, prompts: Prompts, keys: Sequence[Key] | None = None, **changes: Any) -> Samples:
        """One response to each prompt.

        keys: one int, str, or tuple of them per prompt; (seed, key) fixes the prompt's random numbers (None: its index). The
        order of the prompts and the batch change samples only through rounding of the logits (in bfloat16 this changes a token now
        and then, and with it the rest of the response). The log-probs are those of the full
        softmax at `temperature`. Dropout is off meanwhile; afterwards every module has its former training flag.

        Raises: UserError for a prompt that is empty or leaves no room for max_new_tokens in the context, for settings out
        of range, and for keys that do not match the prompts.
        """

    def load(self, model: Any) -> None:
        """Sample from this model's present weights from now on."""

    def sleep(self) -> None:
        """Give back memory until `wake`: training follows."""

    def wake(self) -> None:
        """Be ready to `load` and `sample` again."""


def make_sampler(config: Config, model: Any, tokenizer: Any, **changes: Any) -> SamplingEngine:
    """The engine of rollout.engine for a model, with the run's seed, length of responses and batch, and the tokenizer's end tokens, unless
    `changes` say otherwise.
    """
    of_run = {
        "seed": config.seed,
        "max_new_tokens": config.rollout.max_new_tokens,
        "batch_size": config.rollout.batch_size,
        "eos_token_id": end_ids(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    }
    settings = Sampling(**{**of_run, **changes})
    if config.rollout.engine == "vllm":
        from rlhf.engines.vllm import VllmEngine

        return VllmEngine(config, model, settings)
    return sampler_for(model, settings)


def sampler_for(model: Any, settings: Sampling) -> SamplingEngine:
    """The native sampler for our GPT, transformers' `generate` for other classes."""
    return (NativeEngine if lm(model).native else GenerateEngine)(model, settings)


def sample(model: Any, prompts: Prompts, keys: Sequence[Key] | None = None, **settings: Any) -> Samples:
    """`SamplingEngine.sample` of a model, with the fields of `Sampling`."""
    return sampler_for(model, Sampling(**settings)).sample(prompts, keys)

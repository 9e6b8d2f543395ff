"""Who samples: the interface of all engines, the one that calls transformers' `generate`, and `make_sampler`, which chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rlhf.config import Config
from rlhf.data.chat_template import end_ids
from rlhf.engines.choosing import Choice, Key, choose_tokens
from rlhf.engines.local import LocalEngine, Prompts, Samples, Sampling
from rlhf.engines.native import NativeEngine
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


class _ChooseByUniform(LogitsProcessor):
    """Leaves only the token that inverse transform sampling picks, so that `generate` takes it by argmax; keeps its log-prob."""

    def __init__(self, uniforms: Tensor, width: int, choice: Choice):
        self.uniforms, self.width, self.choice = uniforms, width, choice
        self.logprobs = torch.zeros_like(uniforms)  # (B, steps)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.width
        tokens, self.logprobs[:, step] = choose_tokens(scores, self.uniforms[:, step], self.choice)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)


class GenerateEngine(LocalEngine):
    """Any of transformers' models, through its `generate`."""

    def draw(self, prompts: Prompts, uniforms: Tensor, eos: Tensor, pad: int, choice: Choice) -> tuple[Tensor, Tensor]:
        model = self.model
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=eos.device)
        width, steps = int(lengths.max()), uniforms.shape[1]
        left = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=eos.device)  # (B, P)
        mask = torch.arange(width, device=eos.device) >= (width - lengths)[:, None]
        choose, generation_config = _ChooseByUniform(uniforms, width, choice), model.generation_config
        model.generation_config = GenerationConfig()  # its penalties and cuts would change the distribution
        try:
            out = model.generate(
                left,
                attention_mask=mask.long(),
                do_sample=False,
                num_beams=1,
                max_new_tokens=steps,
                eos_token_id=eos.tolist() or None,
                pad_token_id=pad,
                logits_processor=LogitsProcessorList([choose]),
            )
        finally:
            model.generation_config = generation_config
        return F.pad(out[:, width:], (0, width + steps - out.shape[1]), value=pad), choose.logprobs


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

"""Who samples: the native sampler of our GPT, which takes the log-probs on the way and drops finished sequences from
the batch, transformers' `generate` for other classes, and `make_sampler`, which chooses.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList

from rlhf.config import Config
from rlhf.data.chat_template import end_ids
from rlhf.engines.choosing import Key, Samples, Sampling, SamplingEngine, choose_tokens
from rlhf.engines.decoder import GROWTH, Decoder, Prompts, on_gpu, power_of_two
from rlhf.model.batching import right_pad
from rlhf.model.blocks import SwitchMLP
from rlhf.model.interface import lm
from rlhf.model.linear import Linear, products_cast
from rlhf.ops.fast import packed_weights
from rlhf.system.memory import GB

LOOK_EVERY = 8  # steps on a GPU between two checks for ended rows, since a check waits for the GPU
PACKED_STEPS = 8  # new tokens from which packing the weights (a few passes over them) saves time


class NativeEngine(SamplingEngine):
    """Our GPT with a preallocated key-value cache."""

    def __init__(self, model: Any, settings: Sampling):
        super().__init__(model, settings)
        self.lasting: Decoder | None = None  # on a GPU it stays from call to call
        # on a GPU, by blocks of columns, measured once: its cache stays, so later there is less memory free
        self.most_at = lru_cache(None)(lambda blocks: super(NativeEngine, self).most_rows(blocks * GROWTH))

    def draw(self, prompts: Prompts, uniforms: Tensor, eos: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
        steps = how.max_new_tokens
        sampled = torch.full(uniforms.shape, how.pad_token_id, dtype=torch.int64, device=eos.device)
        logprobs = torch.zeros(sampled.shape, device=eos.device)
        rows = torch.arange(len(uniforms), device=eos.device)  # the prompts that are still in the batch
        # Rows that have ended stay until the next check; their further tokens are ignored.
        ended = torch.zeros(len(rows), dtype=torch.bool, device=eos.device)
        decoder = self.lasting
        assert decoder is not None, "within `prepared`"
        decoder.clear()
        if not on_gpu(self.model):
            decoder.reserve(len(prompts), max(map(len, prompts)) + steps)
        every, logits = LOOK_EVERY if on_gpu(self.model) else 1, decoder.advance(rows, prompts)
        for step in range(steps):
            tokens, logp = choose_tokens(logits, uniforms[:, step], how)
            ended = ended | torch.isin(tokens, eos)
            sampled[rows, step], logprobs[rows, step] = tokens, logp
            if step + 1 == steps:
                break
            live = len(ended) if (step + 1) % every else len(ended) - int(ended.sum())
            if live == 0:
                break
            if (left := decoder.carried(live, len(ended))) < len(ended):
                # the first ended rows stay if more rows are carried than live
                kept = decoder.drop(ended & (ended.cumsum(0) > left - live))
                rows, tokens, uniforms, ended = rows[kept], tokens[kept], uniforms[kept], ended[kept]
            logits = decoder.step(tokens)
        return sampled, logprobs

    def most_rows(self, columns: int) -> int:
        return self.most_at(-(-columns // GROWTH)) if on_gpu(self.model) else super().most_rows(columns)

    @contextmanager
    def prepared(self, rows: int, columns: int, steps: int) -> Iterator[None]:
        if not on_gpu(self.model):
            with products_cast(self.model), packed(self.model, rows) if steps >= PACKED_STEPS else nullcontext():
                self.lasting = Decoder(self.model)
                yield
                self.lasting = None
            return
        decoder = self.lasting = self.lasting or Decoder(self.model)
        decoder.load(self.model)
        decoder.clear()
        # room for what earlier calls needed too, so that recorded steps stay valid
        wide = max(columns, decoder.columns)
        columns = wide if self.most_rows(wide) >= rows else columns
        decoder.reserve(power_of_two(min(self.most_rows(columns), max(rows, decoder.rows))), columns)
        yield


def packed(model: nn.Module, rows: int) -> AbstractContextManager[int]:
    """`packed_weights` of a model for this many sequences. Experts' products have any number of rows, so theirs are not packed."""
    routed = {part for layer in model.modules() if isinstance(layer, SwitchMLP) for part in layer.modules()}
    layers = (layer for layer in model.modules() if isinstance(layer, Linear) and layer not in routed)
    return packed_weights([layer.weight for layer in layers], rows)


class GenerateEngine(SamplingEngine):
    """Any of transformers' models, through its `generate`."""

    def draw(self, prompts: Prompts, uniforms: Tensor, eos: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
        model, steps, pad = self.model, how.max_new_tokens, how.pad_token_id
        left, lengths = (x.to(eos.device) for x in right_pad(prompts, pad, "left"))  # (B, P), (B,)
        width = left.shape[1]
        mask = torch.arange(width, device=eos.device) >= (width - lengths)[:, None]
        logprobs, generation_config = torch.zeros_like(uniforms), model.generation_config

        def choose(tokens: Tensor, scores: Tensor) -> Tensor:
            """Leaves only the token that inverse transform sampling picks, so that `generate` takes it by argmax."""
            step = tokens.shape[1] - width
            chosen, logprobs[:, step] = choose_tokens(scores, uniforms[:, step], how)
            return torch.full_like(scores, -torch.inf).scatter(-1, chosen[:, None], 0.0)

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
        return F.pad(out[:, width:], (0, width + steps - out.shape[1]), value=pad), logprobs


def make_sampler(config: Config, model: Any, tokenizer: Any, **changes: Any) -> SamplingEngine:
    """The engine of rollout.engine for a model, with the run's seed, length of responses and batch, and the tokenizer's
    end tokens, unless `changes` say otherwise.
    """
    budget = config.memory.budget_gb
    of_run = {
        "seed": config.seed,
        "max_new_tokens": config.rollout.max_new_tokens,
        "batch_size": config.rollout.batch_size,
        "cache_bytes": None if budget is None else int(budget * GB / 8),
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

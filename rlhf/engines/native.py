"""The native sampler: our GPT with a preallocated key-value cache. It takes the log-probs while it samples and drops finished
sequences from the batch. Rollouts take most of PPO's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.engines.choosing import Choice, choose_tokens
from rlhf.engines.decoder import Decoder, make_decoder
from rlhf.engines.local import LocalEngine, Prompts, evaluating
from rlhf.model.blocks import SwitchMLP
from rlhf.model.linear import Linear
from rlhf.ops.fast import packed_weights

LOOK_EVERY = 8  # steps on a GPU between two checks for ended rows, since a check waits for the GPU
PACKED_STEPS = 8  # new tokens from which packing the weights (a few passes over them) saves time


class NativeEngine(LocalEngine):
    def draw(self, prompts: Prompts, uniforms: Tensor, eos: Tensor, pad: int, choice: Choice) -> tuple[Tensor, Tensor]:
        tokens = torch.full(uniforms.shape[:2], pad, dtype=torch.int64, device=eos.device)
        logprobs = torch.zeros(tokens.shape, device=eos.device)
        decoder = make_decoder(self.model, prompts, uniforms.shape[1], pad)
        for step, (rows, chosen, logp, _) in enumerate(_decode(decoder, uniforms, eos, choice)):
            tokens[rows, step] = chosen
            logprobs[rows, step] = logp
        return tokens, logprobs

    @torch.inference_mode()
    def draw_steps(self, prompt: Sequence[int], uniforms: Tensor, eos: Tensor, choice: Choice) -> Iterator[int]:
        with evaluating(self.model):
            decoder = make_decoder(self.model, [prompt], uniforms.shape[1], pad=0)
            for _, tokens, _, ended in _decode(decoder, uniforms, eos, choice):
                yield int(tokens)
                if bool(ended):
                    return

    def prepared(self, rows: int, steps: int) -> AbstractContextManager[Any]:
        return packed(self.model, rows) if steps >= PACKED_STEPS else nullcontext()


def _decode(decoder: Decoder, uniforms: Tensor, eos: Tensor, choice: Choice) -> Iterator[tuple[Tensor, ...]]:
    """Yields (rows, tokens, log-probs, ended) per step; `rows` are the prompts still in the batch.

    Rows that have ended stay until the next check; their further tokens are ignored.
    """
    every = 1 if eos.device.type == "cpu" else LOOK_EVERY
    rows = torch.arange(len(uniforms), device=eos.device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=eos.device)
    logits = decoder.prefill()
    for step in range(uniforms.shape[1]):
        tokens, logp = choose_tokens(logits, uniforms[:, step], choice)
        ended = ended | torch.isin(tokens, eos)
        yield rows, tokens, logp, ended
        if step + 1 == uniforms.shape[1]:
            return
        live = len(ended) if (step + 1) % every else len(ended) - int(ended.sum())
        if live == 0:
            return
        if (carried := rows_carried(live, len(ended))) < len(ended):
            # the first ended rows stay if more rows are carried than live
            kept = decoder.drop(ended & (ended.cumsum(0) > carried - live))
            rows, tokens, uniforms, ended = rows[kept], tokens[kept], uniforms[kept], ended[kept]
        logits = decoder.step(tokens)


def packed(model: nn.Module, rows: int) -> AbstractContextManager[int]:
    """`packed_weights` of a model for this many sequences. Experts' products have any number of rows, so theirs are not packed."""
    routed = {part for layer in model.modules() if isinstance(layer, SwitchMLP) for part in layer.modules()}
    layers = (layer for layer in model.modules() if isinstance(layer, Linear) and layer not in routed)
    return packed_weights([layer.weight for layer in layers], rows)


def rows_carried(live: int, rows: int) -> int:
    """The number of rows with which a batch continues: keeping a few ended ones costs less than removing them.

    Packed products are compiled and CUDA graphs recorded for each number of rows, so only numbers of three significant bits occur.
    """
    step = 1 << max(0, live.bit_length() - 3)
    return min(rows, -(-live // step) * step)

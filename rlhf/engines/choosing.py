"""Choosing a token from logits: random numbers per prompt, top_p, inverse transform sampling.

The token depends only on (seed, key, step) and the logits, never on the other prompts of the batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.config.setting import LEAST_TEMPERATURE
from rlhf.errors import UserError
from rlhf.ops import fast

Key = int | str | tuple

CDF_BLOCK = 64  # tokens that are summed together before the cumulative distribution is searched


@dataclass(slots=True)
class Choice:
    """How a token is chosen from logits; checked once."""

    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        problems = []
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            problems.append(f"temperature={self.temperature} must be at least {LEAST_TEMPERATURE} (or ask for greedy)")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p} must be in (0, 1]")

        if problems:
            raise UserError("sampling: " + "; ".join(problems))


def make_uniforms(seed: int, keys: Sequence[Key], steps: int) -> Tensor:
    """Uniform numbers (len(keys), steps) float32 in [0, 1), a function of (seed, key, step) only."""
    hashes = np.array([hashed(seed, key) for key in keys], dtype=np.uint64)
    return _as_uniforms(hashes[:, None], np.arange(steps, dtype=np.uint64))


def uniforms_at(hashes: Sequence[int], steps: Sequence[int]) -> Tensor:
    """The uniform numbers (B,) of one step per row; hashes: `hashed(seed, key)`."""
    return _as_uniforms(np.array(hashes, dtype=np.uint64), np.array(steps, dtype=np.uint64))


def hashed(seed: int, key: Key) -> int:
    """A number of 64 bits for (seed, key)."""
    return int.from_bytes(blake2b(repr((seed, key)).encode(), digest_size=8).digest(), sys.byteorder)


def _as_uniforms(hashes: Any, steps: Any) -> Tensor:
    """Uniform numbers for hashes of (seed, key) and steps from 0, both uint64 arrays that broadcast.

    A counter-based generator: the mixing function of Steele et al. 2014 (splitmix64) over hash + step.
    """
    x = hashes + (steps + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words = x ^ (x >> np.uint64(31))
    return torch.from_numpy((words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))


def choose_tokens(logits: Tensor, uniforms: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Tokens (B,) int64 and their log-probs (B,) float32 from logits (B, V) and uniforms (B,).

    Inverse transform sampling: the first token whose cumulative probability exceeds u. The log-prob is that
    of softmax(logits / temperature), before the cut by top_p.
    """
    if not choice.greedy and choice.top_p == 1.0 and fast.can_invert(logits):
        return fast.invert(logits, uniforms, choice.temperature)
    logits = logits.float() if choice.temperature == 1.0 else logits.float() / choice.temperature
    probs = torch.softmax(logits, dim=-1)
    cut = _cut(probs, choice.top_p)
    tokens = logits.argmax(-1, keepdim=True) if choice.greedy else _invert(cut, uniforms[:, None])
    # the probability of a drawn token is well above the smallest float, so its logarithm is as accurate as a
    # log-softmax's, which would take a second pass of exponentials
    return tokens[:, 0], probs.gather(-1, tokens)[:, 0].log()


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token (B, 1) at which the cumulative sum of probs (B, V) exceeds uniforms (B, 1) times their total.

    First the block of tokens, then the position in it: a running sum over all of V is slow on a CPU.
    """
    size = probs.shape[-1]
    blocks = F.pad(probs, (0, -size % CDF_BLOCK)).unflatten(-1, (-1, CDF_BLOCK))  # (B, V/C, C)
    cumulative = blocks.sum(-1).cumsum(-1)  # (B, V/C)
    # u is at most 1 - 2^-24, so the threshold is below the total even after rounding
    threshold = uniforms * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, threshold, right=True).clamp(max=cumulative.shape[1] - 1)
    before = F.pad(cumulative, (1, 0)).gather(-1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, CDF_BLOCK))[:, 0].cumsum(-1)  # (B, C)
    # a block's two sums differ by rounding: the threshold must stay below the second one
    sought = torch.minimum(threshold - before, inside[:, -1:] * (1 - 2**-23))
    tokens = block * CDF_BLOCK + torch.searchsorted(inside, sought, right=True)
    # NaN logits give an index past the vocabulary; their log-prob is NaN too, which is checked later
    return tokens.clamp(max=size - 1)


def _cut(probs: Tensor, top_p: float) -> Tensor:
    """Keep the most probable tokens that together reach `top_p`; 0 elsewhere."""
    if top_p == 1.0:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered  # mass of the likelier tokens: 0 for the first, so it stays
    ordered = ordered.masked_fill(before >= top_p * ordered.sum(-1, keepdim=True), 0.0)
    return torch.zeros_like(probs).scatter(-1, order, ordered)

"""What all engines share: how responses are drawn, the interface, choosing a token from logits (random numbers per
prompt, top_p, inverse transform sampling).

Tokens depend only on (seed, key, step), the prompt and the model, never on the other prompts of the batch.
"""

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.config.setting import LEAST_TEMPERATURE, listed
from rlhf.engines.decoder import Prompts, cached_in
from rlhf.errors import UserError
from rlhf.model.batching import by_length
from rlhf.model.interface import evaluating, lm
from rlhf.model.linear import products_cast
from rlhf.ops import fast
from rlhf.ops.masked import computed_in
from rlhf.planning.formulas import shape_of_config
from rlhf.system.memory import free_bytes

Key = int | str | tuple

MAX_BATCH = 256
# Bounds in bytes for a batch's keys and values on a CPU.
MOST_CACHE_BYTES, LEAST_CACHE_BYTES = 2**30, 64 * 2**20
CDF_BLOCK = 64  # tokens that are summed together before the cumulative distribution is searched


@dataclass(frozen=True, slots=True)
class Choice:
    """How a token is chosen from logits; checked once."""

    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            least = f"must be at least {LEAST_TEMPERATURE} (or ask for greedy)"
            raise UserError(f"sampling: temperature={self.temperature} {least}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling: top_p={self.top_p} must be in (0, 1]")


class Samples(NamedTuple):
    """Responses to B prompts, in the caller's order; A is the longest response."""

    responses: list[list[int]]  # B lists of token ids, with the end token if there is one
    logprobs: Tensor  # (B, A) float32 nats, 0 where mask is False
    mask: Tensor  # (B, A) bool, True at response tokens
    ended: Tensor  # (B,) bool, True if the response is complete: it has its end token, or the form has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Choice):
    """How responses are drawn, token by token from softmax(logits / temperature)."""

    max_new_tokens: int
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int = 0
    seed: int = 0
    batch_size: int | None = None  # most prompts decoded together; fewer if the key-value cache has no room for them
    cache_bytes: int | None = None  # most of that cache on a CPU; None: as in `default_batch`

    @property
    def ends(self) -> list[int]:
        return listed(self.eos_token_id)


def make_uniforms(seed: int, keys: Sequence[Key], steps: int) -> Tensor:
    """Uniform numbers (len(keys), steps) float32 in [0, 1), a function of (seed, key, step) only."""
    return uniforms_at(np.array([hashed(seed, key) for key in keys], np.uint64)[:, None], np.arange(steps))


def hashed(seed: int, key: Key) -> int:
    """A number of 64 bits for (seed, key)."""
    return int.from_bytes(blake2b(repr((seed, key)).encode(), digest_size=8).digest(), sys.byteorder)


def uniforms_at(hashes: Any, steps: Any) -> Tensor:
    """Uniform numbers for hashes of (seed, key) and steps from 0, which broadcast.

    A counter-based generator: the mixing function of Steele et al. 2014 (splitmix64) over hash + step.
    """
    x = np.array(hashes, np.uint64) + (np.array(steps, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
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
    tokens = logits.argmax(-1, keepdim=True) if choice.greedy else _invert(_cut(probs, choice.top_p), uniforms[:, None])
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


class SamplingEngine:
    """Draws responses from one model, here in this process. `changes` are fields of `Sampling` that differ for this call."""

    load_seconds = 0.0  # of the last `load`

    def __init__(self, model: Any, settings: Sampling):
        self.model, self.settings = model, settings

    def sample(self, prompts: Prompts, keys: Sequence[Key] | None = None, **changes: Any) -> Samples:
        """One response to each prompt.

        keys: one int, str, or tuple of them per prompt; (seed, key) fixes the prompt's random numbers (None: its
        index). The order of the prompts and the batch change samples only through rounding of the logits. The log-probs
        are those of the full softmax at `temperature`. Dropout is off meanwhile.
        Raises: UserError for a prompt that is empty or leaves no room for max_new_tokens in the context, and for
        settings out of range.
        """
        how = replace(self.settings, **changes)
        keys = check_sampling(prompts, keys, how, lm(self.model).context)
        steps, lengths = how.max_new_tokens, [len(prompt) for prompt in prompts]
        device = next(self.model.parameters()).device
        eos = torch.tensor(how.ends, dtype=torch.int64, device=device)
        uniforms = make_uniforms(how.seed, keys, steps).to(device)
        columns = max(lengths, default=1) + steps
        size = min(how.batch_size or MAX_BATCH, self.most_rows(columns))
        tokens = torch.full((len(prompts), steps), how.pad_token_id, dtype=torch.int64, device=device)
        logprobs = torch.zeros(tokens.shape, device=device)
        rows = min(size, len(prompts))
        with evaluating(self.model), torch.inference_mode(), self.prepared(rows, columns, steps):
            for part in by_length(lengths, size):
                tokens[part], logprobs[part] = self.draw([prompts[i] for i in part], uniforms[part], eos, how)
        return make_samples(tokens, logprobs, eos)

    def draw(self, prompts: Prompts, uniforms: Tensor, eos: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
        """Tokens (B, max_new_tokens) and log-probs of the same shape; values after an end token are meaningless."""
        raise NotImplementedError

    def most_rows(self, columns: int) -> int:
        """The batch for rows of this many tokens."""
        return default_batch(self.model, columns, self.settings.cache_bytes)

    def prepared(self, rows: int, columns: int, steps: int) -> AbstractContextManager[Any]:
        """A context in which batches of at most `rows` are drawn, of at most `columns` tokens, of which `steps` are new."""
        return products_cast(self.model)

    def load(self, model: Any) -> None:
        """Sample from this model's present weights from now on."""
        self.model = model

    def sleep(self) -> None:
        """Give back memory until `wake`: training follows."""

    def wake(self) -> None:
        """Be ready to `load` and `sample` again."""


def check_sampling(prompts: Prompts, keys: Sequence[Key] | None, how: Sampling, context: int | None) -> Sequence[Key]:
    """One key per prompt. Raises: UserError for prompts that do not fit."""
    steps = how.max_new_tokens
    if steps < 1:
        raise UserError(f"sampling: max_new_tokens={steps} must be at least 1")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"sampling: prompt {index} has no tokens: give each prompt at least one")
        if context is not None and len(prompt) + steps > context:
            asked = f"prompt {index} has {len(prompt)} tokens and max_new_tokens is {steps}, the context is {context}"
            raise UserError(f"sampling: {asked}: shorten the prompt or lower it")
    return range(len(prompts)) if keys is None else keys


def make_samples(tokens: Tensor, logprobs: Tensor, eos: Tensor) -> Samples:
    """Cut tokens and log-probs (B, max_new_tokens) after the first end token of each row."""
    is_end = torch.isin(tokens, eos)
    ends = is_end.any(-1)
    lengths = torch.where(ends, is_end.int().argmax(-1) + 1, tokens.shape[1])
    ended = ends | (len(eos) == 0)
    longest = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(longest, device=tokens.device) < lengths[:, None]
    responses = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return Samples(responses, logprobs[:, :longest].masked_fill(~mask, 0.0), mask, ended)


def default_batch(model: Any, columns: int, most_bytes: int | None = None) -> int:
    """The number of rows whose keys and values fit the bound.

    On a CPU eight times the weights, but 64 MiB at least, and 1 GiB or twice the weights at most: each step reads all
    weights, whatever the batch, and at the end of each batch few rows are left; `most_bytes` lowers it. On a GPU an
    eighth of its free memory.
    """
    shape, parameter = shape_of_config(model.config.get_text_config()), next(model.parameters())
    kind = cached_in(model) if lm(model).native else computed_in(parameter)
    row = 2 * shape.n_layer * shape.kv_width * columns * kind.itemsize
    if parameter.device.type == "cuda":
        room = free_bytes(parameter.device) // 8
    else:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        room = max(LEAST_CACHE_BYTES, 2 * weights, min(8 * weights, MOST_CACHE_BYTES))
        room = room if most_bytes is None else min(room, most_bytes)
    return max(1, room // row)

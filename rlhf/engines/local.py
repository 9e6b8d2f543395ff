"""What all engines share whose model is in this process: checks, random numbers, batches of similar length, `Samples`.

Tokens depend only on (seed, key, step), the prompt and the model, never on the other prompts of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.engines.choosing import Choice, Key, make_uniforms
from rlhf.engines.decoder import Prompts, cached_in
from rlhf.errors import UserError
from rlhf.model.batching import by_length
from rlhf.model.interface import lm
from rlhf.model.linear import products_cast
from rlhf.ops.masked import computed_in

MAX_BATCH = 256
# Bounds in bytes for a batch's keys and values on a CPU.
MOST_CACHE_BYTES, LEAST_CACHE_BYTES = 2**30, 64 * 2**20


class Samples(NamedTuple):
    """Responses to B prompts, in the caller's order; A is the longest response."""

    responses: list[list[int]]  # B lists of token ids, with the end token if there is one
    logprobs: Tensor  # (B, A) float32 nats, 0 where mask is False
    mask: Tensor  # (B, A) bool, True at response tokens
    ended: Tensor  # (B,) bool, True if the response is complete: it has its end token, or the form has none


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn, token by token from softmax(logits / temperature)."""

    max_new_tokens: int
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False
    seed: int = 0
    batch_size: int | None = None  # most prompts decoded together; fewer if the key-value cache has no room for them

    @property
    def ends(self) -> list[int]:
        ids = [] if self.eos_token_id is None else self.eos_token_id
        return [ids] if isinstance(ids, int) else list(ids)


class LocalEngine(ABC):
    """An engine whose model is in this process. It keeps little between two calls, so `sleep` and `wake` have nothing to do."""

    load_seconds = 0.0

    def __init__(self, model: Any, settings: Sampling):
        self.model, self.settings = model, settings

    @abstractmethod
    def draw(self, prompts: Prompts, uniforms: Tensor, eos: Tensor, pad: int, choice: Choice) -> tuple[Tensor, Tensor]:
        """Tokens (B, max_new_tokens) and log-probs of the same shape; values after an end token are meaningless."""

    def most_rows(self, columns: int) -> int:
        """The batch for rows of this many tokens."""
        return default_batch(self.model, columns)

    def prepared(self, rows: int, columns: int, steps: int) -> AbstractContextManager[Any]:
        """A context in which batches of at most `rows` are drawn, of at most `columns` tokens, of which `steps` are new."""
        return products_cast(self.model)

    def load(self, model: Any) -> None:
        self.model = model

    def sleep(self) -> None:
        return None

    def wake(self) -> None:
        return None

    def sample(self, prompts: Prompts, keys: Sequence[Key] | None = None, **changes: Any) -> Samples:
        how = replace(self.settings, **changes)
        choice, steps = check_sampling(prompts, how, lm(self.model).context), how.max_new_tokens
        keys = check_keys(prompts, keys)
        device = next(self.model.parameters()).device
        eos, uniforms = torch.tensor(how.ends, dtype=torch.int64), make_uniforms(how.seed, keys, steps)
        eos, uniforms = eos.to(device), uniforms.to(device)
        lengths = [len(prompt) for prompt in prompts]
        columns = max(lengths, default=1) + steps
        size = min(how.batch_size or MAX_BATCH, self.most_rows(columns))
        tokens = torch.full((len(prompts), steps), how.pad_token_id, dtype=torch.int64, device=device)
        logprobs = torch.zeros(tokens.shape, device=device)
        rows = min(size, len(prompts))
        with evaluating(self.model), torch.inference_mode(), self.prepared(rows, columns, steps):
            for part in by_length(lengths, size):
                drawn = self.draw([prompts[i] for i in part], uniforms[part], eos, how.pad_token_id, choice)
                tokens[part], logprobs[part] = drawn
        return make_samples(tokens, logprobs, eos)


def check_sampling(prompts: Prompts, how: Sampling, context: int | None) -> Choice:
    """How tokens are chosen. Raises: UserError for prompts or settings that do not fit."""
    choice, steps = Choice(how.temperature, how.top_p, how.greedy), how.max_new_tokens
    if steps < 1:
        raise UserError(f"sampling: max_new_tokens={steps} must be at least 1")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"sampling: prompt {index} has no tokens: give each prompt at least one")
        total = len(prompt) + steps
        if context is not None and total > context:
            raise UserError(
                f"sampling: prompt {index} has {len(prompt)} tokens and max_new_tokens is {steps}, "
                f"together {total}, the model's context is {context}: shorten the prompt or lower it"
            )
    return choice


def check_keys(prompts: Prompts, keys: Sequence[Key] | None) -> Sequence[Key]:
    """One key per prompt: the given ones, or the prompts' indices. Raises: UserError if their number differs."""
    if keys is not None and len(keys) != len(prompts):
        raise UserError(f"sampling: {len(keys)} keys for {len(prompts)} prompts: give one key per prompt")
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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in eval mode; afterwards the modules that were in training mode are so again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def default_batch(model: Any, columns: int) -> int:
    """The number of rows whose keys and values fit the bound.

    On a CPU eight times the weights, but 64 MiB at least, and 1 GiB or twice the weights at most: each step reads all weights,
    whatever the batch, and at the end of each batch few rows are left. On a GPU an eighth of its free memory.
    """
    config, parameter = model.config.get_text_config(), next(model.parameters())
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    numbers = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width * columns
    row = numbers * (cached_in(model) if lm(model).native else computed_in(parameter)).itemsize
    if parameter.device.type == "cuda":
        room = torch.cuda.mem_get_info(parameter.device)[0] // 8
    else:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        room = max(LEAST_CACHE_BYTES, 2 * weights, min(8 * weights, MOST_CACHE_BYTES))
    return max(1, min(MAX_BATCH, room // row))

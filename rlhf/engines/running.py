"""A running batch whose sequences join and leave between tokens: the sampler for a server.

`RunningDecoder` is the decoder with a cache in which every row has its own columns; a step is the decoder's. `RunningBatch` samples
with it as `sample` does: tokens depend only on (seed, key, step), the prompt and the model. Models that are not ours are
stepped one sequence at a time, each with its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.engines.choosing import Choice, Key, choose_tokens, hashed, uniforms_at
from rlhf.engines.decoder import RowDecoder
from rlhf.engines.local import default_batch
from rlhf.engines.native import rows_carried
from rlhf.engines.transformers_generate import next_logits
from rlhf.model.gpt import GPTForCausalLM
from rlhf.model.interface import lm

PREFILL_TOKENS = 2048  # tokens of prompts that are read between two tokens of the others; one prompt may be longer
GROWTH = 64  # columns by which the cache grows


@dataclass(slots=True, eq=False)
class Response:
    """One response in progress."""

    prompt: list[int]
    choice: Choice
    seed: int
    key: Key
    max_new_tokens: int
    ends: frozenset[int]
    alternatives: int = 0  # number of alternatives to report with each token
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)  # per token, the alternatives and their log-probs
    hash: int = field(init=False)  # of seed and key, for its random numbers

    def __post_init__(self) -> None:
        self.hash = hashed(self.seed, self.key)

    @property
    def ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.ends

    @property
    def finished(self) -> bool:
        return self.ended or len(self.tokens) == self.max_new_tokens

    @property
    def columns(self) -> int:
        """The columns of keys and values that it may need."""
        return len(self.prompt) + self.max_new_tokens


class RunningDecoder(RowDecoder):
    """Our GPT over a cache of `rows` rows, of which the first `live` are in use."""

    def __init__(self, model: GPTForCausalLM, rows: int):
        super().__init__(model, [[0]], 1, pad=0)
        self.most = rows
        self.rows, self.live, self.columns = 0, 0, 0
        self.device = self.tokens.device
        self.all_lengths = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.whole = torch.zeros(0)  # keys and values of every layer, (layers, 2, rows, heads, columns, D/H)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` sequences of `columns` tokens; an unused cache may shrink to that, a used one only grows."""
        rows, columns = min(self.most, 1 << (rows - 1).bit_length()), -(-columns // GROWTH) * GROWTH
        if self.live:
            rows, columns = max(rows, self.rows), max(columns, self.columns)
        if (rows, columns) == (self.rows, self.columns):
            return
        config = self.model.config
        self.shape = (rows, config.n_kv_head, columns, config.head_dim)
        weight = self.trunk.embed_tokens.weight
        before = self.whole
        self.whole = weight.new_zeros((len(self.trunk.layers), 2, *self.shape), dtype=self.cache_kind)
        if self.live:
            self.whole[:, :, : self.live, :, : self.columns] = before[:, :, : self.live]
        self.all_lengths = F.pad(self.all_lengths[: self.live], (0, rows - self.live))
        self.rows, self.columns = rows, columns
        self.rope = self._make_rope(columns)

    def advance(self, tokens: Tensor, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits (live, V) after one more token (live,) of each row, and after prompts that take the next rows."""
        if not prompts:
            return self.step(tokens)
        first = self.live
        # equal ones are read once
        different = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        lengths = torch.tensor([len(prompt) for prompt in different], device=self.device)
        before = [self.step(tokens)] if first else []
        logits = torch.cat([*before, self._read_prompts(list(different), lengths)])
        self.live += len(prompts)
        source = torch.tensor([different[tuple(prompt)] for prompt in prompts], device=self.device)
        self.all_lengths[first : self.live] = lengths[source]
        if len(different) == len(prompts):
            return logits
        columns = int(lengths.max())
        self.whole[:, :, first : self.live, :, :columns] = self.whole[:, :, first + source, :, :columns]
        return torch.cat((logits[:first], logits[first + source]))

    def _read_prompts(self, prompts: list[tuple[int, ...]], lengths: Tensor) -> Tensor:
        """Logits (N, V) after N prompts, in a pass of their own."""
        self._view(self.live + len(prompts))
        self.column = int(lengths.max())
        tokens = torch.tensor([[*p, *[0] * (self.column - len(p))] for p in prompts], device=self.device)
        x = self._prefill_rows(slice(self.live, None), tokens, lengths)
        return self._logits(F.pad(x, (0, 0, 0, rows_carried(len(x), self.most) - len(x))))[: len(x)]

    def leave(self, row: int) -> None:
        """Move the last row in use into the place of an ended one."""
        self.live -= 1
        if row != self.live:
            used = int(self.all_lengths[self.live])
            self.whole[:, :, row, :, :used] = self.whole[:, :, self.live, :, :used]
            self.all_lengths[row] = used
        self.all_lengths[self.live] = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (live, V) after one more token per row, (live,). A few free rows are computed too if that is faster."""
        computed = rows_carried(self.live, self.rows)
        self._view(computed)
        if computed == self.live:
            return super().step(tokens)
        logits = super().step(F.pad(tokens, (0, computed - self.live)))
        self.all_lengths[self.live :] = 0
        return logits[: self.live]

    def _view(self, rows: int) -> None:
        """The decoder's own fields, of the first rows."""
        self.cache = [tuple(pair) for pair in self.whole[:, :, :rows].unbind()]
        self.lengths = self.all_lengths[:rows]


class RunningBatch:
    """Responses of one model that are drawn together, at most `rows` at once."""

    def __init__(self, model: Any, rows: int):
        self.model, self.rows = model.eval(), rows
        self.responses: list[Response] = []  # in the order of the rows
        native = lm(model).native
        self.decoder = RunningDecoder(model, rows) if native else None
        self.caches: list[Any] = []  # caches of a model that is not ours, per response
        self.device = next(model.parameters()).device
        self.most_rows = lru_cache(lambda blocks: default_batch(model, blocks * GROWTH))

    def __len__(self) -> int:
        return len(self.responses)

    def fitting(self, waiting: Sequence[Response]) -> list[Response]:
        """The first of the waiting responses, as many as can join at the next step: by rows, memory and the length of prompts."""
        new: list[Response] = []
        for one in waiting[: self.rows - len(self)]:
            together = [*self.responses, *new, one]
            rows = self.most_rows(-(-max(other.columns for other in together) // GROWTH))
            tokens = sum(len(other.prompt) for other in [*new, one])
            if len(together) > max(rows, 1) or (new and tokens > PREFILL_TOKENS):
                break
            new.append(one)
        return new

    @torch.inference_mode()
    def advance(self, new: Sequence[Response] = ()) -> None:
        """Draw one more token of every response, none of which may be finished, and the first one of new ones."""
        last = [one.tokens[-1] for one in self.responses]
        prompts = [one.prompt for one in new]
        if self.decoder is None:
            each = enumerate([*([token] for token in last), *prompts])
            logits = torch.cat([self._forward(row, tokens) for row, tokens in each])
        else:
            if new:
                self.decoder.reserve(len(self) + len(new), max(one.columns for one in [*self.responses, *new]))
            logits = self.decoder.advance(torch.tensor(last, dtype=torch.int64, device=self.device), prompts)
        self.responses += new
        self._choose(logits, self.responses)

    @torch.inference_mode()
    def leave(self, response: Response) -> None:
        """Take a response out, finished or not."""
        row = self.responses.index(response)
        if self.decoder is not None:
            self.decoder.leave(row)
        for rows in (self.responses, self.caches):
            if rows:
                rows[row] = rows[-1]
                rows.pop()

    def _forward(self, row: int, tokens: list[int]) -> Tensor:
        """Logits (1, V) of a model that is not ours after more tokens of one response."""
        if row == len(self.caches):
            self.caches.append(None)
        given = torch.tensor([tokens], device=self.device)
        logits, self.caches[row] = next_logits(self.model, given, self.caches[row])
        return logits

    def _choose(self, logits: Tensor, responses: Sequence[Response]) -> None:
        """Draw a token per row; rows with the same sampling settings are drawn together."""
        alike: dict[tuple, list[int]] = {}
        for row, one in enumerate(responses):
            alike.setdefault((one.choice.temperature, one.choice.top_p, one.choice.greedy), []).append(row)
        uniforms = uniforms_at([one.hash for one in responses], [len(one.tokens) for one in responses])
        uniforms = uniforms.to(self.device)
        for rows in alike.values():
            part = [responses[row] for row in rows]
            of_all = len(rows) == len(responses)
            of_rows, numbers = (logits, uniforms) if of_all else (logits[rows], uniforms[rows])
            tokens, logp = choose_tokens(of_rows, numbers, part[0].choice)
            for i, (one, token, value) in enumerate(zip(part, tokens.tolist(), logp.tolist(), strict=True)):
                if one.alternatives:
                    top = torch.log_softmax(of_rows[i].float() / one.choice.temperature, -1).topk(one.alternatives)
                    one.tops.append(list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
                one.tokens.append(token)
                one.logprobs.append(value)

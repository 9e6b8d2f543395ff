"""Our GPT over a preallocated cache of keys and values: prompts in one pass, then one token per row and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.model.attention import Rope, narrow, rotary_factors
from rlhf.model.batching import right_pad
from rlhf.model.fused_loss import is_plain
from rlhf.model.gpt import GPTForCausalLM
from rlhf.ops import fast
from rlhf.ops.masked import computed_in
from rlhf.ops.unembedding import unembed, unembedding_factor

Prompts = Sequence[Sequence[int]]
QKV = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[QKV, tuple[Tensor, Tensor], int | None], Tensor]

PREFILL_ROWS, PREFILL_TOKENS = 32, 2**13  # most prompts per forward, and most tokens


class Seen(NamedTuple):
    """The columns of the cache that new tokens fill and attend to, (N,) int64 each but the last."""

    row: Tensor  # of the cache
    place: Tensor  # the token's own column
    leading: Tensor  # it attends to this many leading columns of its row
    tail: range  # and to these


def cached_in(model: GPTForCausalLM) -> torch.dtype:
    """The precision of keys and values: that of products, but the loops in C attend in float32."""
    config, weight = model.config, model.model.embed_tokens.weight
    one = weight.new_empty(1, 1, 1, config.head_dim)
    return weight.dtype if config.window is None and fast.can_attend(one) else computed_in(weight)


class Decoder:
    """One batch of prompts and its responses.

    Prompts are on the left, padded on the right, so that the first pass needs no mask; generated tokens go
    into the columns after the longest prompt, the same column for every row. The columns between a shorter
    prompt and its response are masked by `gap`; positions count real tokens.
    """

    def __init__(self, model: GPTForCausalLM, prompts: Prompts, max_new_tokens: int, pad: int):
        config, weight = model.config, model.model.embed_tokens.weight
        self.model, self.trunk = model, model.model
        self.tokens, self.lengths = (x.to(weight.device) for x in right_pad(prompts, pad))  # (B, P) and (B,)
        self.column = self.tokens.shape[1]
        dtype = computed_in(weight)
        head = model.lm_head
        # logits are float32 in half precision too, as in training's log-probs of responses
        wide_logits = dtype.itemsize < 4 and is_plain(head) and not getattr(head, "stands_for_shards", False)
        self.unembedding = unembedding_factor(head.weight.to(dtype)) if wide_logits else None
        self.kind, self.cache_kind = dtype, cached_in(model)
        columns, heads = self.column + max_new_tokens - 1, config.n_kv_head
        self.shape = (len(prompts), heads, columns, config.head_dim)
        self.cache = [
            tuple(weight.new_empty(self.shape, dtype=self.cache_kind) for _ in "kv") for _ in self.trunk.layers
        ]
        self.gap = None
        if min(map(len, prompts)) < self.column:
            column = torch.arange(columns, device=weight.device)
            unseen = (column >= self.lengths[:, None]) & (column < self.column)
            self.gap = weight.new_zeros(unseen.shape).masked_fill(unseen, -torch.inf)  # (B, L)
            self.gap = self.gap[:, None, None]  # (B, 1, 1, L)
        self.rope = self._make_rope(columns)

    def _make_rope(self, columns: int) -> Rope | None:
        """cos and sin of each position, each (L, 1, D/H)."""
        weight = self.trunk.embed_tokens.weight
        if self.model.config.positions != "rotary":
            return None
        return rotary_factors(torch.arange(columns, device=weight.device), self.model.config, weight.dtype)

    def prefill(self) -> Tensor:
        """Logits (B, V) after each prompt; adjacent equal prompts share one pass.

        Each forward has a bounded number of tokens in a few rows of similar length, so that there is little padding.
        """
        new = torch.ones_like(self.lengths, dtype=torch.bool)  # whether a row's prompt is not that of the row before
        new[1:] = (self.tokens[1:] != self.tokens[:-1]).any(1) | (self.lengths[1:] != self.lengths[:-1])
        tokens, lengths = self.tokens[new], self.lengths[new]
        count = len(tokens)
        size = max(1, min(PREFILL_ROWS, PREFILL_TOKENS // tokens.shape[1]))
        read = []
        for part in (slice(start, min(start + size, count)) for start in range(0, count, size)):
            width = int(lengths[part].max())
            read.append(self._prefill_rows(part, tokens[part, :width], lengths[part]))
            for side in (side for pair in self.cache for side in pair):
                side[part, :, width : self.column] = 0.0  # masked later, but the values must be finite
        x = torch.cat(read)
        if count < len(self.tokens):
            prompt = new.cumsum(0) - 1  # per row, its index among the different prompts
            x = x[prompt]
            for side in (side for pair in self.cache for side in pair):
                side[:, :, : self.column] = side[prompt, :, : self.column]
        return self._logits(x)

    def _prefill_rows(self, part: slice, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Hidden states (rows, D) after prompts (rows, width); fills the cache's rows `part`."""
        trunk, width = self.trunk, tokens.shape[1]
        x = trunk.place(trunk.embed_tokens(tokens), torch.arange(width, device=tokens.device))
        rope = None if self.rope is None else (self.rope[0][:width], self.rope[1][:width])
        rows = torch.arange(len(x), device=x.device)
        window = self.model.config.window
        band: Any = None if window is None else narrow(None, window, width, 0, x.device)
        for layer, (keys, values) in zip(trunk.layers, self.cache, strict=True):
            q, k, v = (t.transpose(1, 2) for t in layer.attention.project(layer.before_attention(x), rope))
            for side, new in ((keys[part], k), (values[part], v)):
                side[:, :, :width] = new
            grouped = q.shape[1] != k.shape[1]
            mask = None if layer.attention.window is None else band
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
            y = y.transpose(1, 2).flatten(2)  # (rows, P, D)
            if layer is trunk.layers[-1]:  # only the last token's output is needed
                x, y = x[rows, lengths - 1, None], y[rows, lengths - 1, None]  # (rows, 1, D)
            x = layer.after_attention(x, layer.attention.out(y))
        return x[:, 0]

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token per row, (B,)."""
        logits = self._logits(self._read(tokens, self.lengths, self._make_attention()))
        self.column += 1
        self.lengths += 1
        return logits

    def _read(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states (N, D) of new tokens (N,) at their positions (N,), before the last norm."""
        trunk = self.trunk
        x = trunk.place(trunk.embed_tokens(tokens), positions)
        rope = None if self.rope is None else (self.rope[0][positions], self.rope[1][positions])
        for layer, cache in zip(trunk.layers, self.cache, strict=True):
            qkv = layer.attention.project(layer.before_attention(x), rope)  # (N, H or KV, D/H) each
            x = layer.after_attention(x, layer.attention.out(attend(qkv, cache, layer.attention.window)))
        return x

    def _make_attention(self) -> Attend:
        """A step's attention: f(q, k, v; keys and values; the layer's window) = y (B, D)."""
        if self.model.config.window is None and fast.can_attend(self.cache[0][0]):
            seen = self._seen_columns()
            return lambda qkv, cache, _: fast.attend(qkv, cache, *seen)
        place, columns, gap = self._new_columns()
        banded = self._narrow(gap, columns)
        heads, width = self.shape[1], self.shape[3]

        def attend(qkv: QKV, cache: tuple[Tensor, Tensor], window: int | None) -> Tensor:
            (q, k, v), (keys, values) = qkv, cache
            keys[place], values[place] = k.to(self.cache_kind), v.to(self.cache_kind)
            # queries that share a key head take the place of a sequence: (B, KV, H/KV, D/H)
            q = q.reshape(len(q), heads, -1, width)
            hidden = gap if window is None else banded
            return _attend(q, keys[:, :, :columns], values[:, :, :columns], hidden).reshape(len(q), -1)

        return attend

    def _seen_columns(self) -> Seen:
        """The columns that a step's tokens fill and attend to."""
        width = self.tokens.shape[1]
        prompts = self.lengths - (self.column - width)
        rows, place = torch.arange(len(prompts), device=prompts.device), torch.full_like(prompts, self.column)
        return Seen(rows, place, prompts, range(width, self.column + 1))

    def _new_columns(self) -> tuple[Any, int, Tensor | None]:
        """The columns for a step's keys and values, the number of columns that it attends to, and their mask."""
        columns = self.column + 1
        gap = None if self.gap is None else self.gap[..., :columns]
        return (slice(None), slice(None), self.column), columns, gap

    def _narrow(self, gap: Tensor | None, columns: int) -> Tensor | None:
        """A step's mask in layers that attend to the last `window` positions."""
        window = self.model.config.window
        if window is None or columns <= window:
            return gap
        before = self._positions(columns) <= (self.lengths - window)[:, None]  # (B, columns)
        band = before.new_zeros(before.shape, dtype=self.trunk.embed_tokens.weight.dtype)
        band = band.masked_fill(before, -torch.inf)[:, None, None]
        return band if gap is None else gap + band

    def _positions(self, columns: int) -> Tensor:
        """The position of the token in each column, (B or 1, columns); arbitrary for columns without a token."""
        column = torch.arange(columns, device=self.lengths.device)
        generated = column - (self.column - self.lengths)[:, None]
        return torch.where(column < self.tokens.shape[1], column, generated)

    def _logits(self, x: Tensor) -> Tensor:
        x = self.trunk.norm(x)
        if self.unembedding is None:
            return self.model.lm_head(x)
        with torch.autocast(x.device.type, enabled=False):
            return unembed(x.to(self.kind), self.unembedding)

    def drop(self, ended: Tensor) -> Tensor:
        """Remove the ended rows (B,) bool from the batch; returns the old index of each new row.

        Only rows from the end are copied, into the gaps.
        """
        count = len(ended) - int(ended.sum())
        holes = ended[:count].nonzero()[:, 0]
        movers = (~ended[count:]).nonzero()[:, 0] + count
        for side in (side for pair in self.cache for side in pair):
            filled = side[:, :, : self.column]
            filled[holes] = filled[movers]
        self.cache = [(keys[:count], values[:count]) for keys, values in self.cache]
        rows = torch.arange(count, device=ended.device)
        rows[holes] = movers
        self.lengths = self.lengths[rows]
        self.gap = None if self.gap is None else self.gap[rows]
        return rows


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D/H) + mask) v; the fused CPU kernel is slow with few queries."""
    if q.device.type != "cpu":  # cuDNN reads a mask of another type than the queries' wrongly, without a word
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask.to(q.dtype))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # (B, KV, H/KV, L)
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def rows_carried(live: int, rows: int) -> int:
    """The number of rows with which a batch continues: keeping a few ended ones costs less than removing them.

    Packed products are compiled and CUDA graphs recorded for each number of rows, so only numbers of three significant bits occur.
    """
    step = 1 << max(0, live.bit_length() - 3)
    return min(rows, -(-live // step) * step)

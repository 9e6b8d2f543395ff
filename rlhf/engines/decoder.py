"""Our GPT over a preallocated cache of keys and values: prompts in one pass, then one token per row and step, on a GPU without a
launch per operation."""

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

PREFILL_ROWS = 32  # most prompts per forward on a CPU
CPU_TOKENS, GPU_TOKENS = 2**13, 2**17  # most tokens of a forward over prompts


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
    """Our GPT over a preallocated cache.

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

        Each forward has a bounded number of tokens, on a CPU a few rows of similar length, so that there is little padding.
        """
        new = torch.ones_like(self.lengths, dtype=torch.bool)  # whether a row's prompt is not that of the row before
        new[1:] = (self.tokens[1:] != self.tokens[:-1]).any(1) | (self.lengths[1:] != self.lengths[:-1])
        tokens, lengths = self.tokens[new], self.lengths[new]
        count = len(tokens)
        on_cpu, width = tokens.device.type == "cpu", tokens.shape[1]
        size = max(1, min(PREFILL_ROWS, CPU_TOKENS // width) if on_cpu else GPU_TOKENS // width)
        parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        x = torch.cat([self._prefill_rows(part, tokens[part], lengths[part]) for part in parts])
        if count < len(self.tokens):
            prompt = new.cumsum(0) - 1  # per row, its index among the different prompts
            x = x[prompt]
            for side in (side for pair in self.cache for side in pair):
                side[:, :, : self.column] = side[prompt, :, : self.column]
        return self._logits(x)

    def _prefill_rows(self, part: slice, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Hidden states (rows, D) after prompts, cut to the longest of them; fills the cache's rows `part`."""
        trunk = self.trunk
        width = int(lengths.max()) if len(lengths) < len(self.lengths) else self.column
        x = trunk.place(trunk.embed_tokens(tokens[:, :width]), torch.arange(width, device=tokens.device))
        rope = None if self.rope is None else (self.rope[0][:width], self.rope[1][:width])
        rows = torch.arange(len(x), device=x.device)
        window = self.model.config.window
        band: Any = None if window is None else narrow(None, window, width, 0, x.device)
        for layer, (keys, values) in zip(trunk.layers, self.cache, strict=True):
            q, k, v = (t.transpose(1, 2) for t in layer.attention.project(layer.before_attention(x), rope))
            for side, new in ((keys[part], k), (values[part], v)):
                side[:, :, :width] = new
                side[:, :, width : self.column] = 0.0  # masked later, but the values must be finite
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
        if self._compiled():
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

    def _compiled(self) -> bool:
        """Whether attention is computed by `fast.attend`."""
        return self.model.config.window is None and fast.can_attend(self.cache[0][0])

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


COLUMN_BLOCK = 256  # a step attends to at most this many columns more than needed; a graph is recorded for each block


class RowDecoder(Decoder):
    """The decoder with token t of a row in column t; later columns are masked."""

    def _columns(self) -> int:
        """How many columns a step attends to."""
        return int(self.lengths.max()) + 1

    def _seen_columns(self) -> Seen:
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        return Seen(rows, self.lengths, self.lengths + 1, range(0))

    def _new_columns(self) -> tuple[Any, int, Tensor | None]:
        columns, rows = self._columns(), torch.arange(len(self.lengths), device=self.lengths.device)
        later = torch.arange(columns, device=rows.device) > self.lengths[:, None]
        return (rows, slice(None), self.lengths), columns, torch.where(later, -torch.inf, 0.0)[:, None, None]

    def _positions(self, columns: int) -> Tensor:
        return torch.arange(columns, device=self.lengths.device)[None]


class FixedDecoder(RowDecoder):
    """The decoder with steps whose shapes, addresses and work do not depend on the tokens within a block of columns.

    All columns of the block are attended to, with a mask on the later ones. On a GPU the second
    step of a shape is recorded as a CUDA graph, and it and all later ones are replays: at small sizes most of a step's time is
    spent launching its hundreds of operations. On other devices each step is computed directly.
    """

    def __init__(self, model: GPTForCausalLM, prompts: Prompts, max_new_tokens: int, pad: int):
        super().__init__(model, prompts, max_new_tokens, pad)
        self.gap = None  # a row's response follows its own prompt
        for side in (side for pair in self.cache for side in pair):
            side.zero_()  # masked values must be finite
        self.all_lengths = self.lengths
        # by rows and columns; None: computed once, not yet recorded
        self.graphs: dict[tuple[int, int], Graph | None] = {}

    def step(self, tokens: Tensor) -> Tensor:
        shape = (len(tokens), self._columns())
        if tokens.device.type != "cuda" or shape not in self.graphs:
            self.graphs[shape] = None
            return super().step(tokens)
        graph = self.graphs[shape] = self.graphs[shape] or Graph(self, tokens)
        self.column += 1
        return graph.replay(tokens)

    def drop(self, ended: Tensor) -> Tensor:
        kept = super().drop(ended)
        self.all_lengths[: len(kept)] = self.lengths
        self.lengths = self.all_lengths[: len(kept)]  # the graphs read their input here
        return kept

    def _columns(self) -> int:
        return min(self.shape[2], -(-(self.column + 1) // COLUMN_BLOCK) * COLUMN_BLOCK)


class Graph:
    """A recorded step of a decoder, for its present shape."""

    def __init__(self, decoder: FixedDecoder, tokens: Tensor):
        self.tokens = tokens.clone()
        self.recorded = torch.cuda.CUDAGraph()
        column = decoder.column
        # without autocast's cache, whose tensors would be in the graph's memory
        kind, on = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", kind, on, cache_enabled=False), torch.cuda.graph(self.recorded):
            self.logits = Decoder.step(decoder, self.tokens)
        decoder.column = column  # recording does not compute

    def replay(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token per row; the next replay writes over them."""
        self.tokens.copy_(tokens)
        self.recorded.replay()
        return self.logits


def make_decoder(model: GPTForCausalLM, prompts: Prompts, max_new_tokens: int, pad: int) -> Decoder:
    """The decoder for a model's device. Experts have no fixed steps: their shapes depend on the number of tokens."""
    fixed = next(model.parameters()).device.type == "cuda" and not model.config.experts
    return (FixedDecoder if fixed else Decoder)(model, prompts, max_new_tokens, pad)

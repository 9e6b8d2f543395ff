"""Our GPT over a cache of keys and values: prompts in passes of their own, then one token per row and step. Rows join
and leave between steps. On a GPU a step is a recorded CUDA graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.model.attention import Rope, attend, narrow, rotary_factors
from rlhf.model.batching import by_length, right_pad, scoring_tokens
from rlhf.model.fused_loss import is_plain
from rlhf.model.gpt import GPTForCausalLM
from rlhf.model.linear import merged, product_weights
from rlhf.ops import fast
from rlhf.ops.masked import computed_in
from rlhf.ops.unembedding import unembed, unembedding_factor

Prompts = Sequence[Sequence[int]]

GROWTH = 64  # columns by which the cache grows
COLUMN_BLOCK = 256  # a recorded step attends to at most so many columns more than needed; each block has a graph


def on_gpu(model: Any) -> bool:
    return next(model.parameters()).device.type == "cuda"


def power_of_two(count: int) -> int:
    """The least power of two that is not below a count."""
    return 1 << (count - 1).bit_length()


def cached_in(model: GPTForCausalLM) -> torch.dtype:
    """The precision of keys and values: that of products, but the loops in C attend in float32."""
    config, weight = model.config, model.model.embed_tokens.weight
    one = weight.new_empty(1, 1, 1, config.head_dim)
    return weight.dtype if config.window is None and fast.can_attend(one) else computed_in(weight)


class Decoder:
    """Rows of tokens, token t of a row in column t of the cache; later columns are masked. The first `live` rows are in
    use.

    On a GPU the second step of a shape is recorded as a CUDA graph, and it and all later ones are replays: at small
    sizes most of a step's time is spent launching its hundreds of operations. Shapes are few: powers of two rows,
    blocks of columns. Experts are not recorded, since their shapes depend on the tokens.
    """

    def __init__(self, model: GPTForCausalLM):
        self.records = on_gpu(model) and not model.config.experts
        self.weights: dict[str, Tensor] = {}  # of the copy from which a GPU samples
        self.own: set[str] = set()  # those that are not the model's tensors
        # by rows and columns; None: computed once, not yet recorded
        self.graphs: dict[tuple[int, int], Graph | None] = {}
        self.unembedding: Tensor | None = None
        self.load(model)
        self.cache_kind = cached_in(self.model)
        self.rows = self.live = self.columns = self.column = 0  # column: that of the longest row's next token
        self.whole = torch.zeros(0)  # keys and values of every layer, (layers, 2, rows, heads, columns, D/H)
        self.cache: list[tuple[Tensor, ...]] = []  # those of the first rows, by layer
        self.all_lengths = self.lengths = torch.zeros(0, dtype=torch.int64, device=self.model.device)
        self.rope: Rope | None = None

    # ------------------------------------------------------------------------------------------- weights and room

    def load(self, model: GPTForCausalLM) -> None:
        """Sample from this model's present weights."""
        self.model = self._read_weights(model)
        self.trunk, head = self.model.model, self.model.lm_head
        self.kind = computed_in(self.trunk.embed_tokens.weight)
        # logits are float32 in half precision too, as in training's log-probs of responses
        if self.kind.itemsize < 4 and is_plain(head) and not getattr(head, "stands_for_shards", False):
            factor = unembedding_factor(head.weight.to(self.kind))
            if self.unembedding is None or factor.data_ptr() == head.weight.data_ptr():
                self.unembedding = factor
            else:
                self.unembedding.copy_(factor)

    @torch.no_grad()
    def _read_weights(self, model: GPTForCausalLM) -> GPTForCausalLM:
        """The model whose steps are recorded: adapters merged, weights of products in their precision. A changed weight
        has a copy, at an address that stays; the others are the model's tensors.
        """
        if not self.records:
            return model
        casts, given = {id(p) for p in product_weights(model)}, {id(p) for p in model.parameters()}
        moved = False
        for name, weight in merged(model, dict(model.named_parameters())):
            kind = computed_in(weight) if id(weight) in casts or id(weight) not in given else weight.dtype
            before, new = self.weights.get(name), weight.detach().to(kind)
            shared = new.data_ptr() == weight.data_ptr() and id(weight) in given
            if before is not None and name in self.own and (before.shape, before.dtype) == (new.shape, new.dtype):
                before.copy_(new)
            elif before is None or before.data_ptr() != new.data_ptr():
                if not shared or before is not None:  # changed, or at another address than in the call before
                    self.own.add(name)
                self.weights[name] = new.clone() if shared and before is not None else new
                moved = True
        if not moved:
            return self.model
        self.graphs.clear()
        config: Any = model.config
        with torch.device("meta"):
            copy = GPTForCausalLM(config).requires_grad_(False).eval()
        copy.load_state_dict(self.weights, strict=False, assign=True)
        if model.config.tie_word_embeddings:
            copy.lm_head.weight = copy.model.embed_tokens.weight
        return copy

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` sequences of `columns` tokens; an unused cache may shrink to that, a used one only grows."""
        columns = -(-columns // GROWTH) * GROWTH
        if self.live:
            rows, columns = max(rows, self.rows), max(columns, self.columns)
        if (rows, columns) == (self.rows, self.columns):
            return
        config, weight, before = self.model.config, self.trunk.embed_tokens.weight, self.whole
        shape = (len(self.trunk.layers), 2, rows, config.n_kv_head, columns, config.head_dim)
        self.whole = weight.new_zeros(shape, dtype=self.cache_kind)
        if self.live:
            self.whole[:, :, : self.live, :, : self.columns] = before[:, :, : self.live]
        self.all_lengths = F.pad(self.all_lengths[: self.live], (0, rows - self.live))
        self.rows, self.columns = rows, columns
        if config.positions == "rotary":
            self.rope = rotary_factors(torch.arange(columns, device=weight.device), config, weight.dtype)
        self.graphs.clear()

    def clear(self) -> None:
        """Take out every row."""
        self.live = self.column = 0
        self.all_lengths.zero_()

    def drop(self, ended: Tensor) -> Tensor:
        """Remove the ended rows (live,) bool, by copies of rows from the end; returns the old index of each new row."""
        self._view(self.live)
        count = len(ended) - int(ended.sum())
        holes = ended[:count].nonzero()[:, 0]
        movers = (~ended[count:]).nonzero()[:, 0] + count
        for side in (side for pair in self.cache for side in pair):
            filled = side[:, :, : self.column]
            filled[holes] = filled[movers]
        rows = torch.arange(count, device=ended.device)
        rows[holes] = movers
        self.live = count
        self.all_lengths[:count] = self.lengths[rows]
        self.all_lengths[count:] = 0
        self.column = int(self.all_lengths[:count].max()) if count else 0
        return rows

    def carried(self, live: int, rows: int) -> int:
        """The number of rows with which a batch continues: packed products are compiled and CUDA graphs recorded for
        each number, so only numbers of three significant bits occur, with graphs powers of two.
        """
        if self.records:
            return min(rows, power_of_two(live))
        step = 1 << max(0, live.bit_length() - 3)
        return min(rows, -(-live // step) * step)

    def _view(self, rows: int) -> None:
        """`cache` and `lengths` of the first rows."""
        self.cache = [tuple(pair) for pair in self.whole[:, :, :rows].unbind()]
        self.lengths = self.all_lengths[:rows]

    # ------------------------------------------------------------------------------------------- tokens

    def advance(self, tokens: Tensor, prompts: Prompts) -> Tensor:
        """Logits (live, V) after one more token (live,) of each row, and after prompts that take the next rows."""
        if not prompts:
            return self.step(tokens)
        first = self.live
        before = [self.step(tokens).clone()] if first else []
        # equal ones are read once
        different = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        lengths = torch.tensor([len(prompt) for prompt in different], device=self.lengths.device)
        logits = torch.cat([*before, self._read_prompts(list(different), lengths)])
        self.live += len(prompts)
        longest = max(map(len, different))
        self.column = max(self.column if first else 0, longest)
        source = torch.tensor([different[tuple(prompt)] for prompt in prompts], device=lengths.device)
        self.all_lengths[first : self.live] = lengths[source]
        if len(different) == len(prompts):
            return logits
        for layer in self.whole:
            layer[:, first : self.live, :, :longest] = layer[:, first + source, :, :longest]
        return torch.cat((logits[:first], logits[first + source]))

    def _read_prompts(self, prompts: list[tuple[int, ...]], lengths: Tensor) -> Tensor:
        """Logits (N, V) after N prompts, in passes of a bounded number of tokens."""
        self._view(self.live + len(prompts))
        groups = by_length(list(map(len, prompts)), tokens=scoring_tokens(self.model))
        order = torch.tensor([i for group in groups for i in group], device=lengths.device)
        read = []
        for group, rows in zip(groups, order.split(list(map(len, groups))), strict=True):
            tokens = right_pad([prompts[i] for i in group], 0)[0].to(lengths.device)
            read.append(self._prefill_rows(self.live + rows, tokens, lengths[rows]))
        x = torch.cat(read)[order.argsort()]
        return self._logits(F.pad(x, (0, 0, 0, self.carried(len(x), self.rows) - len(x))))[: len(x)]

    def _prefill_rows(self, place: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Hidden states (rows, D) after prompts (rows, width); fills the cache's rows `place`."""
        trunk, width = self.trunk, tokens.shape[1]
        x = trunk.place(trunk.embed_tokens(tokens), torch.arange(width, device=tokens.device))
        rope = None if self.rope is None else (self.rope[0][:width], self.rope[1][:width])
        rows = torch.arange(len(x), device=x.device)
        window = self.model.config.window
        band: Any = None if window is None else narrow(None, window, width, 0, x.device)
        for layer, (keys, values) in zip(trunk.layers, self.cache, strict=True):
            q, k, v = (t.transpose(1, 2) for t in layer.attention.project(layer.before_attention(x), rope))
            keys[place, :, :width], values[place, :, :width] = k.to(self.cache_kind), v.to(self.cache_kind)
            y = attend(q, k, v, None if layer.attention.window is None else band, 0.0)
            y = y.transpose(1, 2).flatten(2)  # (rows, P, D)
            if layer is trunk.layers[-1]:  # only the last token's output is needed
                x, y = x[rows, lengths - 1, None], y[rows, lengths - 1, None]  # (rows, 1, D)
            x = layer.after_attention(x, layer.attention.out(y))
        return x[:, 0]

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (live, V) after one more token per row, (live,); on a GPU the next step writes over them."""
        computed = self.carried(self.live, self.rows)
        self._view(computed)
        if computed > self.live:
            tokens = F.pad(tokens, (0, computed - self.live))
        shape = (computed, self._columns())
        if not self.records or shape not in self.graphs:
            self.graphs[shape] = None
            logits = self.compute(tokens)
        else:
            graph = self.graphs[shape] = self.graphs[shape] or Graph(self, tokens)
            logits = graph.replay(tokens)
            self.column += 1
        if computed > self.live:
            self.all_lengths[self.live :] = 0
        return logits[: self.live]

    def compute(self, tokens: Tensor) -> Tensor:
        """A step of the rows in view, (N,)."""
        trunk, attend_to_cache = self.trunk, self._make_attention()
        x = trunk.place(trunk.embed_tokens(tokens), self.lengths)
        rope = None if self.rope is None else (self.rope[0][self.lengths], self.rope[1][self.lengths])
        for layer, (keys, values) in zip(trunk.layers, self.cache, strict=True):
            qkv = layer.attention.project(layer.before_attention(x), rope)  # (N, H or KV, D/H) each
            y = attend_to_cache(qkv, (keys, values), layer.attention.window)
            x = layer.after_attention(x, layer.attention.out(y))
        logits = self._logits(x)
        self.column += 1
        self.lengths += 1
        return logits

    def _columns(self) -> int:
        """How many columns a step attends to."""
        block = COLUMN_BLOCK if self.records else 1
        return min(self.columns, -(-(self.column + 1) // block) * block)

    def _make_attention(self) -> Callable[..., Tensor]:
        """A step's attention: f(q, k, v; keys and values; the layer's window) = y (N, D)."""
        if self.model.config.window is None and fast.can_attend(self.cache[0][0]):
            return lambda qkv, cache, _: fast.attend(qkv, cache, self.lengths)
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        columns, place = self._columns(), (rows, slice(None), self.lengths)
        later = torch.arange(columns, device=rows.device) > self.lengths[:, None]
        hidden = banded = torch.where(later, -torch.inf, 0.0)[:, None, None]  # (N, 1, 1, columns)
        if (window := self.model.config.window) is not None and columns > window:
            before = torch.arange(columns, device=rows.device) <= (self.lengths - window)[:, None]
            banded = hidden.masked_fill(before[:, None, None], -torch.inf)

        def attend_to_cache(qkv: tuple[Tensor, ...], cache: tuple[Tensor, Tensor], window: int | None) -> Tensor:
            (q, k, v), (keys, values) = qkv, cache
            keys[place], values[place] = k.to(self.cache_kind), v.to(self.cache_kind)
            # queries that share a key head take the place of a sequence: (N, KV, H/KV, D/H)
            q = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
            mask = hidden if window is None else banded
            return _attend(q, keys[:, :, :columns], values[:, :, :columns], mask).reshape(len(q), -1)

        return attend_to_cache

    def _logits(self, x: Tensor) -> Tensor:
        x = self.trunk.norm(x)
        if self.unembedding is None:
            return self.model.lm_head(x)
        with torch.autocast(x.device.type, enabled=False):
            return unembed(x.to(self.kind), self.unembedding)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D/H) + mask) v; the fused CPU kernel is slow with few queries."""
    mask = mask.to(q.dtype)  # cuDNN reads a mask of another type than the queries' wrongly, without a word
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # (N, KV, H/KV, L)
    return (scores + mask).softmax(-1) @ v


class Graph:
    """A recorded step of a decoder, for its present shape. Its graphs share one pool of memory: none reads what another left."""

    def __init__(self, decoder: Decoder, tokens: Tensor):
        self.tokens, self.recorded, column = tokens.clone(), torch.cuda.CUDAGraph(), decoder.column
        # a live graph's: torch refuses a pool whose graphs are all gone
        pool = next((graph.recorded.pool() for graph in decoder.graphs.values() if graph is not None), None)
        # without autocast's cache, whose tensors would be in the graph's memory
        kind, on = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", kind, on, cache_enabled=False), torch.cuda.graph(self.recorded, pool=pool):
            self.logits = decoder.compute(self.tokens)
        decoder.column = column  # recording does not compute

    def replay(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token per row; the next replay writes over them."""
        self.tokens.copy_(tokens)
        self.recorded.replay()
        return self.logits

"""Our GPT over a cache that stays from batch to batch: rows join and leave between steps. It samples for servers, and on a GPU for
rollouts, where a step is a recorded CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.engines.decoder import Decoder, Seen, rows_carried
from rlhf.model.batching import scoring_tokens
from rlhf.model.gpt import GPTForCausalLM
from rlhf.model.linear import merged, product_weights
from rlhf.ops.masked import computed_in
from rlhf.ops.unembedding import unembedding_factor

GROWTH = 64  # columns by which the cache grows
COLUMN_BLOCK = (
    256  # a recorded step attends to at most this many columns more than needed; there is a graph for each block
)


def on_gpu(model: Any) -> bool:
    return next(model.parameters()).device.type == "cuda"


class PersistentDecoder(Decoder):
    """The decoder with token t of a row in column t, and later columns masked. The first `live` of its rows are in use.

    On a GPU the second step of a shape is recorded as a CUDA graph, and it and all later ones are replays: at small sizes
    most of a step's time is spent launching its hundreds of operations. Shapes are few: powers of two rows, blocks of columns.
    Experts are not recorded, since their shapes depend on the tokens.
    """

    def __init__(self, model: GPTForCausalLM):
        self.records = on_gpu(model) and not model.config.experts
        self.weights: dict[str, Tensor] = {}  # of the copy from which a GPU samples
        self.own: set[str] = set()  # those that are not the model's tensors
        self.graphs: dict[
            tuple[int, int], Graph | None
        ] = {}  # by rows and columns; None: computed once, not yet recorded
        super().__init__(self._read_weights(model), [[0]], 1, pad=0)
        self.rows, self.live, self.columns, self.column = 0, 0, 0, 0
        self.all_lengths = self.lengths[:0]
        self.whole = torch.zeros(0)  # keys and values of every layer, (layers, 2, rows, heads, columns, D/H)

    def load(self, model: GPTForCausalLM) -> None:
        """Sample from this model's present weights."""
        self.model = self._read_weights(model)
        self.trunk = self.model.model
        if self.unembedding is None:
            return
        weight = self.model.lm_head.weight
        factor = unembedding_factor(weight.to(self.kind))
        if factor.data_ptr() == weight.data_ptr():
            self.unembedding = factor
        else:
            self.unembedding.copy_(factor)

    @torch.no_grad()
    def _read_weights(self, model: GPTForCausalLM) -> GPTForCausalLM:
        """The model whose steps are recorded: adapters merged, weights of products in the precision of products.

        It shares the model's tensors that need no change, so that only a changed weight has a copy, at an address that stays.
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
        rows, columns = 1 << (rows - 1).bit_length(), -(-columns // GROWTH) * GROWTH
        if self.live:
            rows, columns = max(rows, self.rows), max(columns, self.columns)
        if (rows, columns) == (self.rows, self.columns):
            return
        config = self.model.config
        self.shape = (rows, config.n_kv_head, columns, config.head_dim)
        weight, before = self.trunk.embed_tokens.weight, self.whole
        self.whole = weight.new_zeros((len(self.trunk.layers), 2, *self.shape), dtype=self.cache_kind)
        if self.live:
            self.whole[:, :, : self.live, :, : self.columns] = before[:, :, : self.live]
        self.all_lengths = F.pad(self.all_lengths[: self.live], (0, rows - self.live))
        self.rows, self.columns = rows, columns
        self.rope = self._make_rope(columns)
        self.graphs.clear()

    def advance(self, tokens: Tensor, prompts: Sequence[Sequence[int]]) -> Tensor:
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
        """Logits (N, V) after N prompts, in passes of their own."""
        self._view(self.live + len(prompts))
        most, start, read = scoring_tokens(self.model), 0, []
        while start < len(prompts):
            end, width = start + 1, len(prompts[start])
            while end < len(prompts) and max(width, len(prompts[end])) * (end + 1 - start) <= most:
                width = max(width, len(prompts[end]))
                end += 1
            rows = [[*p, *[0] * (width - len(p))] for p in prompts[start:end]]
            place = slice(self.live + start, self.live + end)
            read.append(self._prefill_rows(place, torch.tensor(rows, device=lengths.device), lengths[start:end]))
            start = end
        x = torch.cat(read)
        return self._logits(F.pad(x, (0, 0, 0, self.carried(len(x), self.rows) - len(x))))[: len(x)]

    def drop(self, ended: Tensor) -> Tensor:
        self._view(self.live)
        kept = super().drop(ended)
        self.live = len(kept)
        self.column = int(self.lengths.max()) if self.live else 0
        self.all_lengths[: self.live] = self.lengths
        self.all_lengths[self.live :] = 0
        return kept

    def clear(self) -> None:
        """Take out every row."""
        self.live = self.column = 0
        self.all_lengths.zero_()

    def carried(self, live: int, rows: int) -> int:
        """The number of rows with which a batch continues."""
        return min(rows, 1 << (live - 1).bit_length()) if self.records else rows_carried(live, rows)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (live, V) after one more token per row, (live,). A few free rows are computed too if that is faster.

        On a GPU the next step writes over them.
        """
        computed = self.carried(self.live, self.rows)
        self._view(computed)
        if computed > self.live:
            tokens = F.pad(tokens, (0, computed - self.live))
        logits = self._step(tokens)
        if computed > self.live:
            self.all_lengths[self.live :] = 0
        return logits[: self.live]

    def _step(self, tokens: Tensor) -> Tensor:
        shape = (len(tokens), self._columns())
        if not self.records or shape not in self.graphs:
            self.graphs[shape] = None
            return super().step(tokens)
        graph = self.graphs[shape] = self.graphs[shape] or Graph(self, tokens)
        self.column += 1
        return graph.replay(tokens)

    def _view(self, rows: int) -> None:
        """The decoder's own fields, of the first rows."""
        self.cache = [tuple(pair) for pair in self.whole[:, :, :rows].unbind()]
        self.lengths = self.all_lengths[:rows]

    def _columns(self) -> int:
        """How many columns a step attends to."""
        block = COLUMN_BLOCK if self.records else 1
        return min(self.columns, -(-(self.column + 1) // block) * block)

    def _seen_columns(self) -> Seen:
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        return Seen(rows, self.lengths, self.lengths + 1, range(0))

    def _new_columns(self) -> tuple[Any, int, Tensor | None]:
        columns, rows = self._columns(), torch.arange(len(self.lengths), device=self.lengths.device)
        later = torch.arange(columns, device=rows.device) > self.lengths[:, None]
        return (rows, slice(None), self.lengths), columns, torch.where(later, -torch.inf, 0.0)[:, None, None]

    def _positions(self, columns: int) -> Tensor:
        return torch.arange(columns, device=self.lengths.device)[None]


class Graph:
    """A recorded step of a decoder, for its present shape. All graphs share one pool of memory: none reads what another left."""

    pool: Any = None

    def __init__(self, decoder: PersistentDecoder, tokens: Tensor):
        Graph.pool = Graph.pool or torch.cuda.graph_pool_handle()
        self.tokens = tokens.clone()
        self.recorded = torch.cuda.CUDAGraph()
        column = decoder.column
        # without autocast's cache, whose tensors would be in the graph's memory
        kind, on = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", kind, on, cache_enabled=False), torch.cuda.graph(self.recorded, pool=Graph.pool):
            self.logits = Decoder.step(decoder, self.tokens)
        decoder.column = column  # recording does not compute

    def replay(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token per row; the next replay writes over them."""
        self.tokens.copy_(tokens)
        self.recorded.replay()
        return self.logits

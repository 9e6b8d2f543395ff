"""Decoding on a GPU without a launch per operation: all steps have one shape and are replayed as a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf.engines.decoder import Decoder, Prompts
from rlhf.model.gpt import GPTForCausalLM

COLUMN_BLOCK = 256  # a step attends to at most this many columns more than needed; a graph is recorded for each block


class FixedDecoder(Decoder):
    """The decoder with steps whose shapes, addresses and work do not depend on the tokens within a block of columns.

    A row's token t is in column t; all columns of the block are attended to, with a mask on the later ones. On a GPU the second
    step of a shape is recorded as a CUDA graph, and it and all later ones are replays: at small sizes most of a step's time is
    spent launching its hundreds of operations. On other devices each step is computed directly.
    """

    def __init__(self, model: GPTForCausalLM, prompts: Prompts, max_new_tokens: int, pad: int):
        super().__init__(model, prompts, max_new_tokens, pad)
        self.gap = None  # a row's response follows its own prompt
        for side in (side for pair in self.cache for side in pair):
            side.zero_()  # masked values must be finite
        self.all_lengths = self.lengths
        self.rows = torch.arange(len(prompts), device=self.lengths.device)
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

    def _new_columns(self) -> tuple[Any, int, Tensor | None]:
        columns = self._columns()
        hidden = torch.arange(columns, device=self.lengths.device) > self.lengths[:, None]
        gap = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, -torch.inf)
        return (self.rows[: len(self.lengths)], slice(None), self.lengths), columns, gap[:, None, None]

    def _positions(self, columns: int) -> Tensor:
        return torch.arange(columns, device=self.lengths.device)[None]


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

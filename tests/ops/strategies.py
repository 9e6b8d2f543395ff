"""Random batches for the tests of rlhf.ops: a seed makes numbers, hypothesis chooses lengths and places."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class Batch(NamedTuple):
    mask: Tensor  # (B, T) bool, one run of True a row
    a: Tensor  # (B, T) float, log-prob-like
    b: Tensor  # (B, T) float, close to a
    c: Tensor  # (B, T) float, standard normal


def make_batch(seed: int, spans: list[tuple[int, int]], T: int, dtype: torch.dtype = torch.float32) -> Batch:
    """spans: (start, length) of each row's response."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(spans), T)
    a = -2.0 * torch.rand(shape, generator=generator, dtype=dtype)
    b = a + 0.3 * torch.randn(shape, generator=generator, dtype=dtype)
    c = torch.randn(shape, generator=generator, dtype=dtype)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, (start, length) in enumerate(spans):
        mask[row, start : start + length] = True
    return Batch(mask, a, b, c)


@st.composite
def batches(draw, min_rows=1, max_rows=5, T=7, min_length=1, dtype=torch.float32) -> Batch:
    rows = draw(st.integers(min_rows, max_rows))
    spans = []
    for _ in range(rows):
        length = draw(st.integers(min_length, T))
        spans.append((draw(st.integers(0, T - length)), length))
    return make_batch(draw(st.integers(0, 2**31)), spans, T, dtype)


def pad(x: Tensor, left: int, right: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(x, (left, right), value=fill)

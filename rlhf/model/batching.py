"""Token lists as right-padded tensors, and indices grouped so that there is little padding."""

from collections.abc import Iterator

import torch


def right_pad(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens (B, T) int64 and lengths (B,) int64."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.full((len(rows), int(lengths.max())), pad, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return tokens, lengths


def by_length(lengths: list[int], size: int) -> Iterator[list[int]]:
    """Indices in groups of at most `size` and of similar length, so that there is little padding."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for start in range(0, len(order), size):
        yield order[start : start + size]

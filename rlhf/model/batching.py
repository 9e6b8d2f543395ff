"""Token lists as right-padded tensors, and indices grouped so that there is little padding."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence


def right_pad(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens (B, T) int64 and lengths (B,) int64."""
    tokens = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tokens, batch_first=True, padding_value=pad), torch.tensor([len(row) for row in rows])


def by_length(lengths: list[int], size: int) -> Iterator[list[int]]:
    """Indices in groups of at most `size` and of similar length, so that there is little padding."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for start in range(0, len(order), size):
        yield order[start : start + size]

"""Rows that begin alike as one row: their shared beginning once, then the rest of each, which sees the beginning and itself.

The K answers to a prompt then cost the prompt once. Each token has the same position and attends to the same tokens as in a
row of its own, so the hidden states are the same up to rounding.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.model.batching import right_pad

PADDING = -1  # the segment of a pad; the shared beginning has 0, the rest of the rows 1, 2, …


def shared_length(rows: Sequence[list[int]]) -> int:
    """Tokens of the longest beginning that all rows share, less than the shortest row."""
    shortest = min(map(len, rows)) - 1
    alike = (all(row[i] == rows[0][i] for row in rows) for i in range(shortest))
    return next((i for i, same in enumerate(alike) if not same), shortest)


def joined_length(rows: Sequence[list[int]]) -> int:
    """Tokens of the rows with their shared beginning once."""
    return sum(map(len, rows)) - (len(rows) - 1) * shared_length(rows)


def joining_pays(groups: Sequence[Sequence[list[int]]], width: int) -> bool:
    """Whether a trunk needs less time for joined groups: t tokens of a row need about t (6 width + t) multiplications per
    unit of width, and long answers in one row are compared with each other for nothing."""

    def cost(tokens: int) -> int:
        return tokens * (6 * width + tokens)

    return sum(cost(joined_length(rows)) for rows in groups) < sum(cost(len(row)) for rows in groups for row in rows)


def join_groups(groups: Sequence[Sequence[list[int]]], pad: int) -> tuple[Tensor, Tensor]:
    """Tokens (N, T) of N groups of rows, a joined row each, and the segment (N, T) of each token."""
    tokens, segments = [], []
    for rows in groups:
        start = shared_length(rows)
        tokens.append([*rows[0][:start], *(token for row in rows for token in row[start:])])
        segments.append([0] * start + [k for k, row in enumerate(rows, 1) for _ in row[start:]])
    return right_pad(tokens, pad)[0], right_pad(segments, PADDING)[0]


def layout(segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of segments (N, T): positions (N, T), the mask (N, 1, T, T), True = may attend, and the last token (R,) of each row, by
    group * T + place, group by group."""
    place = torch.arange(segments.shape[1], device=segments.device)
    before = F.pad(segments[:, :-1], (1, 0), value=PADDING)
    after = F.pad(segments[:, 1:], (0, 1), value=PADDING)
    start = torch.where(segments != before, place, 0).cummax(1).values
    shared = (segments == 0).sum(1, keepdim=True)
    positions = (place - start + shared * (segments > 0)) * (segments != PADDING)
    same = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    last = (segments > 0) & (segments != after)
    return positions, (same & (place[:, None] >= place))[:, None], last.flatten().nonzero()[:, 0]


def last_places(segments: Tensor, last: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The last `count` tokens of each row, newest first, through its shared beginning: which exist, (R, count), and their
    group * T + place, (R, count). segments, last: as of `layout`."""
    width = segments.shape[1]
    group, back = last // width, torch.arange(count, device=last.device)
    own = (segments[group] == segments.flatten()[last, None]).sum(1, keepdim=True)
    shared = (segments[group] == 0).sum(1, keepdim=True)
    place = torch.where(back < own, (last % width)[:, None] - back, shared - 1 - (back - own))
    return place >= 0, group[:, None] * width + place.clamp(min=0)

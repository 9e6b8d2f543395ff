"""Rows as batches with little padding: right-padded, grouped by length, and joined: rows with a common prefix as one
row, the prefix once, then the rest of each row, which attends to the prefix and itself. For several answers to a
prompt, the prompt is then computed once; the hidden states are the same up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf.data.records import common_beginning
from rlhf.system.memory import SCORING_BYTES


def right_pad(rows: Sequence[Sequence[int]], pad: int, side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, T) int64, padded on the right or on the `side` "left", and lengths (B,) int64."""
    tokens = [torch.tensor(row, dtype=torch.int64) for row in rows]
    padded = pad_sequence(tokens, batch_first=True, padding_value=pad, padding_side=side)
    return padded, torch.tensor([len(row) for row in rows])


def by_length(
    lengths: Sequence[int],
    most: int | None = None,
    tokens: float | None = None,
    rows: Sequence[int] | None = None,
    joined: bool = False,
) -> list[list[int]]:
    """Indices in groups of similar length, each of at most `most` rows and `tokens` padded tokens (rows times the
    longest), but at least one item; the longest first, so that later groups fit into the memory that they free.

    rows: of each item, which is not divided; one unless given. joined: an item's rows are read as one (`join_rows`).
    """
    groups: list[list[int]] = []
    count = 0  # rows of the last group
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        count += rows[i] if rows else 1
        # rows are kept apart if joining saves less than WORTH says
        wide = (len(groups[-1]) + 1) / WORTH if joined and groups else count
        if not groups or (most and count > most) or (tokens and wide * lengths[i] > tokens):
            groups.append([])
            count = rows[i] if rows else 1
        groups[-1].append(i)
    return groups[::-1]


def scoring_tokens(model: Any) -> int:
    """Most padded tokens of a forward without gradients: what its widest block computes at once then takes
    SCORING_BYTES; more would not be faster. model: anything around a transformer.
    """
    config = next((part.config for part in model.modules() if hasattr(part, "config")), None)
    config = getattr(config, "trunk", None) or config  # of a reward model
    width = getattr(config, "hidden_size", None) or 1024
    names = ("intermediate_size", "ffn_dim", "n_inner")  # of the MLP's width in transformers' configurations
    hidden = next(filter(None, (getattr(config, name, None) for name in names)), 4 * width)
    element = next(model.parameters()).element_size()
    return max(1, int(SCORING_BYTES / (element * (2 * width + 4 * hidden))))


def joins_rows(model: Any) -> bool:
    """Whether the rows of an item are joined where that saves time, as our GPT does on a CPU; windows count distances
    within a row, and text classifiers read each row by itself.
    """
    native = any(getattr(part, "native", False) and part.config.window is None for part in model.modules())
    return native and not getattr(model, "reads_text", False) and not next(model.parameters()).is_cuda


WORTH = 0.8  # rows are joined if that costs at most this share, since the mask costs a part of the saving


@dataclass(frozen=True, slots=True)
class Joined:
    """N joined rows of up to T tokens, in place of R rows."""

    tokens: Tensor  # (N, T) int64, padded on the right
    positions: Tensor  # (N, T) int64
    mask: Tensor  # (N, 1, T, T) bool, True = may attend
    group: Tensor  # (R,) int64, the joined row of each row
    shared: Tensor  # (R,) int64, tokens of its prefix
    rest: Tensor  # (R,) int64, the position of its rest

    def places(self, rows: Tensor, positions: Tensor) -> Tensor:
        """joined row * T + place of the tokens of `rows` at `positions`, each (…)."""
        shared = self.shared[rows]
        place = torch.where(positions < shared, positions, self.rest[rows] + positions - shared)
        return self.group[rows] * self.tokens.shape[1] + place


def shared_length(rows: Sequence[list[int]]) -> int:
    """Of the longest common prefix, shorter than the shortest row."""
    return min(len(common_beginning(rows)), min(map(len, rows)) - 1)


def joined_length(rows: Sequence[list[int]]) -> int:
    """Tokens of the rows, with their common prefix counted once."""
    return sum(map(len, rows)) - (len(rows) - 1) * shared_length(rows)


def cost(tokens: int, width: int) -> int:
    """Multiplications per unit of width, about; joining long answers adds masked attention between them."""
    return tokens * (6 * width + tokens)


def choose_groups(rows: Sequence[list[int]], width: int) -> list[list[int]] | None:
    """Which rows to join, as indices; None if joining saves too little. width: the model's."""
    widest, order = max(map(len, rows)), sorted(range(len(rows)), key=rows.__getitem__)
    plain, ways = len(rows) * cost(widest, width), []
    for padded in (0, widest):  # a row that stays alone counts by its length, or by the width to which it is padded
        groups, lengths = list[list[int]](), list[int]()
        for i in order:
            together = joined_length([rows[j] for j in [*groups[-1], i]]) if groups else 0
            apart = cost(max(lengths[-1], padded), width) + cost(max(len(rows[i]), padded), width) if groups else 0
            if together and cost(together, width) < apart:
                groups[-1].append(i)
                lengths[-1] = together
            else:
                groups.append([i])
                lengths.append(len(rows[i]))
        ways.append((len(groups) * cost(max(lengths), width), groups))
    least, groups = min(ways, key=lambda way: way[0])
    return groups if least <= WORTH * plain else None


def join_rows(tokens: Tensor, rows: Tensor, positions: Tensor, width: int) -> Joined | None:
    """The rows of tokens (B, T) joined, each up to the last of its `positions`; None if that saves no time."""
    ends = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
    ends = ends.scatter_reduce(0, rows, positions, "amax")
    texts = [row[: end + 1] for row, end in zip(tokens.tolist(), ends.tolist(), strict=True)]
    groups = choose_groups(texts, width)
    return None if groups is None else join(texts, groups, tokens.device)


def join(rows: Sequence[list[int]], groups: Sequence[Sequence[int]], device: torch.device | None = None) -> Joined:
    """Every row is in one group. The order of the groups, and of the rows in each, is kept."""
    group, shared, rest = ([0] * len(rows) for _ in range(3))
    lines = []
    for number, chosen in enumerate(groups):
        start = shared_length([rows[i] for i in chosen])
        tokens, positions, segments = list(rows[chosen[0]][:start]), list(range(start)), [0] * start
        for k, i in enumerate(chosen, 1):
            group[i], shared[i], rest[i] = number, start, len(tokens)
            tokens += rows[i][start:]
            positions += range(start, len(rows[i]))
            segments += [k] * (len(rows[i]) - start)
        lines.append((tokens, positions, segments))
    # the segment of the prefix is 0, of the rests of the rows 1, 2, …, of padding -1
    padded = zip(zip(*lines, strict=True), (0, 0, -1), strict=True)
    u, place, segment = (right_pad(values, pad)[0].to(device) for values, pad in padded)  # (N, T) each
    same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    mask = (same & torch.ones_like(same[0]).tril())[:, None]
    return Joined(u, place, mask, *(torch.tensor(x, device=device) for x in (group, shared, rest)))

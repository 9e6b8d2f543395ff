"""Right-padded tensors, and indices grouped by length."""

import random

import torch

from rlhf.model.batching import by_length, right_pad


def test_rows_are_padded_on_the_right():
    tokens, lengths = right_pad([[5, 6, 7], [8], []], pad=9)
    assert tokens.tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert lengths.tolist() == [3, 1, 0]
    assert tokens.dtype == lengths.dtype == torch.int64


def test_every_index_comes_once_in_groups_of_at_most_the_size():
    rng = random.Random(0)
    lengths = [rng.randint(1, 50) for _ in range(103)]
    groups = list(by_length(lengths, 8))
    assert sorted(i for group in groups for i in group) == list(range(103))
    assert [len(group) for group in groups] == [7] + [8] * 12

    def padding(parts: list[list[int]]) -> int:
        return sum(max(lengths[i] for i in part) - lengths[i] for part in parts for i in part)

    in_order = [list(range(start, min(start + 8, 103))) for start in range(0, 103, 8)]
    assert padding(groups) < 0.2 * padding(in_order)

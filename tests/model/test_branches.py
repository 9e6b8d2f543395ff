"""Rows in batches: padded on the right, grouped by length, and joined where they begin alike."""

import random
from functools import partial

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from rlhf.model import RewardModel
from rlhf.model.batching import by_length, choose_groups, join, right_pad
from rlhf.model.fused_loss import response_logprobs
from tests.presets import make_gpt

ROWS = [[5, 6, 7, 8], [4, 4, 4], [5, 6, 7, 9, 1], [3], [4, 4, 4, 4], [5, 6, 2]]
# 5, 6 once, then 7 8, 7 9 1 and 2; of a row that begins another one, the last token is its own
GROUPS = [[0, 2, 5], [1, 4], [3]]
make_policy = partial(make_gpt, vocab_size=53, context_length=64)


def siblings(draw: torch.Generator) -> tuple[list[list[int]], list[int]]:
    """Three prompts of 20, 21 and 30 tokens with 3 answers each, in no order; and the prompts' lengths."""
    rows, starts = [], []
    for length in (20, 21, 30):
        prompt = torch.randint(0, 53, (length,), generator=draw).tolist()
        for answer in (3, 5, 4):
            rows.append(prompt + torch.randint(0, 53, (answer,), generator=draw).tolist())
            starts.append(length)
    order = torch.randperm(len(rows), generator=draw).tolist()
    return [rows[i] for i in order], [starts[i] for i in order]


def trunk_rows(model) -> list[tuple[int, ...]]:
    """The shapes of the token tensors that reach the model's trunk after this call."""
    shapes: list[tuple[int, ...]] = []
    note = lambda module, given, named: shapes.append(tuple(named["input_ids"].shape))  # noqa: E731
    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return shapes


def test_a_joined_row_by_hand():
    joined = join(ROWS, GROUPS)
    assert joined.tokens.tolist() == [[5, 6, 7, 8, 7, 9, 1, 2], [4, 4, 4, 4, 4, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]]
    assert joined.positions.tolist() == [[0, 1, 2, 3, 2, 3, 4, 2], [0, 1, 2, 2, 3, 0, 0, 0], [0] * 8]
    assert joined.mask[0, 0, 5].tolist() == [True, True, False, False, True, True, False, False]
    assert joined.mask.any(-1).all()  # a row of the mask without any token has no softmax
    at = joined.places(torch.tensor([2, 2, 5, 4, 3]), torch.tensor([1, 4, 2, 3, 0]))
    assert at.tolist() == [1, 6, 7, 8 + 4, 16]


def test_rows_are_joined_where_that_costs_less():
    """Width 8. Prompt 40, answers 2: one row of 44, 44 (48 + 44) = 4,048, in place of 2 * 42 (48 + 42) = 7,560. A prompt of 1 with
    answers of 100: 201 (48 + 201) = 50,049 in place of 2 * 101 (48 + 101) = 30,098."""
    short = [[*range(40), k, 0] for k in (2, 3)]
    assert choose_groups(short, 8) == [[0, 1]]
    assert choose_groups([[1, *[k] * 100] for k in (2, 3)], 8) is None
    others = [[k] * 42 for k in range(40, 45)]
    # six rows of 44 in place of seven of 42: less than a fifth is saved
    assert choose_groups([*short, *others], 8) is None
    assert choose_groups([[1, 2, 3]], 8) is None
    pairs = [[1] * 8 + [2] * 16, [1] * 8 + [3] * 7, [9] * 6 + [2], [9] * 6 + [3] * 18]
    assert choose_groups(pairs, 64) == [[0, 1], [2, 3]], "two prompts in one row would lengthen all others"


@pytest.mark.parametrize(
    "overrides",
    [{}, {"positions": "learned"}, {"positions": "sinusoidal", "block": "post"}, {"qk_norm": True, "n_kv_head": 1}],
)
def test_scores_and_gradients_are_those_of_rows_of_their_own(overrides):
    model = RewardModel.from_causal_lm(make_policy(**overrides))
    rows, _ = siblings(torch.Generator().manual_seed(1))
    shapes, weights, found = trunk_rows(model), torch.arange(1.0, 1.0 + len(rows)), []
    for read_tokens in (1, 4):  # more than the shortest answer has
        model.config.read_tokens = read_tokens
        for parts in ([rows], [[row] for row in rows]):  # all at once, and one by one
            model.zero_grad()
            scores = torch.cat([model(*right_pad(part, 0)) for part in parts])
            (scores * weights).sum().backward()
            found.append((scores.detach(), parameters_to_vector([p.grad for p in model.parameters()])))
        assert torch.allclose(found[-2][0], found[-1][0], atol=1e-6)
        assert torch.allclose(found[-2][1], found[-1][1], atol=1e-4)
    assert shapes.count((3, 42)) == 2  # 30 + 3 + 5 + 4


def test_log_probs_and_their_gradients_are_those_of_rows_of_their_own():
    policy = make_policy()
    rows, starts = siblings(torch.Generator().manual_seed(2))
    shapes, found = trunk_rows(policy), []
    for parts in ([list(range(9))], [[i] for i in range(9)]):
        policy.zero_grad()
        total = []
        for part in parts:
            tokens, lengths = right_pad([rows[i] for i in part], 0)
            prompts = torch.tensor([starts[i] for i in part])
            mask = torch.arange(5) < (lengths - prompts)[:, None]
            total += list(response_logprobs(policy, tokens, prompts, mask)[0].unbind())
        (torch.stack(total).sum(1) * torch.arange(1.0, 10.0)).sum().backward()
        found.append((torch.stack(total).detach(), parameters_to_vector([p.grad for p in policy.parameters()])))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-4)
    assert shapes[0] == (3, 39)  # the last token of an answer predicts nothing: 30 + 2 + 4 + 3


def test_rows_are_padded_on_the_right_and_grouped_once_by_length():
    tokens, lengths = right_pad([[5, 6, 7], [8], []], pad=9)
    assert tokens.tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert lengths.tolist() == [3, 1, 0]
    assert tokens.dtype == lengths.dtype == torch.int64
    rng = random.Random(0)
    lengths = [rng.randint(1, 50) for _ in range(103)]
    groups = list(by_length(lengths, 8))
    assert sorted(i for group in groups for i in group) == list(range(103))
    assert [len(group) for group in groups] == [7] + [8] * 12

    def padding(parts: list[list[int]]) -> int:
        return sum(max(lengths[i] for i in part) - lengths[i] for part in parts for i in part)

    in_order = [list(range(start, min(start + 8, 103))) for start in range(0, 103, 8)]
    assert padding(groups) < 0.2 * padding(in_order)

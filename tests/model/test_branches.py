"""Joined rows: the answers to a prompt in one row, which reads the prompt once."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from rlhf.model import GPTForCausalLM, RewardModel
from rlhf.model.batching import right_pad
from rlhf.model.branches import join_groups, joined_length, joining_pays, last_places, layout, shared_length
from tests.presets import preset

GROUPS = [
    [[5, 6, 7, 8], [5, 6, 7, 9, 1], [5, 6, 2]],  # 5, 6 once, then 7 8, 7 9 1 and 2
    [[4, 4, 4], [4, 4, 4, 4]],  # of a row that begins another one, the last token is its own
    [[3]],
]


def test_the_shared_beginning_leaves_each_row_a_token():
    assert [shared_length(rows) for rows in GROUPS] == [2, 2, 0]
    assert [joined_length(rows) for rows in GROUPS] == [8, 5, 1]


def test_layout_by_hand():
    tokens, segments = join_groups(GROUPS, pad=0)
    assert tokens.tolist() == [[5, 6, 7, 8, 7, 9, 1, 2], [4, 4, 4, 4, 4, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]]
    positions, mask, last = layout(segments)
    assert positions.tolist() == [[0, 1, 2, 3, 2, 3, 4, 2], [0, 1, 2, 2, 3, 0, 0, 0], [0] * 8]
    assert last.tolist() == [3, 6, 7, 8 + 2, 8 + 4, 16]
    assert mask[0, 0, 5].tolist() == [True, True, False, False, True, True, False, False]
    assert mask.any(-1).all()  # a row of the mask without any token has no softmax


def test_the_last_tokens_of_a_row_reach_into_the_shared_beginning():
    _, segments = join_groups(GROUPS, pad=0)
    real, places = last_places(segments, layout(segments)[2], 4)
    newest_first = [[3, 2, 1, 0], [6, 5, 4, 1], [7, 1, 0], [10, 9, 8], [12, 11, 9, 8], [16]]
    assert [row[exist].tolist() for row, exist in zip(places, real, strict=True)] == newest_first


@pytest.mark.parametrize("read_tokens", [1, 3])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"positions": "learned"}, {"positions": "sinusoidal", "block": "post"}, {"qk_norm": True, "n_kv_head": 1}],
)
def test_joined_rows_have_the_scores_and_the_gradients_of_rows_of_their_own(overrides, read_tokens):
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "context_length": 16, "n_layer": 2, "n_head": 2, "width": 32}
    model = RewardModel.from_causal_lm(GPTForCausalLM(preset("tiny", **{**sizes, **overrides})))
    model.config.read_tokens = read_tokens
    assert model.reads_branches
    found = []
    rows, lengths = right_pad([row for group in GROUPS for row in group], 0)
    tokens, segments = join_groups(GROUPS, 0)
    for scores in (model(rows, lengths), model(tokens, segments=segments)):
        model.zero_grad()
        (scores * torch.arange(1.0, 7.0)).sum().backward()
        found.append((scores.detach(), parameters_to_vector([p.grad for p in model.parameters()])))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-4)


def test_answers_are_joined_where_that_costs_less():
    """Width 8. Prompt 4, answers 2: 8 tokens, 8 (48 + 8) = 448, against 2 * 6 (48 + 6) = 648. Answers of 100 after a prompt of
    1: 201 (48 + 201) = 50,049 against 2 * 101 (48 + 101) = 30,098."""
    short = [[[1, 1, 1, 1, k, 0] for k in (2, 3)]]
    long = [[[1, *[k] * 100] for k in (2, 3)]]
    assert joining_pays(short, 8) and not joining_pays(long, 8)


def test_a_banded_model_keeps_rows_of_their_own():
    sizes = {"vocab_size": 53, "context_length": 16, "n_layer": 2, "n_head": 2, "width": 32}
    assert not RewardModel.from_causal_lm(GPTForCausalLM(preset("tiny", **sizes, window=4))).reads_branches

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.ops.gae import compute_advantages, gae, group_normalised, leave_one_out
from tests import oracles
from tests.ops.strategies import batches, pad

NAN = float("nan")


def test_by_hand():
    # gamma 0.5, lam 0.5, rewards 1 0 4, values 1 2 3, the episode ends
    # delta_2 = 4 + 0.5*0 - 3 = 1;      A_2 = 1
    # delta_1 = 0 + 0.5*3 - 2 = -0.5;   A_1 = -0.5 + 0.25*1 = -0.25
    # delta_0 = 1 + 0.5*2 - 1 = 1;      A_0 = 1 + 0.25*-0.25 = 0.9375
    # R = A + V = 1.9375, 1.75, 4
    # in the middle of a row: what stands around it is not read
    rewards = torch.tensor([[NAN, 1.0, 0.0, 4.0, NAN]])
    values = torch.tensor([[NAN, 1.0, 2.0, 3.0, NAN]])
    mask = torch.tensor([[False, True, True, True, False]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.0, 0.9375, -0.25, 1.0, 0.0]]
    assert returns.tolist() == [[0.0, 1.9375, 1.75, 4.0, 0.0]]


def test_an_episode_that_was_cut_off_goes_on_at_its_last_value():
    # the same with V = 2 after the last token: delta_2 = 4 + 0.5*2 - 3 = 2, A_1 = -0.5 + 0.25*2 = 0
    # A_0 = 1 + 0.25*0 = 1; the second row is over: as above
    rewards, values = torch.tensor([[1.0, 0.0, 4.0, 9.0]] * 2), torch.tensor([[1.0, 2.0, 3.0, 9.0]] * 2)
    mask = torch.tensor([[True, True, True, False]] * 2)
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5, last_values=torch.tensor([2.0, 0.0]))
    assert advantages.tolist() == [[1.0, 0.0, 2.0, 0.0], [0.9375, -0.25, 1.0, 0.0]]
    assert returns.tolist() == [[2.0, 2.0, 5.0, 0.0], [1.9375, 1.75, 4.0, 0.0]]


factors = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


@settings(max_examples=60, deadline=None)
@given(batches(min_length=0), factors, factors, st.booleans())
def test_agrees_with_the_sum_of_the_paper(batch, gamma, lam, cut_off):
    last = batch.a[:, 0] if cut_off else None
    got = gae(batch.b, batch.c, batch.mask, gamma=gamma, lam=lam, last_values=last)
    expected = oracles.gae(batch.b.numpy(), batch.c.numpy(), batch.mask.numpy(), gamma, lam, last)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5, rtol=1e-5)
        assert (ours[~batch.mask] == 0).all()


@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(0, 4), st.integers(0, 4), st.randoms())
def test_padding_and_order_change_nothing(batch, left, right, random):
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    last = batch.a[:, 0]
    whole = gae(batch.b, batch.c, batch.mask, last_values=last)
    fills = (batch.b, NAN), (batch.c, 1e30), (batch.mask, False)
    padded = gae(*(pad(x, left, right, fill)[order] for x, fill in fills), last_values=last[order])
    T = batch.mask.shape[1]
    for ours, again in zip(whole, padded, strict=True):
        assert torch.equal(again[:, left : left + T], ours[order])
        assert again[:, :left].eq(0).all() and again[:, left + T :].eq(0).all()


def test_no_graph_and_float32_from_half_precision():
    values = torch.ones(1, 3, dtype=torch.bfloat16, requires_grad=True)
    for out in gae(torch.ones(1, 3, dtype=torch.bfloat16), values, torch.ones(1, 3, dtype=torch.bool)):
        assert out.dtype == torch.float32 and not out.requires_grad


# Two prompts with three responses each.
REWARDS = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 4.0])


def test_leave_one_out_by_hand():
    # 1 - (2 + 6)/2 = -3;  2 - (1 + 6)/2 = -1.5;  6 - (1 + 2)/2 = 4.5
    assert leave_one_out(REWARDS, 3).tolist() == [-3.0, -1.5, 4.5, 0.0, 0.0, 0.0]


def test_group_normalised_by_hand():
    # mean 3, variance (4 + 1 + 9)/3 = 14/3, std 2.160247
    found = group_normalised(REWARDS, 3)
    assert found[:3].tolist() == pytest.approx([-2 / 2.160247, -1 / 2.160247, 3 / 2.160247], abs=1e-5)
    assert found[3:].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_every_token_of_a_response_has_its_advantage_and_padding_none(kind):
    mask = torch.tensor([[True, True], [True, False]])
    rewards = torch.tensor([[0.5, 1.5], [1.0, 99.0]])  # 2 and 1 in all
    advantages, returns = compute_advantages(kind, rewards, torch.zeros(2, 2), mask, group_size=2)
    # rloo: 2 - 1 = 1 and -1; grpo: mean 1.5, std .5: 1 and -1
    assert torch.allclose(advantages, torch.tensor([[1.0, 1.0], [-1.0, 0.0]]), atol=1e-5)
    assert returns.tolist() == [[2.0, 2.0], [1.0, 0.0]]


def test_the_reward_to_go_by_hand():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, 99.0, 99.0]])
    values = torch.full((2, 3), 50.0)  # not read, nor is lam
    advantages, returns = compute_advantages("reinforce", rewards, values, mask, gamma=0.5, lam=0.0)
    # 4;  2 + 4/2 = 4;  1 + 4/2 = 3
    assert advantages.tolist() == [[3.0, 4.0, 4.0], [3.0, 0.0, 0.0]] and returns.equal(advantages)


@given(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), st.floats(-5, 5, width=32))
def test_a_constant_on_all_rewards_of_a_prompt_changes_nothing(rewards, shift):
    x = torch.tensor(rewards, dtype=torch.float64)
    assert torch.allclose(leave_one_out(x, 4), leave_one_out(x + shift, 4), atol=1e-6)
    assert leave_one_out(x, 4).sum().abs() < 1e-6
    if x.std() > 1e-2:
        assert torch.allclose(group_normalised(x, 4), group_normalised(x + shift, 4), atol=1e-6)

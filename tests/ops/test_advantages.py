"""Advantages by name: the group baselines by hand, and what does not matter to them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.ops.gae import compute_advantages, gae, group_normalised, leave_one_out

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


def test_gae_by_name_is_gae():
    torch.manual_seed(0)
    rewards, values = torch.randn(3, 4), torch.randn(3, 4)
    mask = torch.arange(4) < torch.tensor([4, 2, 1])[:, None]
    settings = {"gamma": 0.9, "lam": 0.8}
    found, wanted = compute_advantages("gae", rewards, values, mask, **settings), gae(rewards, values, mask, **settings)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@given(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), st.floats(-5, 5, width=32))
def test_a_constant_on_all_rewards_of_a_prompt_changes_nothing(rewards, shift):
    x = torch.tensor(rewards, dtype=torch.float64)
    assert torch.allclose(leave_one_out(x, 4), leave_one_out(x + shift, 4), atol=1e-6)
    assert leave_one_out(x, 4).sum().abs() < 1e-6
    if x.std() > 1e-2:
        assert torch.allclose(group_normalised(x, 4), group_normalised(x + shift, 4), atol=1e-6)


@pytest.mark.parametrize(("rewards", "size"), [(torch.ones(4), 1), (torch.ones(4), 3), (torch.ones(2, 2), 2)])
def test_groups_that_are_not_whole_are_refused(rewards, size):
    with pytest.raises(ValueError):
        leave_one_out(rewards, size)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="give one of gae, reinforce, rloo, grpo"):
        compute_advantages("vtrace", torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1).bool())

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.ops.gae import gae
from rlhf.ops.kl import kl_estimate
from rlhf.ops.masked import masked_sum, whiten
from rlhf.ops.ppo import apply_missing_eos, policy_loss, sampler_weights, token_rewards, value_loss
from tests import oracles
from tests.ops.strategies import batches, make_batch, pad

NAN, INF = float("nan"), float("inf")


def test_missing_eos():
    scores, ended = torch.tensor([2.0, 2.0, -3.0, -3.0]), torch.tensor([True, False, True, False])
    assert apply_missing_eos(scores, ended, -1.0).tolist() == [2.0, -1.0, -3.0, -3.0]  # min(-3, -1) = -3
    assert apply_missing_eos(scores, ended, -1.0, rule="replace").tolist() == [2.0, -1.0, -3.0, -1.0]
    assert apply_missing_eos(scores, ended, -1.0, rule="none").tolist() == [2.0, 2.0, -3.0, -3.0]
    with pytest.raises(ValueError, match=r"want torch\.bool"):
        apply_missing_eos(scores, ended.int(), -1.0)


def test_sampler_weights_by_hand():
    # ratios: row 0: e^0.5 = 1.6487, e^1 = 2.7183 -> 2, masked; row 1: e^-0.5 = 0.6065, e^0.1 = 1.1052, e^0.3 = 1.3499
    # products: e^1.5 = 4.48 is outside [1/2, 2], e^-0.1 = 0.90 is inside
    logp_sampled = torch.tensor([[-2.0, -2.0, NAN], [-1.0, -1.0, -1.0]])
    logp_old = torch.tensor([[-1.5, -1.0, 5.0], [-1.5, -0.9, -0.7]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    of = {kind: sampler_weights(logp_old, logp_sampled, mask, kind) for kind in ("truncate", "mask", "none")}
    truncated = torch.tensor([[1.6487, 2.0, 0.0], [0.6065, 1.1052, 1.3499]])
    torch.testing.assert_close(of["truncate"], truncated, atol=1e-4, rtol=0)
    assert of["mask"].tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert of["none"].tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]


def test_token_rewards_by_hand():
    # kl_coef 0.5; row 0 responds at 1 and 2: -0.5 * (-1 + 2) = -0.5; -0.5 * (-1 + 0.5) + 3 = 3.25
    # row 1 at 0: -0.5 * (-2 + 1) - 4 = -3.5
    logp_old = torch.tensor([[NAN, -1.0, -1.0, NAN], [-2.0, NAN, NAN, NAN]])
    logp_ref = torch.tensor([[NAN, -2.0, -0.5, NAN], [-1.0, NAN, NAN, NAN]])
    mask = torch.tensor([[False, True, True, False], [True, False, False, False]])
    rewards = token_rewards(torch.tensor([3.0, -4.0]), logp_old, logp_ref, mask, 0.5)
    assert rewards.tolist() == [[0.0, -0.5, 3.25, 0.0], [-3.5, 0.0, 0.0, 0.0]]


def test_tokens_earn_their_parts_of_the_score_by_hand():
    # without KL: row 0 earns 0.5 and 2, and what is left of 3 is at its last token: 2 + 0.5; row 1: -1 + (-4 + 1)
    logp, mask = torch.zeros(2, 3), torch.tensor([[False, True, True], [True, False, False]])
    parts = torch.tensor([[NAN, 0.5, 2.0], [-1.0, NAN, NAN]])
    rewards = token_rewards(torch.tensor([3.0, -4.0]), logp, logp, mask, 0.5, parts)
    assert rewards.tolist() == [[0.0, 0.5, 2.5], [-4.0, 0.0, 0.0]]


def test_what_tokens_earn_changes_no_expected_gradient():
    """Exactly, over all responses of 3 tokens from 3: a token cannot change what was earned before it."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(*[3] * t, 3, generator=generator, dtype=torch.float64, requires_grad=True) for t in range(3)]
    earned = [torch.randn(*[3] * (t + 1), generator=generator, dtype=torch.float64) for t in range(3)]  # by tokens 0…t
    responses = torch.cartesian_prod(*[torch.arange(3)] * 3)  # (27, 3)
    logp = torch.stack(
        [logits[t].log_softmax(-1)[tuple(responses[:, : t + 1].T)] for t in range(3)], 1
    )  # of each token after those before it
    parts = torch.stack([earned[t][tuple(responses[:, : t + 1].T)] for t in range(3)], 1)
    mask = torch.ones(27, 3, dtype=torch.bool)
    chance = logp.sum(1, keepdim=True).exp().detach()

    def gradient(token_scores):
        rewards = token_rewards(parts.sum(1), logp.detach(), logp.detach(), mask, 0.0, token_scores)
        advantages, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=1.0, lam=1.0)
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad((chance * logp * advantages).sum(), logits, retain_graph=True)]
        )

    assert gradient(None).abs().max() > 0.1
    torch.testing.assert_close(gradient(parts), gradient(None), rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(batches(), st.floats(0, 1))
def test_token_rewards_agree_with_the_oracle_and_sum_to_the_objective(batch, kl_coef):
    scores = batch.c[:, 0]
    rewards = token_rewards(scores, batch.a, batch.b, batch.mask, kl_coef)
    expected = oracles.token_rewards(scores.numpy(), batch.a.numpy(), batch.b.numpy(), batch.mask.numpy(), kl_coef)
    np.testing.assert_allclose(rewards.numpy(), expected, atol=1e-5)
    kl = masked_sum(kl_estimate(batch.a, batch.b), batch.mask, dim=1)
    torch.testing.assert_close(rewards.sum(1), scores - kl_coef * kl, rtol=1e-4, atol=1e-4)


def test_policy_loss_by_hand():
    # clip_range 0.2, ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages 1, -1, 1, -1, 2
    #   -A rho            -1.5   1.5  -0.5   0.5  -2.2
    #   -A clip(rho)      -1.2   1.2  -0.8   0.8  -2.2
    #   the larger        -1.2   1.5  -0.5   0.8  -2.2     sum -1.6, over 5 tokens -0.32
    # the clipped one is larger at tokens 0 and 3: clipfrac 2/5
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 1.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0, 7.0]])
    mask = torch.tensor([[True, True, True, True, True, False]])
    logp_old = torch.full((1, 6), -1.0)
    loss, statistics = policy_loss(logp_old + ratio.log(), logp_old, advantages, mask, clip_range=0.2)
    assert loss.item() == pytest.approx(-0.32, abs=1e-6)
    assert statistics["loss"].item() == loss.item()
    assert statistics["clipfrac"].item() == pytest.approx(0.4)
    assert statistics["ratio_max"].item() == pytest.approx(1.5)
    # 0.5 * (2 log(1.5)^2 + 2 log(2)^2 + log(1.1)^2) / 5
    approxkl = 0.5 * (2 * math.log(1.5) ** 2 + 2 * math.log(2) ** 2 + math.log(1.1) ** 2) / 5
    assert statistics["approxkl"].item() == pytest.approx(approxkl, rel=1e-5)
    # without clipping the sum of -A rho is -2.2, and every token has a gradient
    free, unclipped = policy_loss(logp_old + ratio.log(), logp_old, advantages, mask, clip_range=INF)
    assert free.item() == pytest.approx(-2.2 / 5, abs=1e-6) and unclipped["clipfrac"].item() == 0.0
    # over a global count of 10 all but the largest ratio halve
    _, half = policy_loss(logp_old + ratio.log(), logp_old, advantages, mask, clip_range=0.2, denominator=10)
    assert half["loss"].item() == pytest.approx(-0.16, abs=1e-6)
    assert half["clipfrac"].item() == pytest.approx(0.2)
    assert half["ratio_max"].item() == pytest.approx(1.5)


def test_a_higher_upper_limit_by_hand():
    # clipped to 0.8 … 1.4; ratios 1.3, 1.5, 0.5 with advantages 1, 1, -1
    #   -A rho        -1.3  -1.5  0.5
    #   -A clip(rho)  -1.3  -1.4  0.8     the larger: -1.3 - 1.4 + 0.8 = -1.9, over 3 tokens; two are clipped
    ratio, advantages = torch.tensor([[1.3, 1.5, 0.5]]), torch.tensor([[1.0, 1.0, -1.0]])
    old, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    loss, statistics = policy_loss(ratio.log(), old, advantages, mask, clip_range=0.2, clip_range_high=0.4)
    assert loss.item() == pytest.approx(-1.9 / 3, abs=1e-6) and statistics["clipfrac"].item() == pytest.approx(2 / 3)
    # with one limit also the first: -1.2 - 1.2 + 0.8
    loss, _ = policy_loss(ratio.log(), old, advantages, mask, clip_range=0.2)
    assert loss.item() == pytest.approx(-1.6 / 3, abs=1e-6)


def test_value_loss_by_hand():
    # clip_range 0.2, V_old 0: V = 1, R = 2: (1 - 2)^2 = 1, clipped 0.2: (0.2 - 2)^2 = 3.24, larger
    #                          V = 1, R = 0: 1,              clipped 0.2: 0.04
    #                          V = 0.1, R = 1: 0.81,         not clipped
    # 1/2 (3.24 + 1 + 0.81) / 3 = 0.841666…
    values, returns = torch.tensor([[1.0, 1.0, 0.1, 5.0]]), torch.tensor([[2.0, 0.0, 1.0, NAN]])
    mask = torch.tensor([[True, True, True, False]])
    loss, statistics = value_loss(values, torch.zeros(1, 4), returns, mask, clip_range=0.2)
    assert loss.item() == pytest.approx(0.5 * 5.05 / 3, abs=1e-6)
    assert statistics["clipfrac"].item() == pytest.approx(1 / 3)

    plain, _ = value_loss(values, torch.zeros(1, 4), returns, mask, clip_range=INF)
    assert plain.item() == pytest.approx(0.5 * 2.81 / 3, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([0.05, 0.2, 0.5]), st.sampled_from([None, 0.1, 0.7]))
def test_losses_agree_with_the_oracles(batch, clip_range, high):
    arrays = [x.numpy() for x in (batch.a, batch.b, batch.c, batch.mask)]
    loss, statistics = policy_loss(batch.a, batch.b, batch.c, batch.mask, clip_range, clip_range_high=high)
    expected, measured = oracles.policy_loss(*arrays, clip_range, high)
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, value in measured.items():
        assert statistics[name].item() == pytest.approx(value, rel=1e-4, abs=1e-5), name
    loss, statistics = value_loss(batch.a, batch.b, batch.c, batch.mask, clip_range=clip_range)
    expected, measured = oracles.value_loss(*arrays, clip_range)
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert statistics["clipfrac"].item() == pytest.approx(measured["clipfrac"], abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(batches())
def test_first_minibatch(batch):
    """The policy has not moved: ratio 1, nothing clipped, and the gradient is the plain policy gradient."""
    logp = batch.a.clone().requires_grad_()
    advantages = whiten(batch.c, batch.mask)
    loss, statistics = policy_loss(logp, batch.a, advantages, batch.mask, clip_range=0.2)
    loss.backward()
    assert statistics["ratio_max"].item() == 1.0
    assert statistics["clipfrac"].item() == 0.0 and statistics["approxkl"].item() == 0.0
    assert loss.item() == pytest.approx(0.0, abs=1e-5)  # minus the mean of whitened advantages
    torch.testing.assert_close(logp.grad, -advantages / batch.mask.sum(), rtol=1e-5, atol=1e-7)
    _, statistics = value_loss(batch.c, batch.c, batch.a, batch.mask, clip_range=0.2)
    assert statistics["clipfrac"].item() == 0.0


def losses(batch, denominator=None):
    mask, *leaves = batch
    logp, old, other = leaves[0].clone().requires_grad_(), leaves[1], leaves[2]
    values = leaves[0].clone().requires_grad_()
    p, p_statistics = policy_loss(logp, old, other, mask, clip_range=0.2, denominator=denominator)
    v, v_statistics = value_loss(values, old, other, mask, clip_range=0.2, denominator=denominator)
    (p + v).backward()
    statistics = {f"policy/{k}": x.item() for k, x in p_statistics.items()}
    statistics |= {f"value/{k}": x.item() for k, x in v_statistics.items()}
    return statistics, logp.grad, values.grad


@settings(max_examples=40, deadline=None)
@given(batches(min_rows=2, min_length=0), st.integers(1, 4))
def test_a_split_batch_with_the_global_count_is_the_whole(batch, size):
    batch.mask[-1, 0] = True  # something counts; a part may still have nothing
    N = batch.mask.sum()
    whole, *whole_grads = losses(batch)
    parts = [losses(type(batch)(*part), denominator=N) for part in zip(*(x.split(size) for x in batch), strict=True)]
    for name, value in whole.items():
        join = max if name == "policy/ratio_max" else sum
        assert join(part[0][name] for part in parts) == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for n, grad in enumerate(whole_grads):
        torch.testing.assert_close(torch.cat([part[n + 1] for part in parts]), grad, rtol=1e-5, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(0, 4), st.integers(0, 4), st.sampled_from([NAN, INF, 1e30, 0.0]), st.randoms())
def test_padding_and_order_change_no_loss_gradient_or_statistic(batch, left, right, fill, random):
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    padded = [pad(batch.mask, left, right, False)[order]]
    padded += [pad(x, left, right, sign * fill)[order] for x, sign in zip(batch[1:], (1, -1, 1), strict=True)]
    whole, *whole_grads = losses(batch)
    again, *again_grads = losses(type(batch)(*padded))
    for name, value in whole.items():
        assert again[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    T = batch.mask.shape[1]
    for grad, grad_again in zip(whole_grads, again_grads, strict=True):
        torch.testing.assert_close(grad_again[:, left : left + T], grad[order], rtol=1e-5, atol=1e-7)
        assert grad_again[~padded[0]].eq(0).all()  # not NaN either


def test_the_end_token_gets_gradient():
    batch = make_batch(1, [(2, 3), (1, 5)], T=7)
    rewards = token_rewards(torch.tensor([1.0, -1.0]), batch.a, batch.a, batch.mask, 0.02)
    advantages, _ = gae(rewards, torch.zeros_like(rewards), batch.mask)
    logp = batch.a.clone().requires_grad_()
    policy_loss(logp, batch.a, whiten(advantages, batch.mask), batch.mask, clip_range=0.2)[0].backward()
    assert logp.grad[0, 4] < 0 < logp.grad[1, 5]  # up for the good response, down for the bad one
    assert (logp.grad[~batch.mask] == 0).all()


def test_clipping_stops_the_gradient_only_where_it_makes_the_objective_smaller():
    # ratio 1.5 and A > 0: clipped, no gradient; A < 0: not. ratio 0.5 and A < 0: no gradient; A > 0: some
    logp = torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log().requires_grad_()
    A, mask = torch.tensor([[1.0, -1.0, -1.0, 1.0]]), torch.ones(1, 4, dtype=torch.bool)
    policy_loss(logp, torch.zeros(1, 4), A, mask, clip_range=0.2)[0].backward()
    # d(-A rho)/dlogp = -A rho, over 4 tokens: 1.5 / 4 and -0.5 / 4
    assert logp.grad.tolist()[0] == pytest.approx([0.0, 0.375, 0.0, -0.125], abs=1e-6)


def test_gradcheck():
    """And no gradient flows into the old log-probs and values, or into advantages and returns."""
    batch = make_batch(5, [(0, 4), (2, 5), (6, 1)], T=7, dtype=torch.float64)
    x, b, c = (leaf.requires_grad_() for leaf in batch[1:])
    for function in (policy_loss, value_loss):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x, batch.b, batch.c, batch.mask, clip_range=0.2)[0], x)
        loss, statistics = function(x, b, c, batch.mask, clip_range=0.2)
        loss.backward()
        assert b.grad is None and c.grad is None and not any(value.requires_grad for value in statistics.values())


def test_half_precision_is_raised_to_float32():
    batch = make_batch(3, [(0, 7)] * 3, T=7)
    half = [x.bfloat16() for x in batch[1:]]
    for function in (policy_loss, value_loss):
        loss, _ = function(*half, batch.mask, clip_range=0.2)
        exact, _ = function(*(x.float() for x in half), batch.mask, clip_range=0.2)
        assert loss.dtype == torch.float32 and loss.item() == exact.item()

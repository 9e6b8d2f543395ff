import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.ops.kl import AdaptiveKL, kl_estimate, kl_loss
from tests import oracles

NAN = float("nan")


def test_by_hand():
    # d = log 2 and -log 2: k1 = d; k2 = d^2 / 2; k3 = 1/2 - 1 + log 2 and 2 - 1 - log 2
    logp, logp_ref = torch.tensor([0.0, -math.log(2)]), torch.tensor([-math.log(2), 0.0])
    d = math.log(2)
    assert kl_estimate(logp, logp_ref, kind="k1").tolist() == pytest.approx([d, -d])
    assert kl_estimate(logp, logp_ref, kind="k2").tolist() == pytest.approx([d * d / 2, d * d / 2])
    assert kl_estimate(logp, logp_ref, kind="k3").tolist() == pytest.approx([d - 0.5, 1 - d])
    assert torch.equal(kl_estimate(logp, logp_ref), kl_estimate(logp, logp_ref, kind="k1"))


@settings(max_examples=40, deadline=None)
@given(st.floats(-20, 0), st.floats(-20, 0), st.sampled_from(["k1", "k2", "k3"]))
def test_agrees_with_the_oracle_and_sign(logp, logp_ref, kind):
    got = kl_estimate(torch.tensor([logp], dtype=torch.float64), torch.tensor([logp_ref], dtype=torch.float64), kind)
    np.testing.assert_allclose(got.numpy(), [oracles.kl(logp, logp_ref, kind)], rtol=1e-9, atol=1e-12)
    if kind != "k1":
        assert got.item() >= 0


def test_k3_keeps_small_differences_in_float32():
    # d = 1e-4: k3 = d^2 / 2 = 5e-9; exp(-d) - 1 without expm1 has an error of 6e-8, with it one of 1e-12
    got = kl_estimate(torch.tensor([1e-4]), torch.tensor([0.0]), kind="k3").item()
    assert got == pytest.approx(5e-9, rel=2e-3)


@pytest.mark.parametrize("moved", [0.0, 0.4], ids=["on the policy", "after a step"])
def test_the_gradient_of_the_loss_is_the_exact_one_over_all_responses(moved):
    """Responses of two tokens out of three: the mean of the loss's gradient over all nine, by the sampling policy's probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits, ref, noise = (torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in "abc")  # by prefix
    old = logits + moved * noise
    logits.requires_grad_(True)
    logp, logp_ref, logp_old = (x.log_softmax(-1) for x in (logits, ref, old))
    responses = [(a, b) for a in range(3) for b in range(3)]
    where = torch.tensor([[(0, a), (1 + a, b)] for a, b in responses])  # (9, 2, 2): prefix and token
    picked = [x[where[..., 0], where[..., 1]] for x in (logp, logp_old, logp_ref)]
    chance = picked[1].sum(1).exp().detach()
    mask = torch.ones(1, 2, dtype=torch.bool)
    each = [kl_loss(*(x[i : i + 1] for x in picked), mask, denominator=1) for i in range(9)]
    found = torch.autograd.grad((torch.stack(each) * chance).sum(), logits, retain_graph=True)[0]
    divergence = (logp.exp() * (logp - logp_ref)).sum(-1)  # (4,)
    reached = torch.cat([torch.ones(1, dtype=torch.float64), logp_old[0].exp()]).detach()
    exact = torch.autograd.grad((divergence * reached).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)
    k3 = (kl_estimate(picked[0], picked[2], kind="k3").sum(1) * chance).sum()
    assert (torch.autograd.grad(k3, logits)[0] - exact).norm() > 0.1 * exact.norm()


def test_adaptive_by_hand():
    kl = AdaptiveKL(init=0.1, target=6.0, horizon=1000)
    # 6.6 / 6 - 1 = 0.1: 0.1 * (1 + 0.1 * 100 / 1000) = 0.101
    assert kl.update(6.6, 100) == pytest.approx(0.101)
    assert kl.coef == pytest.approx(0.101)
    # far above: error clipped to 0.2: 0.101 * (1 + 0.2 * 500 / 1000) = 0.1111
    kl.update(torch.tensor(60.0), 500)
    assert kl.coef == pytest.approx(0.1111)
    # below: -3 / 6 - 1 = -1.5 clipped to -0.2: 0.1111 * (1 - 0.1) = 0.09999
    kl.update(-3.0, 500)
    assert kl.coef == pytest.approx(0.09999)
    kl.update(6.0, 500)  # on target
    assert kl.coef == pytest.approx(0.09999)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 1), st.floats(0.1, 50), st.floats(-10, 1000), st.integers(1, 512))
def test_adaptive_moves_towards_the_target_and_no_further_than_the_clip(init, target, kl, episodes):
    controller = AdaptiveKL(init=init, target=target, horizon=10000)
    ratio = controller.update(kl, episodes) / init
    assert abs(ratio - 1) <= 0.2 * episodes / 10000 + 1e-9
    if abs(kl - target) > 1e-6 * target:
        assert (ratio > 1) == (kl > target)


def test_a_resumed_controller_goes_on_where_it_stopped():
    whole, resumed = (AdaptiveKL(init=0.2, target=6.0, horizon=2000) for _ in range(2))
    for kl in (3.0, 9.0):
        whole.update(kl, 512)
    resumed.load_state_dict(whole.state_dict())
    for kl in (20.0, 5.0, 7.0):
        whole.update(kl, 512)
        resumed.update(kl, 512)
    assert resumed.coef == whole.coef != 0.2

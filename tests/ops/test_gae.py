import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.ops.gae import gae
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


def test_defaults_are_gamma_1_and_lam_095():
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.25 - 0.5 = -0.25; A_0 = -0.25 + 0.95 * 0.75 = 0.4625
    assert gae(rewards, values, mask)[0].tolist()[0] == pytest.approx([0.4625, 0.75])


factors = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


@settings(max_examples=60, deadline=None)
@given(batches(min_length=0), factors, factors)
def test_agrees_with_the_sum_of_the_paper(batch, gamma, lam):
    got = gae(batch.b, batch.c, batch.mask, gamma=gamma, lam=lam)
    expected = oracles.gae(batch.b.numpy(), batch.c.numpy(), batch.mask.numpy(), gamma, lam)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5, rtol=1e-5)
        assert (ours[~batch.mask] == 0).all()


@settings(max_examples=30, deadline=None)
@given(batches(), factors)
def test_lam_1_gives_monte_carlo_returns(batch, gamma):
    _, returns = gae(batch.b, batch.c, batch.mask, gamma=gamma, lam=1.0)
    for row, mask, got in zip(batch.b.double(), batch.mask, returns, strict=True):
        rewards = row[mask].tolist()
        expected = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
        assert got[mask].tolist() == pytest.approx(expected, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(0, 4), st.integers(0, 4), st.randoms())
def test_padding_and_order_change_nothing(batch, left, right, random):
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    whole = gae(batch.b, batch.c, batch.mask)
    padded = gae(
        pad(batch.b, left, right, NAN)[order],
        pad(batch.c, left, right, 1e30)[order],
        pad(batch.mask, left, right, False)[order],
    )
    T = batch.mask.shape[1]
    for ours, again in zip(whole, padded, strict=True):
        assert torch.equal(again[:, left : left + T], ours[order])
        assert again[:, :left].eq(0).all() and again[:, left + T :].eq(0).all()


def test_no_graph_and_float32_from_half_precision():
    values = torch.ones(1, 3, dtype=torch.bfloat16, requires_grad=True)
    for out in gae(torch.ones(1, 3, dtype=torch.bfloat16), values, torch.ones(1, 3, dtype=torch.bool)):
        assert out.dtype == torch.float32 and not out.requires_grad


def test_bad_input_is_refused():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="row 1 of mask has a hole"):
        gae(x, x, torch.tensor([[True, True, True], [True, False, True]]))
    with pytest.raises(ValueError, match=r"want torch\.bool"):
        gae(x, x, mask.int())
    with pytest.raises(ValueError, match="values has shape"):
        gae(x, x[:, :2], mask)
    with pytest.raises(ValueError, match=r"give \(B, T\)"):
        gae(x[0], x[0], mask[0])
    with pytest.raises(ValueError, match="give floats"):
        gae(x.long(), x, mask)
    for bad in ({"gamma": 1.1}, {"lam": -0.1}, {"lam": NAN}):
        with pytest.raises(ValueError, match="within 0 to 1"):
            gae(x, x, mask, **bad)

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf.ops.masked import masked_mean, masked_sum, whiten
from tests import oracles
from tests.ops.strategies import batches, pad

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[True, True, False], [False, False, True]])


def test_sum_mean_and_variance_by_hand():
    # counted: 1, 2, 6
    assert masked_sum(X, MASK).item() == 9.0
    assert masked_sum(X, MASK, dim=1).tolist() == [3.0, 6.0]
    assert masked_mean(X, MASK).item() == 3.0  # 9 / 3
    assert masked_mean(X, MASK, denominator=6).item() == 1.5  # 9 / 6
    assert masked_mean(X, MASK, denominator=torch.tensor(4)).item() == 2.25  # 9 / 4
    # variance ((1 - 3)^2 + (2 - 3)^2 + (6 - 3)^2) / 3 = (4 + 1 + 9) / 3 = 14 / 3
    assert whiten(X, MASK)[1, 2].item() == pytest.approx(3 / (14 / 3) ** 0.5, rel=1e-6)


def test_whiten_by_hand():
    # values 1 and 3: mean 2, biased variance 1, so -1 and 1
    white = whiten(torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[True, True, False]]))
    assert white.tolist()[0] == pytest.approx([-1.0, 1.0, 0.0], abs=1e-6)
    assert whiten(torch.full((1, 4), 3.0), torch.ones(1, 4, dtype=torch.bool)).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_outside_the_mask_reaches_neither_result_nor_gradient(bad):
    x = torch.where(MASK, X, bad).requires_grad_()
    total = masked_mean(x, MASK) + (whiten(x, MASK) * X).sum()
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~MASK] == 0).all()


@settings(max_examples=40, deadline=None)
@given(batches(min_rows=2))
def test_whiten_has_mean_0_and_variance_1_and_agrees_with_the_oracle(batch):
    assume(batch.c[batch.mask].var(unbiased=False) > 1e-2)  # else 1e-8 and float32's rounding show
    white = whiten(batch.c, batch.mask)
    counted = white[batch.mask].double()
    assert abs(counted.mean().item()) < 1e-5
    assert counted.var(unbiased=False).item() == pytest.approx(1.0, abs=1e-5)
    assert (white[~batch.mask] == 0).all()
    expected = oracles.whiten(batch.c.numpy(), batch.mask.numpy())
    np.testing.assert_allclose(white.numpy(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(0, 3), st.integers(0, 3), st.randoms())
def test_padding_and_order_change_nothing(batch, left, right, random):
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    x, mask = pad(batch.a, left, right, float("nan"))[order], pad(batch.mask, left, right, False)[order]
    assert masked_mean(x, mask).item() == pytest.approx(masked_mean(batch.a, batch.mask).item(), rel=1e-5)
    white = whiten(pad(batch.c, left, right, float("nan"))[order], mask)[mask].sort().values
    assert torch.allclose(white, whiten(batch.c, batch.mask)[batch.mask].sort().values, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(batches(min_rows=2))
def test_parts_with_the_global_count_add_up_to_the_whole(batch):
    count = batch.mask.sum()
    parts = [masked_mean(x, m, count) for x, m in zip(batch.a.split(1), batch.mask.split(1), strict=True)]
    assert sum(parts).item() == pytest.approx(masked_mean(batch.a, batch.mask).item(), rel=1e-5)


class Reduce:
    """What all ranks' sums add up to, in the order in which `whiten` sums them; keeps this rank's own."""

    def __init__(self, *totals: torch.Tensor):
        self.totals, self.own = list(totals), []

    def __call__(self, own: torch.Tensor) -> torch.Tensor:
        self.own.append(own)
        return self.totals[len(self.own) - 1]


def test_whiten_over_ranks_is_whiten_of_the_whole():
    x = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, True], [True, False, True], [False, False, False]])
    # counted: 1, 2, 3, 10, 30: five of sum 46, mean 9.2; squares 67.24 + 51.84 + 38.44 + 0.64 + 432.64 = 590.8
    # count and sum, squares; the last rank counts nothing
    wanted = [([3, 6], 157.52), ([2, 40], 433.28), ([0, 0], 0.0)]
    for rank, (sums, squares) in enumerate(wanted):
        reduce = Reduce(torch.tensor([5.0, 46.0]), torch.tensor(590.8))
        found = whiten(x[rank : rank + 1], mask[rank : rank + 1], reduce)
        torch.testing.assert_close(found, whiten(x, mask)[rank : rank + 1])
        assert reduce.own[0].tolist() == sums and reduce.own[1].item() == pytest.approx(squares)


def test_half_precision_is_summed_in_float32():
    # 4097 ones: bfloat16 and float16 sums stop at 256 and 2048
    x, mask = torch.ones(1, 4097), torch.ones(1, 4097, dtype=torch.bool)
    for dtype in (torch.bfloat16, torch.float16):
        total = masked_sum(x.to(dtype), mask)
        assert total.dtype == torch.float32 and total.item() == 4097
    assert masked_sum(x.double(), mask).dtype == torch.float64

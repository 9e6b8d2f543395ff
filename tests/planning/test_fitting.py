"""Scaling laws recovered from synthetic losses whose constants are known."""

import numpy as np
import pytest

from rlhf.planning.fitting import fit_loss_law, fit_parabola, fit_power
from rlhf.planning.scaling import PUBLISHED, LossLaw

OTHER = LossLaw(np.log(1.1), np.log(300.0), np.log(900.0), 0.5, 0.25)
BUDGETS = [float(c) for c in np.geomspace(1e17, 1e20, 6)]


def isoflop_runs(law: LossLaw, noise: float = 0.0) -> list[tuple[float, float, float, float]]:
    """(C, N, D, loss) of seven sizes around the best one of each budget."""
    rng = np.random.default_rng(0)
    runs = []
    for budget in BUDGETS:
        for n in law.frontier.parameters(budget) * np.geomspace(0.4, 2.5, 7):
            d = budget / (6 * n)
            runs.append((budget, float(n), d, law.loss(n, d) * float(np.exp(rng.normal(0, noise)))))
    return runs


@pytest.mark.parametrize("law", [PUBLISHED, OTHER])
def test_the_constants_of_synthetic_losses_come_back(law):
    _, n, d, losses = zip(*isoflop_runs(law), strict=True)
    found = fit_loss_law(n, d, losses)
    assert (found.alpha, found.beta) == pytest.approx((law.alpha, law.beta), abs=1e-3)
    assert np.exp(found.log_e) == pytest.approx(np.exp(law.log_e), rel=1e-3)
    assert found.a == pytest.approx(law.beta / (law.alpha + law.beta), abs=1e-3) and found.a + found.b == pytest.approx(
        1
    )
    assert max(abs(found.loss(*nd) / law.loss(*nd) - 1) for nd in zip(n, d, strict=True)) < 1e-4


def test_an_outlier_does_not_move_the_huber_fit():
    runs = isoflop_runs(PUBLISHED, noise=2e-4)
    _, n, d, losses = zip(*runs, strict=True)
    spoilt = [losses[0] * 1.2, *losses[1:]]
    assert fit_loss_law(n, d, spoilt).a == pytest.approx(PUBLISHED.a, abs=0.03)
    assert fit_loss_law(n, d, spoilt, near=PUBLISHED).a == pytest.approx(PUBLISHED.a, abs=0.03)


@pytest.mark.parametrize("law", [PUBLISHED, OTHER])
def test_isoflop_minima_give_the_exponent(law):
    runs = isoflop_runs(law)
    best = []
    for budget in BUDGETS:
        curve = fit_parabola(*zip(*[(n, loss) for c, n, _, loss in runs if c == budget], strict=True))
        best.append(curve.minimum)
    k, a = fit_power(BUDGETS, best)
    # A parabola in ln N is not quite the law's shape, so that its minimum is a little off: 0.01 in the exponent.
    assert a == pytest.approx(law.a, abs=0.01)
    assert [k * c**a for c in BUDGETS] == pytest.approx(best, rel=0.03)
    wrong = LossLaw(law.log_e, law.log_a, law.log_b, law.alpha, law.beta * 1.3)
    assert abs(a - wrong.a) > 0.04, "a wrong exponent is told from the right one"


def test_a_curve_that_opens_downwards_has_no_minimum():
    assert fit_parabola([1e3, 1e4, 1e5], [1.0, 2.0, 1.0]).minimum is None
    curve = fit_parabola([1e3, 1e4, 1e5], [2.0, 1.0, 2.0])
    assert curve.minimum == pytest.approx(1e4) and np.polyval(curve, np.log(1e4)) == pytest.approx(1.0)

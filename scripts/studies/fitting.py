"""Scaling laws fitted to measured losses, after Hoffmann et al. 2022: IsoFLOP curves (approach 2) and L(N, D) (approach 3).

N parameters, D tokens, C = 6 N D FLOPs, losses in nats per token.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlhf.planning.scaling import LossLaw

DELTA = 1e-3  # of the Huber loss
# Hoffmann et al. 2022, section D.3: alpha, beta, e, a, b of L = exp(e) + exp(a) / N^alpha + exp(b) / D^beta.
EXPONENTS, ERRORS, FACTORS = np.arange(0, 2.5, 0.5), np.arange(-1, 1.5, 0.5), np.arange(0, 30, 5)
STARTS = (EXPONENTS, EXPONENTS, ERRORS, FACTORS, FACTORS)
TRIED = 12


class Parabola(NamedTuple):
    """log-quadratic loss of one budget: L(x) = c2 (ln x)^2 + c1 ln x + c0."""

    c2: float
    c1: float
    c0: float

    @property
    def minimum(self) -> float | None:
        """x of the least loss; None if the curve does not open upwards."""
        return float(np.exp(-self.c1 / (2 * self.c2))) if self.c2 > 0 else None


def fit_parabola(x: Sequence[float], losses: Sequence[float]) -> Parabola:
    """The IsoFLOP curve of one budget over N (or D): least squares of loss on ln x. Needs three different x.

    Source: Hoffmann et al. 2022, section 3.2.
    """
    return Parabola(*(float(c) for c in np.polyfit(np.log(x), losses, 2)))


def fit_power(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(k, a) of y = k x^a, by least squares of ln y on ln x."""
    a, log_k = np.polyfit(np.log(x), np.log(y), 1)
    return float(np.exp(log_k)), float(a)


def fit_loss_law(
    parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float], near: LossLaw | None = None
) -> LossLaw:
    """The law that minimises sum Huber_delta(log L(N, D) - log L) with delta = 1e-3, by L-BFGS. Needs at least five runs.

    near: start from this law alone, for the resamples of a bootstrap.

    Source: Hoffmann et al. 2022, equation 3 and section D.3.
    Differs: of the paper's 4,500 starts only the `TRIED` with the least objective are followed; ln N and ln D are centred, which moves
    no minimum, and the sum is minimised to 1e-12 (Besiroglu et al. 2024: the paper's own optimiser stopped too early).
    """
    from scipy.optimize import minimize

    n, d, target = (np.log(np.asarray(values, float)) for values in (parameters, tokens, losses))
    n0, d0 = n.mean(), d.mean()
    n, d = n - n0, d - d0

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        alpha, beta, e, a, b = point
        terms = np.stack([np.full_like(n, e), a - alpha * n, b - beta * d])
        top = terms.max(0)
        exps = np.exp(terms - top)
        share = exps / exps.sum(0)
        off = top + np.log(exps.sum(0)) - target
        slope = np.clip(off, -DELTA, DELTA)
        value = np.where(np.abs(off) <= DELTA, off**2 / 2, DELTA * (np.abs(off) - DELTA / 2)).sum()
        by_exponents = [-slope @ (share[1] * n), -slope @ (share[2] * d)]
        gradient = np.array([*by_exponents, *(slope @ part for part in share)])
        return value / DELTA**2, gradient / DELTA**2  # a scale that suits the optimiser's tolerances

    if near is not None:
        starts = [(near.alpha, near.beta, near.log_e, near.log_a - near.alpha * n0, near.log_b - near.beta * d0)]
    else:
        grid = [(al, be, e, a - al * n0, b - be * d0) for al, be, e, a, b in itertools.product(*STARTS)]
        starts = sorted(grid, key=lambda point: objective(np.array(point))[0])[:TRIED]
    exactly = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-12, "gtol": 1e-8}
    minima = [minimize(objective, np.array(start), jac=True, method="L-BFGS-B", options=exactly) for start in starts]
    alpha, beta, e, a, b = min(minima, key=lambda minimum: minimum.fun).x
    return LossLaw(float(e), float(a + alpha * n0), float(b + beta * d0), float(alpha), float(beta))

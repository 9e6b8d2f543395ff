"""Compute-optimal parameters and tokens after Hoffmann et al. 2022, by each of the paper's three approaches.

C = 6 N D in all of them, as in the paper's own tables.
"""

import math
import statistics
from dataclasses import dataclass

# Printed projections: parameters, FLOPs, tokens. Source: Hoffmann et al. 2022, table 3 (approach 1) and table A3 (2 and 3).
TABLE: dict[int, tuple[tuple[float, float, float], ...]] = {
    1: (
        (400e6, 1.92e19, 8.0e9), (1e9, 1.21e20, 20.2e9), (10e9, 1.23e22, 205.1e9), (67e9, 5.76e23, 1.5e12),
        (175e9, 3.85e24, 3.7e12), (280e9, 9.90e24, 5.9e12), (520e9, 3.43e25, 11.0e12), (1e12, 1.27e26, 21.2e12),
        (10e12, 1.30e28, 216.2e12),
    ),
    2: (
        (400e6, 1.84e19, 7.7e9), (1e9, 1.20e20, 20.0e9), (10e9, 1.32e22, 219.5e9), (67e9, 6.88e23, 1.7e12),
        (175e9, 4.54e24, 4.3e12), (280e9, 1.18e25, 7.1e12), (520e9, 4.19e25, 13.4e12), (1e12, 1.59e26, 26.5e12),
        (10e12, 1.75e28, 292.0e12),
    ),
    3: (
        (400e6, 2.21e19, 9.2e9), (1e9, 1.62e20, 27.1e9), (10e9, 2.46e22, 410.1e9), (67e9, 1.71e24, 4.1e12),
        (175e9, 1.26e24, 12.0e12), (280e9, 3.52e25, 20.1e12), (520e9, 1.36e26, 43.5e12), (1e12, 5.65e26, 94.1e12),
        (10e12, 8.55e28, 1425.5e12),
    ),
}  # fmt: skip

OFF_LINE = 67e9


@dataclass(slots=True, frozen=True)
class Frontier:
    """N_opt = k C^a; D_opt = C / (6 N_opt)."""

    k: float
    a: float

    def parameters(self, flops: float) -> float:
        """N_opt of a budget of C = `flops`."""
        return float(self.k * flops**self.a)

    def tokens(self, flops: float) -> float:
        """D_opt of a budget of C = `flops`."""
        return flops / (6.0 * self.parameters(flops))

    def flops(self, parameters: float) -> float:
        """The budget at which this size is optimal."""
        return float((parameters / self.k) ** (1.0 / self.a))


def fit_frontier(rows: tuple[tuple[float, float, float], ...]) -> Frontier:
    """Least squares of log N on log C over (N, C, D), the row of 67 billion left out.

    The paper prints the exponents of approaches 1 and 2 to two digits (0.50 and 0.49) and no factors; its projections have
    more digits, and both can be computed from them. The row of 67 billion is off the line of the other eight: in table A3
    it belongs to a model 3% larger.
    """
    on_line = [(math.log(flops), math.log(parameters)) for parameters, flops, _ in rows if parameters != OFF_LINE]
    a, log_k = statistics.linear_regression(*zip(*on_line, strict=True))
    return Frontier(k=math.exp(log_k), a=a)


@dataclass(slots=True, frozen=True)
class LossLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token (Hoffmann et al. 2022, equation 2)."""

    log_e: float
    log_a: float
    log_b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        of_size, of_text = math.exp(self.log_a) / parameters**self.alpha, math.exp(self.log_b) / tokens**self.beta
        return float(math.exp(self.log_e) + of_size + of_text)

    @property
    def a(self) -> float:
        """N_opt grows as C^a."""
        return self.beta / (self.alpha + self.beta)

    @property
    def b(self) -> float:
        """D_opt grows as C^b."""
        return self.alpha / (self.alpha + self.beta)

    @property
    def frontier(self) -> Frontier:
        """Where the loss is least under 6 N D = C: N_opt = G (C/6)^a,  G = (alpha A / (beta B))^(1/(alpha + beta)).

        Source: Hoffmann et al. 2022, equation 4.
        """
        log_g = (math.log(self.alpha) + self.log_a - math.log(self.beta) - self.log_b) / (self.alpha + self.beta)
        return Frontier(k=float(math.exp(log_g) / 6.0**self.a), a=self.a)


# Approach 3 before rounding, from the comment in the TeX source of arXiv:2203.15556, as
# Besiroglu et al. 2024 (arXiv:2404.10102) carry them in their published analysis. The paper prints A 406.4, B 410.7,
# E 1.69, alpha 0.34, beta 0.28, which move its own projections by tens of per cent.
PUBLISHED = LossLaw(log_e=0.5267228, log_a=6.0073404, log_b=6.0179186, alpha=0.33917084, beta=0.2849083)


def make_frontiers() -> dict[int, Frontier]:
    """The three approaches' frontiers."""
    return {1: fit_frontier(TABLE[1]), 2: fit_frontier(TABLE[2]), 3: PUBLISHED.frontier}

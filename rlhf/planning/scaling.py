"""Compute-optimal parameters and tokens after Hoffmann et al. 2022, by each of the paper's three approaches, with C = 6 N D."""

import math
from dataclasses import dataclass


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


@dataclass(slots=True, frozen=True)
class LossLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token (Hoffmann et al. 2022, equation 2)."""

    log_e: float
    log_a: float
    log_b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """L(N, D)."""
        of_size, of_text = math.exp(self.log_a) / parameters**self.alpha, math.exp(self.log_b) / tokens**self.beta
        return float(math.exp(self.log_e) + of_size + of_text)

    @property
    def a(self) -> float:
        """N_opt grows as C^a, and D_opt as C^(1 - a)."""
        return self.beta / (self.alpha + self.beta)

    @property
    def frontier(self) -> Frontier:
        """Where the loss is least under 6 N D = C: N_opt = G (C/6)^a,  G = (alpha A / (beta B))^(1/(alpha + beta)).
        Source: Hoffmann et al. 2022, equation 4.
        """
        log_g = (math.log(self.alpha) + self.log_a - math.log(self.beta) - self.log_b) / (self.alpha + self.beta)
        return Frontier(k=float(math.exp(log_g) / 6.0**self.a), a=self.a)


def cheapest(law: LossLaw, loss: float, served: float) -> tuple[float, float]:
    """(N, D) that minimise 6 N D + 2 N S with L(N, D) = `loss`, for S = `served` tokens in use; S = 0: on the frontier.

    A smaller model that was trained longer costs less per served token (Touvron et al. 2023, LLaMA, section 1). The
    loss must be above E. Source: Hoffmann et al. 2022, equation 2; Sardana et al. 2023, equation 1.
    """
    left = loss - math.exp(law.log_e)
    least = (math.exp(law.log_a) / left) ** (1 / law.alpha)  # this size needs endless text

    def tokens(parameters: float) -> float:
        return float((math.exp(law.log_b) / (left - math.exp(law.log_a) / parameters**law.alpha)) ** (1 / law.beta))

    def cost(log_size: float) -> float:
        size = math.exp(log_size)
        return size * (6 * tokens(size) + 2 * served)

    low, high = math.log(least) + 1e-9, math.log(least) + 20.0  # the cost has one minimum
    for _ in range(200):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, second) if cost(first) < cost(second) else (first, high)
    return math.exp(low), tokens(math.exp(low))


# Approach 3 before rounding, from the comment in the TeX source of arXiv:2203.15556, as Besiroglu et al. 2024
# (arXiv:2404.10102) carry them in their published analysis. The paper prints A 406.4, B 410.7, E 1.69, alpha 0.34,
# beta 0.28, which move its own projections by tens of per cent.
PUBLISHED = LossLaw(log_e=0.5267228, log_a=6.0073404, log_b=6.0179186, alpha=0.33917084, beta=0.2849083)
# By approach. The paper prints the exponents of 1 and 2 to two digits (0.50 and 0.49) and no factors: these are the least
# squares of log N on log C over its projections (tables 3 and A3) without the row of 67 billion, which is off their line.
FRONTIERS: dict[int, Frontier] = {
    1: Frontier(k=0.09934867109270612, a=0.4980916124990647),
    2: Frontier(k=0.145574371123876, a=0.4899273325201703),
    3: PUBLISHED.frontier,
}

"""Estimates of the KL divergence from samples, and the coefficient that weighs it."""

from typing import Any

import torch
from torch import Tensor

from rlhf.ops.masked import check_mask, masked_mean, resolve_denominator, upcast


def kl_estimate(logp: Tensor, logp_ref: Tensor, kind: str = "k1") -> Tensor:
    """Estimate KL(policy || reference) token by token, on tokens that the policy sampled.

    d = logp - logp_ref;  k1 = d;  k2 = d^2 / 2;  k3 = exp(-d) - 1 + d

    k1 and k3 are unbiased, k2 is not; k2 and k3 are never negative. logp, logp_ref of one shape, float, nats; returns
    that shape, nats, at least float32. Summed over a sequence's tokens, k1 estimates the KL per sequence.
    Source: Schulman 2020, "Approximating KL divergence" (k1, k2, k3); Ziegler et al. 2019, eq. 2 (k1 in the reward).
    """
    d = upcast(logp) - upcast(logp_ref)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d**2
    if kind == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"kl_estimate: kind is {kind!r}: give k1, k2 or k3")


def kl_loss(
    logp: Tensor, logp_old: Tensor, logp_ref: Tensor, mask: Tensor, denominator: float | Tensor | None = None
) -> Tensor:
    """A loss whose gradient is, in expectation, that of KL(policy || reference) of the next token after each sampled
    prefix.

    sum rho k2 / denominator        rho = exp(logp - logp_old), without a gradient;  k2 = (logp - logp_ref)^2 / 2

    The gradient of k2 is (logp - logp_ref) grad logp, whose expectation over the policy's tokens is the KL's; rho makes
    it one over the policy's when the tokens are those of logp_old. The gradient of k3 alone is not the KL's.

    logp, logp_old, logp_ref of one shape, nats; mask bool; denominator: the tokens of the whole minibatch, those of
    mask unless given. Gradients flow only into logp.
    Source: "A Comedy of Estimators" (arXiv 2512.21852), which compares k1, k2 and k3 in rewards and losses.
    """
    check_mask("kl_loss", mask, logp=logp, logp_old=logp_old, logp_ref=logp_ref)
    N = resolve_denominator("kl_loss", mask.sum(), denominator, "True in mask")
    logp, logp_old, logp_ref = (torch.where(mask, upcast(x), 0.0) for x in (logp, logp_old, logp_ref))
    rho = (logp - logp_old).detach().exp()
    return masked_mean(rho * kl_estimate(logp, logp_ref.detach(), kind="k2"), mask, N)


class FixedKL:
    """A constant KL coefficient, coef. Source: Ouyang et al. 2022, appendix C (a fixed coefficient, 0.02)."""

    def __init__(self, coef: float):
        self.coef = float(coef)

    def update(self, kl: float | Tensor, episodes: int) -> float:
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = float(state["coef"])


class AdaptiveKL(FixedKL):
    """A KL coefficient that follows a target, by a proportional controller in log space.

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon

    init: the first coef; target: nats per sequence; horizon: episodes. Only coef changes: a checkpoint must contain it.
    Source: Ziegler et al. 2019, section 2.2 (the update of beta).
    Differs: the gain is episodes / horizon as in the released code, where the paper prints a constant 0.1.
    """

    def __init__(self, init: float, target: float, horizon: float):
        self.coef, self.target, self.horizon = float(init), float(target), float(horizon)

    def update(self, kl: float | Tensor, episodes: int) -> float:
        """Move coef after `episodes` episodes (of all ranks) of mean KL `kl`, nats per sequence; return it."""
        error = min(max(float(kl) / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * episodes / self.horizon
        return self.coef

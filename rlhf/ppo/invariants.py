"""The recipe's invariants, checked on PPO's first update: training is refused when one fails.

Invariants 2, 3 and, for the sampler, 1 are checked on the first rollout, before any training; 1 and 7 on the policy's first
minibatch, which comes after the critic's warm-up (ppo.critic_warmup_updates).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.errors import UserError
from rlhf.ops.masked import masked_mean
from rlhf.ppo.rollout import Rollout
from rlhf.processes import Ranks

RATIO_TOLERANCE = 1e-4  # bound on |log rho| per token, and on a token's gap to the reference; nats, float32

# The same in bf16, whose products depend on a batch's shape. Measured on two layers of width 64, 3000 tokens, batches of
# 16, 5 and 1 against 32 rows, with logits rounded to bf16 (as under ZeRO-3; elsewhere they are float32): |log rho| is
# 0.03 at most and 1.2e-4 on average, 2.5e-3 nats per sequence at most on average; 0.08 and 3e-4 with logits three times as
# large. The gap to the reference is 0: both models see the same batches.
HALF_RATIO_TOLERANCE = 0.15  # below log(1 + clip_range) = 0.18, so a ratio that passes is not clipped either
HALF_MEAN_GAP = 0.01  # nats per token, mean of absolute values: 30 times the largest mean above
HALF_SEQUENCE_KL = 0.05  # nats per sequence, mean over sequences: 20 times the largest above

# The sampler's log-probs in bf16 against a recomputation, in standard deviations of the log-probs: the rounding of logits
# grows with their spread. Measured on models of 4 and 8 layers with weights of deviation 0.02 to 0.1, 1280 tokens: a mean
# of 0.015 at most and a quantile of 0.07. Sampling at temperature 1.3 has 0.16 and 0.75 at least, a decoder that sees
# padding 0.22 and 1.8, and log-probs of the token before 0.99 and 4.8. A maximum has no bound: it grows with the tokens.
SAMPLER_MEAN, SAMPLER_QUANTILE = 0.06, 0.3
SAMPLER_SHARE = 0.999  # of tokens: the quantile that is compared
SAMPLER_FLOOR = 0.02  # nats: lower bound of the standard deviation

ENTROPY_TOLERANCE = 1e-4  # nats


def refuse(number: int, what: str, trained: str = "nothing was trained") -> None:
    raise UserError(f"ppo: invariant {number} fails on the first update: {what}: {trained}")


def check_first_rollout(
    rollout: Rollout, rewards: Tensor, scores: Tensor, kl_coef: float, tolerance: float = RATIO_TOLERANCE
) -> None:
    """Before the first step the policy equals the reference, and the score is on the last response token.

    tolerance: nats per token. If it is looser than float32's, the log-probs are bf16's, and their means have bounds too:
    single tokens may be off, but not all.

    Raises: UserError naming the invariant.
    """
    check_sampler(rollout)
    check_reference(rollout, tolerance)
    mask = rollout.response_mask
    counts = mask.sum(1)
    if not (counts > 0).all():
        refuse(3, f"{int((counts == 0).sum())} responses have no token")
    last = counts[:, None] - 1
    if not mask.gather(1, last).all():
        refuse(3, "the last response token is masked out")
    penalty = kl_coef * (rollout.logp_old - rollout.logp_ref)
    on_last = (rewards + penalty).gather(1, last)[:, 0]
    rest = torch.where(mask, rewards + penalty, 0.0).scatter(1, last, 0.0)
    if not torch.allclose(on_last, scores, atol=1e-4) or rest.abs().max() > 1e-4:
        refuse(3, "the score is not on the last response token, or not there alone")


def check_sampler(rollout: Rollout) -> None:
    """Invariant 1 if old log-probs are recomputed: the sampler drew from the distribution of the training forward.

    In float32 logp_old is the sampler's own, and `check_reference` compares it with a forward. Raises: UserError.
    """
    mask = rollout.response_mask
    if torch.equal(rollout.logp_sampled, rollout.logp_old) or not mask.any():
        return
    gap = (rollout.logp_sampled - rollout.logp_old).abs()  # (B, A)
    ordered = gap[mask].sort().values
    mean, most = masked_mean(gap, mask).item(), ordered[round(SAMPLER_SHARE * (len(ordered) - 1))].item()
    spread = max(rollout.logp_old[mask].std(correction=0).item(), SAMPLER_FLOOR)
    if not (mean <= SAMPLER_MEAN * spread and most <= SAMPLER_QUANTILE * spread):
        refuse(
            1,
            f"the sampler's log-probs are {mean:.2e} nats off a forward's on average and {most:.2e} at the "
            f"{SAMPLER_SHARE:.1%} quantile, want at most {SAMPLER_MEAN * spread:.2e} and {SAMPLER_QUANTILE * spread:.2e}: "
            "the sampler and the training forward differ (temperature, padding, position, or dtype?)",
        )


def check_reference(rollout: Rollout, tolerance: float) -> None:
    """Invariant 2: log-probs of policy and reference are the same. Raises: UserError."""
    mask = rollout.response_mask
    gap = torch.where(mask, rollout.logp_old - rollout.logp_ref, 0.0)  # (B, A)
    most, mean = gap.abs().max().item(), masked_mean(gap.abs(), mask, mask.sum().clamp(min=1)).item()
    kl = gap.sum(1).mean().item()  # nats per sequence
    limits = [most <= tolerance]
    wanted = f"want at most {tolerance:.2g} on a token"
    if tolerance > RATIO_TOLERANCE:
        limits += [mean <= HALF_MEAN_GAP, abs(kl) <= HALF_SEQUENCE_KL]
        wanted += f", {HALF_MEAN_GAP} on average, and a KL within {HALF_SEQUENCE_KL}"
    if not all(limits):
        refuse(
            2,
            f"log-probs are up to {most:.2e} nats off the reference's, {mean:.2e} on average, which is a KL of "
            f"{kl:.2e} nats per sequence; {wanted}: the reference is not the model that the policy started from, or "
            "the sampler's log-probs are not the forward's",
        )


@dataclass(slots=True)
class Extremes:
    """What `check_first_minibatch` bounds, over this rank's micro-batches."""

    log_ratio: float = 0.0  # the largest |log rho|
    clipped: float = 0.0  # tokens
    least_entropy: float = math.inf  # nats, as the next
    largest_entropy: float = -math.inf

    def add(self, log_ratios: Tensor, entropies: Tensor, clipped: float) -> None:
        """One micro-batch's tokens: log_ratios and entropies (N,)."""
        self.log_ratio = max(self.log_ratio, log_ratios.abs().max().item())
        self.clipped += clipped
        self.least_entropy = min(self.least_entropy, entropies.min().item())
        self.largest_entropy = max(self.largest_entropy, entropies.max().item())

    def over_ranks(self, ranks: Ranks, vocab_size: int) -> tuple[float, float, tuple[float, float]]:
        """The first three arguments of `check_first_minibatch`, the same on every rank."""
        above = ranks.max(self.largest_entropy - math.log(vocab_size))
        return ranks.max(self.log_ratio), ranks.sum(self.clipped), (-ranks.max(-self.least_entropy), above)


def check_first_minibatch(
    largest_log_ratio: float, clipped_tokens: float, entropies: tuple[float, float], tolerance: float = RATIO_TOLERANCE
) -> None:
    """rho = 1 and nothing is clipped before the policy's first step, and entropies are between 0 and log V.

    entropies: the least entropy of a token, and the largest one minus log V. tolerance: of |log rho|, nats.

    Raises: UserError naming the invariant.
    """
    untouched = "the policy was not trained"  # the critic may have been
    if largest_log_ratio > tolerance:
        refuse(
            1,
            f"|log rho| is up to {largest_log_ratio:.2e} before any step, want at most {tolerance:.2g}: the sampler's "
            "log-probs differ from the training forward's (dropout, dtype, or temperature?)",
            untouched,
        )
    if clipped_tokens > 0:
        refuse(
            1,
            f"{clipped_tokens:.0f} tokens are clipped before any step, want none, with |log rho| up to "
            f"{largest_log_ratio:.2e}: ppo.clip_range is narrower than the rounding of log-probs, raise it or set "
            "precision=float32",
            untouched,
        )
    least, above = entropies
    if least < -ENTROPY_TOLERANCE or above > ENTROPY_TOLERANCE:
        refuse(
            7,
            f"the entropy of a token is as low as {least:.4f} or {above:.4f} above log V, want 0 to log V nats",
            untouched,
        )

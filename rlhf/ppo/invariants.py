"""The recipe's invariants, checked on PPO's first update: training is refused when one fails.

Invariants 2, 3 and, for the sampler, 1 are checked on the first rollout, before any training; 1 and 7 on the policy's first
minibatch, which comes after the critic's warm-up (ppo.critic_warmup_updates). docs/ppo.md has the measurements behind the bounds.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.errors import UserError
from rlhf.ppo.experience import Rollout

TOLERANCE = 1e-4  # bound on |log rho| per token, and on a token's gap to the reference; nats, float32


# How far two computations of the same log-probs may be apart in bf16: the mean and the quantile of a share of tokens, in standard
# deviations of the log-probs, since logits are rounded in proportion to their size.
FORWARDS = 0.02  # mean of two forwards over batches of different shapes
SAMPLER = 0.06  # mean of the sampler against a forward
QUANTILE, SHARE = 0.3, 0.999
LEAST_SPREAD = 0.02  # nats: lower bound of the standard deviation
# A KL to the reference in bf16 is refused if it is larger than this and larger than noise around 0
SEQUENCE_KL, STANDARD_ERRORS = 0.05, 5.0  # nats per sequence, mean over sequences
CLIPPED_SHARE = 0.01  # of tokens that rounding in bf16 may put outside ppo.clip_range
ENTROPY_TOLERANCE = 1e-4  # nats


def refuse(number: int, what: str, trained: str = "nothing was trained") -> None:
    raise UserError(f"ppo: invariant {number} fails on the first update: {what}: {trained}")


def rounding_problem(gaps: Tensor, logprobs: Tensor, bound: float) -> str | None:
    """How far gaps (N,) between two computations of logprobs (N,) exceed rounding in bf16; None if they do not."""
    ordered = gaps.abs().sort().values
    mean, most = ordered.mean().item(), ordered[round(SHARE * (len(ordered) - 1))].item()
    spread = max(logprobs.std(correction=0).item(), LEAST_SPREAD)
    if mean <= bound * spread and most <= QUANTILE * spread:
        return None
    found = f"by {mean:.2e} nats on average and {most:.2e} at the {SHARE:.1%} quantile"
    return f"{found}, want {bound * spread:.2e} and {QUANTILE * spread:.2e} or less"


def forwards_problem(gaps: Tensor, logprobs: Tensor, half: bool) -> str | None:
    """How far gaps (N,) between two forwards' logprobs (N,) exceed their bound in bf16 (`half`) or float32; None if they do not."""
    if half:
        return rounding_problem(gaps, logprobs, FORWARDS)
    most = gaps.abs().max().item()
    return None if most <= TOLERANCE else f"by {most:.2e} nats on one token, want {TOLERANCE:.0e} or less"  # NaN too


def check_first_rollout(
    rollout: Rollout, rewards: Tensor, scores: Tensor, kl_coef: float, half: bool, from_reference: bool = True
) -> None:
    """Before the first step the policy equals the reference, if it starts from it, and the score is on the last response token,
    except for the parts that other tokens earn.

    half: whether log-probs are computed in bf16. Raises: UserError naming the invariant.
    """
    mask = rollout.response_mask
    if mask.any():
        check_sampler(rollout)
        if from_reference:
            check_reference(rollout, half)
    counts = mask.sum(1)
    if not (counts > 0).all():
        refuse(3, f"{int((counts == 0).sum())} responses have no token")
    last = counts[:, None] - 1
    if not mask.gather(1, last).all():
        refuse(3, "the last response token is masked out")
    earned = rollout.token_scores
    scored = torch.where(mask, rewards + kl_coef * (rollout.logp_old - rollout.logp_ref) - earned, 0.0)
    on_last, rest = scored.gather(1, last)[:, 0], scored.scatter(1, last, 0.0)
    if not torch.allclose(on_last, scores - earned.sum(1), atol=1e-4) or rest.abs().max() > 1e-4:
        refuse(3, "the score is not on the last response token, or not there alone")


def check_sampler(rollout: Rollout) -> None:
    """Invariant 1 if old log-probs are recomputed: the sampler drew from the distribution of the training forward.

    In float32 logp_old is the sampler's own, and `check_reference` compares it with a forward. Raises: UserError.
    """
    mask = rollout.response_mask
    if torch.equal(rollout.logp_sampled, rollout.logp_old):
        return
    gaps = (rollout.logp_sampled - rollout.logp_old)[mask]
    if problem := rounding_problem(gaps, rollout.logp_old[mask], SAMPLER):
        refuse(
            1,
            f"the sampler's log-probs differ from a forward's {problem}: the sampler and the training forward differ "
            "(temperature, padding, position, or dtype?)",
        )


def check_reference(rollout: Rollout, half: bool) -> None:
    """Invariant 2: log-probs of policy and reference are the same. Raises: UserError."""
    mask = rollout.response_mask
    gaps = (rollout.logp_old - rollout.logp_ref)[mask]
    problem = forwards_problem(gaps, rollout.logp_old[mask], half)
    if half:
        kl, noise = gaps.sum().item() / len(mask), gaps.std(correction=0).item() * len(gaps) ** 0.5 / len(mask)
        if problem is None and abs(kl) > max(SEQUENCE_KL, STANDARD_ERRORS * noise):
            problem = f"by a KL of {kl:.2e} nats per sequence, want {SEQUENCE_KL} or {STANDARD_ERRORS:.0f} standard errors or less"
    if problem is not None:
        refuse(
            2,
            f"log-probs differ from the reference's {problem}: the reference is not the model that the policy started from, or "
            "the sampler's log-probs are not the forward's",
        )


class Checked(NamedTuple):
    """The figures that are checked of N tokens of the policy's first minibatch, on the CPU."""

    log_ratios: Tensor  # (N,), as the next two
    logp_old: Tensor
    entropies: Tensor
    clipped: float  # tokens


def check_first_minibatch(parts: list[Checked], vocab_size: int, half: bool) -> None:
    """rho = 1 and nothing is clipped before the policy's first step, and entropies are between 0 and log V.

    parts: the micro-batches of all ranks. half: whether log-probs are computed in bf16. Raises: UserError naming the invariant.
    """
    untouched = "the policy was not trained"  # the critic may have been
    log_ratios, logp_old, entropies = (torch.cat(x) for x in zip(*(part[:3] for part in parts), strict=True))
    clipped = sum(part.clipped for part in parts)
    if problem := forwards_problem(log_ratios, logp_old, half):
        what = f"before any step log-probs differ from the rollout's {problem} (dropout, dtype, or temperature?)"
        refuse(1, what, untouched)
    if clipped > (CLIPPED_SHARE * len(log_ratios) if half else 0):
        refuse(
            1,
            f"{clipped:.0f} of {len(log_ratios)} tokens are clipped before any step, with |log rho| up to "
            f"{log_ratios.abs().max():.2e}: ppo.clip_range is narrower than the rounding of log-probs, raise it or set precision=float32",
            untouched,
        )
    least, above = entropies.min().item(), entropies.max().item() - math.log(vocab_size)
    if least < -ENTROPY_TOLERANCE or above > ENTROPY_TOLERANCE:
        what = f"the entropy of a token is as low as {least:.4f} or {above:.4f} above log V, want 0 to log V nats"
        refuse(7, what, untouched)

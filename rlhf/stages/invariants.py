"""The recipe's invariants, checked on PPO's first update: training is refused when one fails."""

import torch
from torch import Tensor

from rlhf.errors import UserError
from rlhf.rollout import Rollout

RATIO_TOLERANCE = 1e-4  # of |log rho| a token, float32
HALF_RATIO_TOLERANCE = 0.5  # the same in bf16: products depend on a batch's shape, and logits near 64 step by 0.5
ENTROPY_TOLERANCE = 1e-4  # nats


def refuse(number: int, what: str) -> None:
    raise UserError(f"ppo: invariant {number} fails on the first update: {what}: nothing was trained")


def check_first_rollout(
    rollout: Rollout, rewards: Tensor, scores: Tensor, kl_coef: float, tolerance: float = RATIO_TOLERANCE
) -> None:
    """Before the first step the policy is the reference, and the score sits on the last response token.

    Raises: UserError naming the invariant.
    """
    mask = rollout.response_mask
    gap = torch.where(mask, rollout.logp_old - rollout.logp_ref, 0.0).abs().max()
    if gap > tolerance:
        refuse(2, f"a token's log-prob is up to {gap:.2e} nats off the reference's, want at most {tolerance:.0e} (KL 0): the "
                  "reference is not the model that the policy started from, or the sampler's log-probs are not the "
                  "forward's")  # fmt: skip
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


def check_first_minibatch(
    largest_log_ratio: float, clipped_tokens: float, entropies: tuple[float, float], tolerance: float = RATIO_TOLERANCE
) -> None:
    """rho = 1 and nothing is clipped before the first step, and entropies lie within 0 and log V.

    entropies: the least entropy of a token, and by how much the largest passes log V. Raises: UserError.
    """
    if largest_log_ratio > tolerance:
        refuse(1, f"|log rho| is up to {largest_log_ratio:.2e} before any step, want at most {tolerance:.0e}: the "
                  "sampler's log-probs differ from the training forward's (dropout, dtype, or temperature?)")  # fmt: skip
    if clipped_tokens > 0:
        refuse(1, f"{clipped_tokens:.0f} tokens are clipped before any step, want none")
    least, above = entropies
    if least < -ENTROPY_TOLERANCE or above > ENTROPY_TOLERANCE:
        refuse(7, f"the entropy of a token is as low as {least:.4f} or {above:.4f} above log V, want 0 to log V nats")

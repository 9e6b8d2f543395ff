"""Rewards per token, the clipped policy and value losses, and their statistics.

Losses are sums over tokens divided by `denominator`; an engine that averages gradients over ranks must be given
loss * ranks when that count is global.
"""

import math

import torch
from torch import Tensor

from rlhf.ops.masked import check_mask, masked_mean, resolve_denominator, upcast

CAP = 2.0  # on importance weights of sampled tokens


def apply_missing_eos(scores: Tensor, ended: Tensor, missing_eos_score: float, rule: str = "min") -> Tensor:
    """Lower the score of every response that has no end token.

    score := min(score, missing_eos_score)  (rule "min")  or  missing_eos_score  (rule "replace")  or  score  (rule
    "none")

    scores (B,) float, calibrated; ended (B,) bool, True if the response has its end token; returns (B,).
    Source: Ziegler et al. 2019, released code: a fixed score for a sample without its end (rule "replace").
    Differs: with "min", the default, truncation never raises the score of a bad response.
    """
    check_mask("apply_missing_eos (mask = ended)", ended, scores=scores)
    scores = upcast(scores)
    if rule == "none":
        return scores
    lowered = scores.clamp(max=missing_eos_score) if rule == "min" else torch.full_like(scores, missing_eos_score)
    return torch.where(ended, scores, lowered)


def sampler_weights(logp_old: Tensor, logp_sampled: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Weights of the policy loss on tokens that another engine sampled, with rho_t = exp(logp_old_t - logp_sampled_t).

    truncate: min(rho_t, 2)   mask: 1 if 1/2 <= prod_t rho_t <= 2 over the response, else 0   none: 1

    logp_old, logp_sampled (B, T) nats, of the trainer's policy and of the engine; mask (B, T) bool, the response
    tokens. Returns (B, T) float32, 0 where mask is False. A masked response still counts in the loss's denominator.
    Source: Ionides 2008, "Truncated importance sampling", with the cap of 2 that RL libraries use for vLLM's mismatch.
    """
    check_mask("sampler_weights", mask, logp_old=logp_old, logp_sampled=logp_sampled)
    log_ratios = torch.where(mask, upcast(logp_old) - upcast(logp_sampled), 0.0)
    if kind == "truncate":
        weights = log_ratios.exp().clamp(max=CAP)
    elif kind == "mask":
        weights = (log_ratios.sum(1, keepdim=True).abs() <= math.log(CAP)).float().expand_as(log_ratios)
    else:
        weights = torch.ones_like(log_ratios)
    return torch.where(mask, weights, 0.0)


def token_rewards(
    scores: Tensor,
    logp_old: Tensor,
    logp_ref: Tensor,
    mask: Tensor,
    kl_coef: float,
    token_scores: Tensor | None = None,
) -> Tensor:
    """Reward of each response token: the KL penalty, and the score on the last one.

    r_t = s_t - kl_coef * (logp_old_t - logp_ref_t);   r_last += score - sum_t s_t        last = the last response token

    scores (B,) float; logp_old, logp_ref (B, T) nats; mask (B, T) bool, the response tokens, end token included;
    token_scores s (B, T), the part of the score that each token earns, 0 if not given: a row's sum does not depend on
    it. Returns (B, T), at least float32, 0 where mask is False. A row without a response token raises ValueError, since
    its score has no place.
    Source: Ouyang et al. 2022, eq. 2 (without the pretraining term), spread over tokens as in Ziegler et al. 2019.
    token_scores: as in Chan et al. 2024 ("Dense Reward for Free in RLHF"), who divide a score by attention weights.
    """
    parts = torch.zeros_like(logp_old) if token_scores is None else token_scores
    check_mask("token_rewards", mask, logp_old=logp_old, logp_ref=logp_ref, token_scores=parts)
    if not bool(mask.any(1).all()):
        row = int((~mask.any(1)).nonzero()[0])
        raise ValueError(f"token_rewards: row {row} has no response token, so its score has no place: leave it out")
    parts = torch.where(mask, upcast(parts), 0.0)
    rewards = torch.where(mask, parts - kl_coef * (upcast(logp_old) - upcast(logp_ref)), 0.0)
    positions = torch.arange(mask.shape[1], device=mask.device)  # (T,)
    last = torch.where(mask, positions, -1).amax(1, keepdim=True)  # (B, 1)
    rest = upcast(scores).to(rewards.dtype) - parts.sum(1)
    return rewards + torch.where(positions == last, rest[:, None], 0.0)


def policy_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float,
    denominator: float | Tensor | None = None,
    clip_range_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate objective, negated.

    rho = exp(logp - logp_old)
    loss = sum max(-A rho, -A clip(rho, 1 - clip_range, 1 + clip_range_high)) / denominator        sum where mask

    clip_range_high: clip_range unless given; a larger one lets unlikely tokens gain more. denominator: the response
    tokens of the GLOBAL minibatch; those of this call unless given. All tensors of one shape, usually (B, T); logp,
    logp_old in nats; mask bool. Gradients flow only into logp. With clip_range infinity nothing is clipped: the policy
    gradient weighted by rho.

    Returns the scalar loss and statistics over the same denominator, so that those of the parts of a minibatch add up:
    `loss`, `approxkl` (0.5 mean (logp - logp_old)^2, nats), `clipfrac` (share of tokens at which the clipped term is
    the larger, so that no gradient flows); and `ratio_max`, of which the largest counts (0 without any token).
    Source: Schulman et al. 2017, eq. 7; clip_range_high: Yu et al. 2025 (DAPO), section 3.1.
    Differs: the mean is over tokens rather than time steps of an actor, and its count can span micro-batches and ranks.
    """
    check_mask("policy_loss", mask, logp=logp, logp_old=logp_old, advantages=advantages)
    high = clip_range if clip_range_high is None else clip_range_high
    N = resolve_denominator("policy_loss", mask.sum(), denominator, "True in mask")
    # Masked before exp: the infinity of a pad's ratio would turn a zero gradient into NaN.
    log_ratio = torch.where(mask, upcast(logp) - upcast(logp_old).detach(), 0.0)
    ratio = log_ratio.exp()
    A = torch.where(mask, upcast(advantages).detach(), 0.0)
    unclipped = -A * ratio
    clipped = -A * ratio.clamp(1.0 - clip_range, 1.0 + high)
    loss = masked_mean(torch.maximum(unclipped, clipped), mask, N)
    with torch.no_grad():
        statistics = {
            "loss": loss.detach(),
            "approxkl": masked_mean(0.5 * log_ratio**2, mask, N),
            "clipfrac": masked_mean(clipped > unclipped, mask, N),
            "ratio_max": torch.where(mask, ratio, 0.0).max(),
        }
    return loss, statistics


def value_loss(
    values: Tensor,
    values_old: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error of the critic, with its move since the rollout clipped.

    clipped = clip(V, V_old - clip_range, V_old + clip_range)
    loss = 1/2 sum max((V - R)^2, (clipped - R)^2) / denominator        sum where mask

    denominator as in policy_loss; clip_range: infinity clips nothing. All tensors of one shape, mask bool, values and
    returns in units of the score. Gradients flow only into values. Returns the scalar loss and statistics over the same
    denominator: `loss`, and `clipfrac` (share of tokens at which the clipped error is the larger).
    Source: Schulman et al. 2017, eq. 9 (the squared error); Ziegler et al. 2019, released code (clipping, the half).
    """
    check_mask("value_loss", mask, values=values, values_old=values_old, returns=returns)
    N = resolve_denominator("value_loss", mask.sum(), denominator, "True in mask")
    V, V_old, R = (torch.where(mask, upcast(x), 0.0) for x in (values, values_old.detach(), returns.detach()))
    squared = (V - R) ** 2
    squared_clipped = (V.clamp(V_old - clip_range, V_old + clip_range) - R) ** 2
    loss = 0.5 * masked_mean(torch.maximum(squared, squared_clipped), mask, N)
    with torch.no_grad():
        statistics = {
            "loss": loss.detach(),
            "clipfrac": masked_mean(squared_clipped > squared, mask, N),
        }
    return loss, statistics

"""Advantages by name: GAE with a critic, the reward-to-go, or a baseline from several responses to one prompt (RLOO, GRPO)."""

import torch
from torch import Tensor

from rlhf.ops.gae import gae
from rlhf.ops.masked import check_mask, masked_sum, upcast

ADVANTAGES = ("gae", "reinforce", "rloo", "grpo")
OF_GROUPS = ("rloo", "grpo")  # they compare responses to one prompt


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """Reward of each response minus the mean reward of the other responses to its prompt.

    A_i = R_i - 1/(k - 1) sum_{j != i} R_j        k = group_size

    rewards (B,) float, one per response; responses to one prompt are adjacent, k each. Returns (B,).

    Raises ValueError: k below 2, or B no multiple of k.

    Source: Kool et al. 2019, section 2; Ahmadian et al. 2024 (RLOO), section 4.
    """
    groups = _groups("leave_one_out", rewards, group_size)  # (B/k, k)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).flatten()


def group_normalised(rewards: Tensor, group_size: int) -> Tensor:
    """Reward of each response in standard deviations from the mean of its prompt's responses.

    A_i = (R_i - mean(R)) / (std(R) + 1e-6)        mean and biased std over the k responses to one prompt

    rewards (B,) float; responses to one prompt are adjacent, k = group_size each. Returns (B,): 0 if all
    responses to a prompt earn the same.

    Raises ValueError: k below 2, or B no multiple of k.

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2 (outcome supervision).
    """
    groups = _groups("group_normalised", rewards, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, correction=0, keepdim=True) + 1e-6)).flatten()


@torch.no_grad()
def compute_advantages(
    kind: str,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    group_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) of response tokens, by name.

    gae: `rlhf.ops.gae.gae` of rewards and values.
    reinforce: A_t = R_t = sum_{l >= t} gamma^(l - t) r_l, the reward-to-go, which is GAE with values 0 and lam 1; values
    and lam are not used (Williams 1992).
    rloo, grpo: A_t = A_i for every token of response i, from the sum of its token rewards, `group_size`
    responses to a prompt; values, gamma and lam are not used, and the returns are the response's reward.

    rewards, values (B, T) float, mask (B, T) bool. Both results are 0 where mask is False, without a graph.

    Raises ValueError: an unknown kind, and what the functions named above raise.

    Differs: RLOO's policy gradient and GRPO's surrogate are averaged over the tokens of the whole batch here,
    as PPO's is, rather than over sequences (RLOO) or first within each sequence (GRPO).
    """
    if kind == "gae":
        return gae(rewards, values, mask, gamma=gamma, lam=lam)
    if kind == "reinforce":
        return gae(rewards, torch.zeros_like(values), mask, gamma=gamma, lam=1.0)
    baselines = {"rloo": leave_one_out, "grpo": group_normalised}
    if kind not in baselines:
        raise ValueError(f"compute_advantages: kind is {kind!r}: give one of {', '.join(ADVANTAGES)}")
    check_mask("compute_advantages", mask, rewards=rewards)
    totals = torch.stack([masked_sum(row, kept) for row, kept in zip(upcast(rewards), mask, strict=True)])  # (B,)
    spread = torch.where(mask, baselines[kind](totals, group_size)[:, None], 0.0)
    return spread, torch.where(mask, totals[:, None], 0.0)


def _groups(where: str, rewards: Tensor, group_size: int) -> Tensor:
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"{where}: rewards are {rewards.dtype} of shape {tuple(rewards.shape)}: give floats (B,)")
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"{where}: {len(rewards)} rewards in groups of {group_size}: give whole groups of 2 or more")
    return upcast(rewards).view(-1, group_size)

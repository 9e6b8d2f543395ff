"""Advantages of response tokens: GAE with a critic, the reward-to-go, or a baseline from several responses to one prompt (RLOO, GRPO)."""

import torch
from torch import Tensor

from rlhf.ops.masked import check_mask, masked_sum, upcast

ESTIMATORS = ("gae", "reinforce", "rloo", "grpo")
OF_GROUPS = ("rloo", "grpo")  # they compare responses to one prompt


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each response token.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  R_t = A_t + V_t

    V_t is the value before token t is chosen. After a row's last masked token A is 0, and V is 0 (a response without an
    end token is over too) unless last_values (B,) gives it.

    rewards, values (B, T) float; mask (B, T) bool, one unbroken run of True per row, anywhere, or none. Returns
    advantages and returns (B, T), at least float32, 0 where mask is False, without a graph. Raises ValueError for a
    hole in mask.
    Source: Schulman et al. 2016, eq. 16; Schulman et al. 2017, eq. 11 and 12 (the sum cut at the episode's end).
    """
    check_mask("gae", mask, rewards=rewards, values=values)
    starts = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(1)  # (B,) runs of True in a row
    if bool((starts > 1).any()):
        row = int((starts > 1).nonzero()[0])
        raise ValueError(f"gae: row {row} of mask has a hole: response tokens must be contiguous")
    B = mask.shape[0]
    rewards = torch.where(mask, upcast(rewards), 0.0)
    values = torch.where(mask, upcast(values), 0.0)
    next_values = torch.cat([values[:, 1:], values.new_zeros(B, 1)], dim=1)  # (B, T)
    if last_values is not None:
        is_last = mask & ~torch.cat([mask[:, 1:], mask.new_zeros(B, 1)], dim=1)
        next_values = torch.where(is_last, upcast(last_values)[:, None], next_values)
    deltas = torch.where(mask, rewards + gamma * next_values - values, 0.0)

    advantage = values.new_zeros(B)
    backwards = []
    # deltas are 0 outside the one run of True, so only what spills before it must be cleared, at the end.
    for delta in reversed(deltas.unbind(1)):  # (B,) each
        advantage = delta + gamma * lam * advantage
        backwards.append(advantage)
    advantages = torch.where(mask, torch.stack(backwards[::-1], dim=1), 0.0)
    return advantages, advantages + values


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """Reward of each response minus the mean reward of the other responses to its prompt.

    A_i = R_i - 1/(k - 1) sum_{j != i} R_j        k = group_size

    rewards (B,) float, one per response; responses to one prompt are adjacent, k each. Returns (B,).
    Source: Kool et al. 2019, section 2; Ahmadian et al. 2024 (RLOO), section 4.
    """
    groups = upcast(rewards).view(-1, group_size)  # (B/k, k)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).flatten()


def group_normalised(rewards: Tensor, group_size: int) -> Tensor:
    """Reward of each response in standard deviations from the mean of its prompt's responses.

    A_i = (R_i - mean(R)) / (std(R) + 1e-6)        mean and biased std over the k responses to one prompt

    rewards (B,) float; responses to one prompt are adjacent, k = group_size each. Returns (B,): 0 if all earn the same.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2 (outcome supervision).
    """
    groups = upcast(rewards).view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, correction=0, keepdim=True) + 1e-6)).flatten()


@torch.no_grad()
def compute_advantages(
    name: str,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    group_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) of response tokens, by name.

    reinforce: A_t = R_t = sum_{l >= t} gamma^(l - t) r_l, the reward-to-go, which is GAE with values 0 and lam 1
    (Williams 1992).
    rloo, grpo: A_t = A_i for every token of response i, from the sum of its token rewards, `group_size` responses to a
    prompt; values, gamma and lam are not used, and the returns are the response's reward.

    rewards, values (B, T) float, mask (B, T) bool. Both results are 0 where mask is False, without a graph.
    Differs: RLOO's policy gradient and GRPO's surrogate are averaged over the tokens of the whole batch here, as PPO's
    is, rather than over sequences (RLOO) or first within each sequence (GRPO).
    """
    if name == "gae":
        return gae(rewards, values, mask, gamma=gamma, lam=lam)
    if name == "reinforce":
        return gae(rewards, torch.zeros_like(values), mask, gamma=gamma, lam=1.0)
    compare = {"rloo": leave_one_out, "grpo": group_normalised}[name]
    totals = masked_sum(rewards, mask, dim=1)  # (B,)
    return torch.where(mask, compare(totals, group_size)[:, None], 0.0), torch.where(mask, totals[:, None], 0.0)

"""Generalised advantage estimation over the tokens of a response."""

import torch
from torch import Tensor

from rlhf.ops.masked import check_mask, upcast


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each response token.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  R_t = A_t + V_t

    V_t is the value before token t is chosen. After a row's last masked token A and V are 0: a response without an end token is
    over too.

    rewards, values (B, T) float; mask (B, T) bool, one unbroken run of True per row, anywhere, or none. Returns
    advantages and returns (B, T), at least float32, 0 where mask is False, without a graph.

    Raises ValueError: wrong shapes or types, a mask with a hole, gamma or lam outside 0…1.

    Source: Schulman et al. 2016, eq. 16; Schulman et al. 2017, eq. 11 and 12 (the sum cut at the episode's
    end).
    """
    _check(rewards, values, mask, gamma, lam)
    B = mask.shape[0]
    rewards = torch.where(mask, upcast(rewards), 0.0)
    values = torch.where(mask, upcast(values), 0.0)
    next_values = torch.cat([values[:, 1:], values.new_zeros(B, 1)], dim=1)  # (B, T)
    deltas = torch.where(mask, rewards + gamma * next_values - values, 0.0)

    advantage = values.new_zeros(B)
    backwards = []
    # deltas are 0 outside the one run of True, so only what spills before it must be cleared, at the end.
    for delta in reversed(deltas.unbind(1)):  # (B,) each
        advantage = delta + gamma * lam * advantage
        backwards.append(advantage)
    advantages = torch.where(mask, torch.stack(backwards[::-1], dim=1), 0.0)
    return advantages, advantages + values


def _check(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> None:
    check_mask("gae", mask, rewards=rewards, values=values)
    if mask.dim() != 2 or mask.shape[1] < 1:
        raise ValueError(f"gae: mask has shape {tuple(mask.shape)}: give (B, T)")
    if not (rewards.is_floating_point() and values.is_floating_point()):
        raise ValueError(f"gae: rewards are {rewards.dtype}, values {values.dtype}: give floats")
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ValueError(f"gae: gamma is {gamma}, lam {lam}: give both within 0 to 1")
    starts = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(1)  # (B,) runs of True in a row
    if bool((starts > 1).any()):
        row = int((starts > 1).nonzero()[0])
        raise ValueError(f"gae: row {row} of mask has a hole: response tokens must be contiguous")

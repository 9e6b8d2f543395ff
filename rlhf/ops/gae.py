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
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each response token.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  R_t = A_t + V_t

    V_t is the value before token t is chosen. After a row's last masked token A is 0 and V is last_values: 0
    for a response that is over (None: all of them; a response without an end token is over too), the value of
    the state after the last token for an episode that was cut off and would have gone on.

    rewards, values (B, T) float; mask (B, T) bool, one unbroken run of True per row, anywhere, or none;
    last_values (B,). Returns advantages and returns (B, T), at least float32, 0 where mask is False, without
    a graph.

    Raises ValueError: wrong shapes or types, a mask with a hole, gamma or lam outside 0…1.

    Source: Schulman et al. 2016, eq. 16; Schulman et al. 2017, eq. 11 and 12 (the sum cut at the episode's
    end).
    """
    _check(rewards, values, mask, gamma, lam, last_values)
    B = mask.shape[0]
    rewards = torch.where(mask, upcast(rewards), 0.0)
    values = torch.where(mask, upcast(values), 0.0)
    after_row = mask.new_zeros(B, 1)
    has_next = torch.cat([mask[:, 1:], after_row], dim=1)  # (B, T) True where token t + 1 counts as well
    next_values = torch.cat([values[:, 1:], values.new_zeros(B, 1)], dim=1)  # (B, T)
    if last_values is not None:
        next_values = torch.where(mask & ~has_next, upcast(last_values).to(values.dtype)[:, None], next_values)
    deltas = torch.where(mask, rewards + gamma * next_values - values, 0.0)

    advantage = values.new_zeros(B)
    backwards = []
    # deltas are 0 outside the one run of True, so only what spills before it must be cleared, at the end.
    for delta in reversed(deltas.unbind(1)):  # (B,) each
        advantage = delta + gamma * lam * advantage
        backwards.append(advantage)
    advantages = torch.where(mask, torch.stack(backwards[::-1], dim=1), 0.0)
    return advantages, advantages + values


def _check(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, last_values: Tensor | None) -> None:
    check_mask("gae", mask, rewards=rewards, values=values)
    if mask.dim() != 2 or mask.shape[1] < 1:
        raise ValueError(f"gae: mask has shape {tuple(mask.shape)}: give (B, T)")
    if not (rewards.is_floating_point() and values.is_floating_point()):
        raise ValueError(f"gae: rewards are {rewards.dtype}, values {values.dtype}: give floats")
    if last_values is not None and last_values.shape != mask.shape[:1]:
        raise ValueError(f"gae: last_values has shape {tuple(last_values.shape)}: give one per row, ({mask.shape[0]},)")
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ValueError(f"gae: gamma is {gamma}, lam {lam}: give both within 0 to 1")
    starts = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(1)  # (B,) runs of True in a row
    if bool((starts > 1).any()):
        row = int((starts > 1).nonzero()[0])
        raise ValueError(f"gae: row {row} of mask has a hole: response tokens must be contiguous")

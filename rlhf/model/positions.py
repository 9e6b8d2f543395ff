"""Position encodings without parameters: rotary, which rotates queries and keys, and sinusoids, which are added."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]


def rotary_factors(positions: Tensor, config: Any, dtype: torch.dtype) -> Rope:
    """cos and signed sin of position / theta^(2i/R), each (…, 1, head_dim) for positions (…); made in float32.

    R = rotary_share head_dim channels of a head are rotated; the others have angle 0. The sine's first half is negated,
    so that `rotate` is x cos + roll(x) sin.
    """
    turning = int(config.head_dim * config.rotary_share)
    half = torch.arange(0, turning, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / config.rope_theta ** (half / turning)
    if turning < config.head_dim:
        frequencies = F.pad(frequencies, (0, (config.head_dim - turning) // 2))
    angles = positions[..., None].float() * frequencies  # (…, head_dim/2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1).unsqueeze(-2), torch.cat((-sin, sin), -1).unsqueeze(-2)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair (x_i, x_{i + head_dim/2}) of x (…, heads, head_dim) by its position's angle."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Sinusoids(nn.Module):
    """PE(position, 2i) = sin(position / 10000^(2i/D)), PE(position, 2i + 1) = cos of the same; made in float32.

    Source: Vaswani et al. 2017, section 3.5.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, positions: Tensor) -> Tensor:
        """(…, D) of positions (…)."""
        even = torch.arange(0, self.width, 2, dtype=torch.float32, device=positions.device)
        angles = positions[..., None].float() / 10000.0 ** (even / self.width)
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)

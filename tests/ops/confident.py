"""Tokens of a stated probability in bfloat16, and how far a gradient is from the exact one."""

from functools import cache

import torch


@cache
def confident_batch(p: float, vocabulary: int = 4096) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (32, 768), weights (vocabulary, 768) in bfloat16 and tokens (32,) whose probability is about p."""
    generator = torch.Generator().manual_seed(3)
    weight = (0.02 * torch.randn(vocabulary, 768, generator=generator)).bfloat16()
    tokens = torch.randint(vocabulary, (32,), generator=generator)
    direction = weight[tokens].double()
    # logits of the others are about N(0, 0.02^2 s^2 |w|^2), small beside the chosen one's s |w|^2
    noise = 0.5 * torch.randn(32, 768, generator=generator).double()
    low, high = torch.zeros(32, 1).double(), torch.full((32, 1), 400.0).double()
    for _ in range(40):  # the scale at which the token has probability p
        middle = (low + high) / 2
        logits = (middle * direction + noise) @ weight.double().t()
        above = logits.softmax(-1).gather(-1, tokens[:, None]) > p
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (high * direction + noise).bfloat16(), weight, tokens


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())

"""Sums and means over masked entries, and whitening.

Over several ranks, a mean takes the global count as `denominator` and gives this rank's share of the global mean,
so that the shares add up; whitening takes `all_reduce`, because a variance needs the global mean first.
"""

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x where mask is True, over everything or over one dimension.

    x and mask of one shape, mask bool; returns a scalar, or x's shape without `dim`; at least float32.
    """
    check_mask("masked_sum", mask, x=x)
    kept = torch.where(mask, upcast(x), 0.0)  # not x * mask: NaN * 0 is NaN
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, denominator: float | Tensor | None = None) -> Tensor:
    """Mean of x where mask is True.

    masked_mean = sum(x where mask) / denominator        denominator: the number of True unless given

    With the global count, the results of the parts of a batch add up to the mean of the whole. x and mask of one shape,
    mask bool; returns a scalar, at least float32.
    """
    return masked_sum(x, mask) / resolve_denominator("masked_mean", mask.sum(), denominator, "True in mask")


def whiten(x: Tensor, mask: Tensor, all_reduce: AllReduce | None = None) -> Tensor:
    """Shift and scale x to mean 0 and variance 1 over the masked entries of all ranks.

    mean = sum(x) / count;  var = sum((x - mean)^2) / count        sums where mask
    whiten = (x - mean) / sqrt(var + 1e-8) where mask, 0 elsewhere

    x and mask of one shape, mask bool; returns x's shape, at least float32. all_reduce: takes this rank's tensor of
    sums and returns the sum over ranks; it is called twice, on every rank, in the same order (a rank may have no True
    of its own).
    Source: Ziegler et al. 2019, released code (lm-human-preferences, `whiten`).
    Differs: the entries outside the mask do not count, and the statistics are of all ranks rather than of one.
    """
    check_mask("whiten", mask, x=x)
    reduce: AllReduce = all_reduce if all_reduce is not None else lambda sums: sums
    x = torch.where(mask, upcast(x), 0.0)  # before any arithmetic: the gradient of NaN^2 is NaN even times 0
    count, total = reduce(torch.stack([mask.sum().to(x.dtype), masked_sum(x, mask)])).unbind()
    if not bool(count > 0):  # the global count, so that all ranks raise together
        raise ValueError("whiten: mask has no True: a mean of nothing has no value")
    mean = total / count
    var = reduce(masked_sum((x - mean) ** 2, mask)) / count  # two passes: E[x^2] - E[x]^2 cancels in float32
    return torch.where(mask, (x - mean) * torch.rsqrt(var + 1e-8), 0.0)


def computed_in(x: Tensor) -> torch.dtype:
    """The precision of products with x: autocast's if it is on."""
    device = x.device.type
    half = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if half else x.dtype


def upcast(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def wide(x: Tensor) -> Tensor:
    """x in float64, on the CPU if its device has none (MPS)."""
    return (x.cpu() if x.is_mps else x).double()


def check_mask(where: str, mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless mask is bool and every tensor has its shape."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{where}: mask is {mask.dtype}, want torch.bool: build masks from lengths")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{where}: {name} is {tuple(tensor.shape)}, mask {tuple(mask.shape)}: give one shape")


def resolve_denominator(where: str, count: Tensor, denominator: float | Tensor | None, counted: str) -> float | Tensor:
    """The given denominator, or `count`; ValueError if the divisor would not be positive."""
    if denominator is None:
        if not bool(count > 0):
            raise ValueError(f"{where}: no {counted}: for a part of a batch, pass the global count as denominator")
        return count
    if not bool(denominator > 0):
        raise ValueError(f"{where}: denominator is {float(denominator)}: give the global count, more than 0")
    return denominator

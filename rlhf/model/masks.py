"""Which tokens attend to which, and their positions, from padding masks and restarting positions."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache


def make_positions(x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, past: int) -> Tensor:
    """Positions (B or 1, T) of the tokens of x (B, T, D) after `past` cached ones; without position_ids they count the
    real tokens.
    """
    if position_ids is not None:
        return position_ids
    if attention_mask is not None and attention_mask.dim() == 2:
        counted = attention_mask.long().cumsum(-1) - 1  # (B, past + T)
        return counted[:, past : past + x.shape[1]].clamp(min=0)
    return torch.arange(past, past + x.shape[1], device=x.device)[None]


def make_attention_mask(
    x: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    cache: Cache | None,
    past: int,
) -> Tensor | None:
    """Bool mask (B or 1, 1, T, keys), True = may attend; None if the plain causal kernel is enough."""
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    length = x.shape[1]
    keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
    fresh = keys == length  # a first call, so that keys are queries
    can_look = not torch.compiler.is_compiling()  # reading a tensor's value would break the graph
    if attention_mask is not None and can_look and _is_harmless(attention_mask, fresh):
        attention_mask = None
    segments = _segments(position_ids, seq_idx, can_look) if fresh and length > 1 else None
    if attention_mask is None and segments is None and keys == past + length and (fresh or length == 1):
        return None
    query = torch.arange(length, device=x.device)[:, None] + past  # (T, 1)
    key = torch.arange(keys, device=x.device)
    mask = (key <= query)[None]  # (1, T, keys)
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    if attention_mask is not None:
        real = F.pad(attention_mask.bool(), (0, max(0, keys - attention_mask.shape[1])))[:, None, :keys]
        mask = mask & (real | (key == query))  # a pad sees itself: a row without any key has no softmax
    return mask[:, None]


def _is_harmless(attention_mask: Tensor, fresh: bool) -> bool:
    """Whether causality alone hides all padding: there is none, or it is on the right of a first call."""
    if fresh:
        return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())
    return bool(attention_mask.all())


def _segments(position_ids: Tensor | None, seq_idx: Tensor | None, can_look: bool) -> Tensor | None:
    """Number of the example (B or 1, T) each token belongs to; None if every row holds one example."""
    if seq_idx is not None:
        return seq_idx
    if position_ids is None:
        return None
    starts = position_ids[:, 1:] < position_ids[:, :-1]
    starts = starts | (position_ids[:, 1:] == 0)
    if can_look and not bool(starts.any()):
        return None
    return F.pad(starts.long().cumsum(-1), (1, 0))

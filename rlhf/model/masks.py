"""Which tokens attend to which, and their positions, from padding masks and restarting positions."""

import inspect
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache


class Documents(NamedTuple):
    """Where the documents of packed rows begin, for a variable-length kernel; a mask would have B T^2 entries."""

    starts: Tensor  # (documents + 1,) int32: row * T + position of each one's first token; and B T
    longest: int  # tokens of the longest one
    window: int | None = None  # tokens that each token attends to, itself included; None: all before it

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention within each document, of q (B, H, T, D/H) and k, v (B, KV, T, D/H), in the precision of v."""
        from torch.nn.attention.varlen import varlen_attn

        grouped: dict[str, Any] = {"enable_gqa": True} if (copies := q.shape[1] // k.shape[1]) > 1 else {}
        if grouped and not _takes_groups(varlen_attn):
            k, v, grouped = (*(x.repeat_interleave(copies, 1) for x in (k, v)), {})
        flat: Any = [x.transpose(1, 2).flatten(0, 1).to(v.dtype) for x in (q, k, v)]  # (B T, heads, D/H)
        where: Any = (self.starts, self.starts, self.longest, self.longest)
        y: Any = varlen_attn(*flat, *where, window_size=(-1 if self.window is None else self.window - 1, 0), **grouped)
        return y.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


@lru_cache(maxsize=1)
def _takes_groups(kernel: Any) -> bool:
    """Whether the kernel takes fewer heads of keys than of queries; torch 2.11's does not."""
    return "enable_gqa" in inspect.signature(kernel).parameters


Mask = Tensor | Documents


def has_varlen(x: Tensor) -> bool:
    """Whether torch has a variable-length attention kernel for x: in half precision, on recent GPUs."""
    half = torch.is_autocast_enabled("cuda") or x.dtype.itemsize < 4
    return x.is_cuda and half and torch.cuda.get_device_capability(x.device) >= (8, 0)


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
    varlen: bool = False,
) -> Tensor | Documents | None:
    """Bool mask (B or 1, 1, T, keys), True = may attend; None if the plain causal kernel is enough.

    varlen: whether the heads fit a variable-length kernel; for packed rows without padding it needs only the documents.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    length = x.shape[1]
    keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
    fresh = keys == length  # a first call: the keys are those of the queries
    can_look = not torch.compiler.is_compiling()  # reading a tensor's value would break the graph
    if attention_mask is not None and can_look and _is_harmless(attention_mask, fresh):
        attention_mask = None
    segments = _segments(position_ids, seq_idx, can_look) if fresh and length > 1 else None
    if attention_mask is None and segments is None and keys == past + length and (fresh or length == 1):
        return None
    if segments is not None and attention_mask is None and varlen and can_look and has_varlen(x):
        return make_documents(segments.expand(x.shape[:2]))
    query = torch.arange(length, device=x.device)[:, None] + past  # (T, 1)
    key = torch.arange(keys, device=x.device)
    mask = (key <= query)[None]  # (1, T, keys)
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    if attention_mask is not None:
        real = F.pad(attention_mask.bool(), (0, max(0, keys - attention_mask.shape[1])))[:, None, :keys]
        mask = mask & (real | (key == query))  # padding attends to itself: softmax needs at least one key
    return mask[:, None]


def narrow(mask: Mask | None, window: int, queries: int, past: int, device: torch.device) -> Mask | None:
    """The mask of a layer in which `queries` tokens after `past` cached ones attend to the last `window` keys.

    mask: of a layer that attends to all. Distances are between columns; they equal those between positions if padding is on
    one side and the examples of packed rows are complete.
    """
    if isinstance(mask, Documents):
        return mask._replace(window=window)
    keys = past + queries if mask is None else mask.shape[-1]
    if keys <= window:
        return mask
    query = torch.arange(queries, device=device)[:, None] + past
    key = torch.arange(keys, device=device)
    near = key > query - window
    if mask is None:
        return (near & (key <= query))[None, None]
    return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, -torch.inf)


def make_documents(segments: Tensor) -> Documents:
    """The documents of rows (B, T) of numbers that change where one begins."""
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=segments.numel())
    return Documents(starts.to(torch.int32), int(starts.diff().max()))


def _is_harmless(attention_mask: Tensor, fresh: bool) -> bool:
    """Whether causality alone hides all padding: there is none, or it is on the right of a first call."""
    if fresh:
        return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())
    return bool(attention_mask.all())


def _segments(position_ids: Tensor | None, seq_idx: Tensor | None, can_look: bool) -> Tensor | None:
    """Number of the example (B or 1, T) that each token belongs to; None if every row has one example."""
    if seq_idx is not None:
        return None if can_look and bool((seq_idx == seq_idx[:, :1]).all()) else seq_idx
    if position_ids is None:
        return None
    starts = position_ids[:, 1:] < position_ids[:, :-1]
    starts = starts | (position_ids[:, 1:] == 0)
    if can_look and not bool(starts.any()):
        return None
    return F.pad(starts.long().cumsum(-1), (1, 0))

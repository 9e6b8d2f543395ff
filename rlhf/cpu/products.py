"""Products with a large weight: of many rows on processors where torch's default is slow, of few rows with packed
weights.

torch multiplies float32 on a CPU with MKL, which does not use AVX-512 on AMD's processors; oneDNN, which torch also
contains, does, and is about twice as fast there. torch has no public name for this product: `onednn_product` is the
operator that torch.compile emits, and could be removed from torch.

A product reorders its weight at each call, which costs much with few rows, unless it is already in oneDNN's blocked
layout. docs/PERFORMANCE.md has the measurements.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_WIDTH = 128  # of inputs and of outputs
# From WIDE inputs and outputs on, few rows are enough; a narrower product needs this many multiplications, or a call costs
# more than it saves.
WIDE, LEAST_WORK = 256, 12_000_000
# Numbers of rows per product, since oneDNN compiles one for each shape, about 1 MB each; torch's default multiplies the rest.
PIECES = (2048, 1024, 256, 64)
# Least inputs and outputs of a packed weight, and most rows of its products: a product is compiled for each number of rows, about
# 2 MB each.
PACKED_WIDTH, PACKED_ROWS = (256, 256) if torch.backends.cpu.get_cpu_capability() == "AVX512" else (384, 32)
MOST_BYTES = 2**30  # bytes of packed weights: a model that needs more is not packed
off: list[bool] = []  # not empty within `by_torch_alone`
_packed: dict[int, Tensor] = {}  # of a weight's id, within `packed_weights`


def onednn_product() -> Callable[..., Tensor] | None:
    """f(x, W, b, activation, [], form) = activation(x W^T + b), for plain or packed W; None if this torch has none."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def processor() -> str:
    """The kernel's description of the processors; empty where it gives none."""
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


@cache
def is_faster() -> bool:
    """On AMD's processors with AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "AuthenticAMD" in processor()


@contextmanager
def by_torch_alone() -> Iterator[None]:
    """A context in which torch computes everything, so that equal models differ by less than two libraries do."""
    off.append(True)
    try:
        yield
    finally:
        off.pop()


def serves(x: Tensor, outputs: int) -> bool:
    """Whether oneDNN's product of x (…, I) with a float32 weight (outputs, I) applies and is faster than torch's."""
    narrowest = min(outputs, x.shape[-1])
    return (
        narrowest >= LEAST_WIDTH
        and (narrowest >= WIDE or x.numel() * outputs >= LEAST_WORK)
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() >= PIECES[-1] * x.shape[-1]
        and is_faster()
        and not off
        and onednn_product() is not None
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b (…, O) of x (…, I) and weight (O, I), with gradients unless the weight is packed; by torch if that is not slower."""
    packed = _packed.get(id(weight)) if x.dim() == 2 and len(x) <= PACKED_ROWS and not off else None
    if packed is not None:
        multiply: Any = onednn_product()
        return multiply(x.to(weight.dtype), packed, bias, "none", [], "")
    if not serves(x, len(weight)) or weight.dtype != x.dtype or hasattr(weight, "ds_id"):  # under ZeRO-3 it is a part
        return F.linear(x, weight, bias)
    y = _Product.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def plain_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T (N, O) of x (N, I) and weight (O, I), in any strides, without gradients."""
    if not serves(x, len(weight)):
        return x @ weight.t()
    multiply: Any = onednn_product()
    parts = [multiply(x[rows], weight, None, "none", [], "") for rows in _pieces(len(x))]
    done = sum(map(len, parts))
    rest = [x[done:] @ weight.t()] if done < len(x) else []
    return torch.cat(parts + rest) if len(parts) + len(rest) > 1 else parts[0]


def outer(a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
    """a^T b (O, I) of a (N, O) and b (N, I), without gradients; added to `total` in place if it is given."""
    if not serves(b, a.shape[1]):
        if total is None:
            return a.t() @ b
        return total.addmm_(a.t(), b) if total.dtype == a.dtype else total.add_(a.t() @ b)
    if a.shape[1] > b.shape[1]:  # the first operand is reordered: take the narrower one
        whole = outer(b, a).t()
    else:
        multiply: Any = onednn_product()
        pieces = _pieces(len(a))
        parts = (multiply(a[rows].t(), b[rows].t(), None, "none", [], "") for rows in pieces)
        whole, done = next(parts), pieces[-1].stop
        for part in parts:
            whole += part
        if done < len(a):
            whole.addmm_(a[done:].t(), b[done:])
    return whole if total is None else total.add_(whole)


@contextmanager
def packed_weights(weights: Sequence[Tensor], rows: int) -> Iterator[int]:
    """A context in which products of matrices of few rows with these weights use packed copies; yields the copies'
    number.

    rows: of most products. Only large weights on a CPU are packed, none if that takes more than MOST_BYTES. They must
    not change meanwhile, and nothing may need gradients.
    """
    kind, multiply = torch.float32, onednn_product()
    if multiply and torch.is_autocast_enabled("cpu"):  # in its precision, if the weights are already cast
        kind = torch.get_autocast_dtype("cpu")
        multiply = multiply if kind == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported() else None
    large = [
        w
        for w in weights
        if w.device.type == "cpu"
        and w.dtype == kind
        and not hasattr(w, "ds_id")  # under ZeRO-3 it is a part
        and min(w.shape) >= PACKED_WIDTH
        and id(w) not in _packed
    ]
    if not multiply or off or sum(w.nbytes for w in large) > MOST_BYTES:
        large = []
    try:
        for w in large:
            _packed[id(w)] = torch.ops.mkldnn._reorder_linear_weight(w.detach(), rows)
        yield len(large)
    finally:
        for w in large:
            _packed.pop(id(w), None)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return plain_product(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        d_x = plain_product(d, weight.t()) if ctx.needs_input_grad[0] else None
        return d_x, outer(d, x) if ctx.needs_input_grad[1] else None


def _pieces(count: int) -> list[slice]:
    """Parts of `count` rows, each of a size in PIECES."""
    pieces, start = [], 0
    for size in PIECES:
        while count - start >= size:
            pieces.append(slice(start, start + size))
            start += size
    return pieces

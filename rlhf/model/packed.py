"""Linear layers with their weights in oneDNN's blocked layout: for decoding on a CPU, with fixed weights and few rows.

A plain product reorders its weight matrix at each call, which costs much with few rows: with 32 rows and widths from
256 the packed product takes half to two thirds of the time. It is not used in training and long forwards, which gain
little: a packed product is compiled for each number of rows, about 2 MB each. Without AVX-512 torch's default is as fast from 32
rows on, and less is packed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhf.cpu.products import onednn_product, product
from rlhf.model.blocks import MLP, SwitchMLP
from rlhf.model.linear import Linear, ResidualLinear

# Least inputs and outputs, below which a call costs more than the layout saves, and most rows of a product: more use the plain layer.
LEAST_WIDTH, MOST_ROWS = (256, 256) if torch.backends.cpu.get_cpu_capability() == "AVX512" else (384, 32)
MOST_BYTES = 2**30  # bytes of copies: a model that needs more is not packed


def is_packable(layer: nn.Module, kind: torch.dtype = torch.float32) -> bool:
    """Whether the layer is a large plain product in this precision on a CPU, complete in this process, without hooks."""
    if type(layer) not in (nn.Linear, Linear, ResidualLinear) or "forward" in vars(layer):
        return False
    weight: Any = layer.weight
    return bool(
        weight.device.type == "cpu"
        and weight.dtype == kind
        and not hasattr(weight, "ds_id")  # under ZeRO-3 it is a part
        and min(weight.shape) >= LEAST_WIDTH
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


@contextmanager
def packed_weights(model: nn.Module, rows: int) -> Iterator[int]:
    """A context in which large linear layers multiply by packed copies of their weights; yields their number.

    rows: the number of rows of most products. The weights must not change meanwhile, and nothing may need gradients; results
    differ from the plain layers' by rounding. Experts, whose number of rows changes at every token, stay plain. If packing
    does not apply (another device or precision, small layers, more than MOST_BYTES), nothing changes.
    """
    kind, multiply = torch.float32, onednn_product()
    if multiply and torch.is_autocast_enabled("cpu"):  # in its precision, if the weights are already cast
        kind = torch.get_autocast_dtype("cpu")
        multiply = multiply if kind == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported() else None
    routed = {part for layer in model.modules() if isinstance(layer, SwitchMLP) for part in layer.modules()}
    layers: list[Any] = [m for m in model.modules() if is_packable(m, kind) and m not in routed] if multiply else []
    if sum(layer.weight.nbytes for layer in layers) > MOST_BYTES:
        layers = []
    joined: dict[Any, MLP] = {
        m.up: m for m in model.modules() if isinstance(m, MLP) and not (m.swiglu or m.relu) and m.up in layers
    }
    changed: list[nn.Module] = []
    try:
        for layer in layers:
            layer.forward = _packed(layer, rows, multiply, joined.get(layer))
            changed.append(layer)
            if mlp := joined.get(layer):
                # `up` applies the activation itself
                mlp.forward = nn.Sequential(mlp.up, mlp.down).forward  # type: ignore[method-assign, assignment]
                changed.append(mlp)
        yield len(layers)
    finally:
        for module in changed:
            del module.forward


def is_packed(layer: nn.Module) -> bool:
    """Whether the layer multiplies by a packed copy at present."""
    return "forward" in vars(layer)


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """A context in which layers that multiply by packed copies of their weights use the weights themselves."""
    packed = [(vars(module), vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]
    for values, _ in packed:
        del values["forward"]
    try:
        yield
    finally:
        for values, forward in packed:
            values["forward"] = forward


def _packed(layer: Any, rows: int, multiply: Any, mlp: MLP | None) -> Callable[[Tensor], Tensor]:
    """The layer's forward, or, if it is the first of an MLP, gelu of it in the MLP's form."""
    weight, bias = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows), layer.bias
    kind = layer.weight.dtype
    activation, form = ("none", "") if mlp is None else ("gelu", mlp.approximate)

    def forward(x: Tensor) -> Tensor:
        if x.numel() > MOST_ROWS * x.shape[-1]:
            y = product(x, layer.weight, bias)
            return y if mlp is None else F.gelu(y, approximate=form)
        return multiply(x.to(kind), weight, bias, activation, [], form)

    return forward

"""Linear layers that use the faster of torch's matrix libraries, linear layers that stay in float32, frozen models
under autocast, whose weights of linear layers are cast once instead of at every call, and weights with their adapters
added.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.config import Config
from rlhf.config.precision import wants_bfloat16
from rlhf.ops.fast import product
from rlhf.ops.masked import computed_in, upcast


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


class ResidualLinear(Linear):
    """A projection that writes to the residual stream; its initialisation is scaled down by depth."""


class Float32Linear(nn.Linear):
    """A small product in float32, whatever the precision of the rest: near 10, bfloat16 has steps of 1/16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(upcast(x), upcast(self.weight), None if self.bias is None else upcast(self.bias))


def hold_frozen(config: Config, model: Any, device: torch.device) -> Any:
    """A model that is not trained, on its device; for `inference` in bfloat16 with the weights of its linear layers in
    it. No result changes: embeddings, norms and scalar heads keep their precision.
    """
    model.requires_grad_(False).to(device)
    if wants_bfloat16(config, device):
        for p in product_weights(model):
            p.data = p.data.to(torch.bfloat16)
    return model


def round_frozen(model: nn.Module) -> None:
    """Hold the frozen weights of a model's linear layers in bfloat16, to which autocast would cast them at every
    forward.

    On a CPU, where keeping both would take more memory, weights that would lose something stay in float32.
    """
    for p in product_weights(model):
        frozen = not p.requires_grad and p.dtype == torch.float32
        if frozen and (p.is_cuda or p.data.to(torch.bfloat16).float().equal(p.data)):
            hold_rounded(p)


@torch.no_grad()
def hold_rounded(p: Any, keep: bool = True) -> None:
    """Hold a weight in bfloat16. A merged model is written from its `exact`: the float32 weight in the host's memory,
    or None if rounding lost nothing, or without `keep`.
    """
    rounded = p.data.to(torch.bfloat16)
    p.exact = p.data.cpu() if keep and not rounded.float().equal(p.data) else None
    p.data = rounded


def exact_weight(p: Tensor) -> Tensor:
    """A copy of a weight on the CPU, as it was before `hold_rounded`."""
    if not hasattr(p, "exact"):
        return p.detach().to("cpu", copy=True)
    return p.detach().float().cpu() if p.exact is None else p.exact.clone()


@contextmanager
def products_cast(model: nn.Module) -> Iterator[None]:
    """A context in which the weights of linear layers are already cast for autocast, if it is on; no result changes.

    Autocast caches casts only of weights that need gradients; those under adapters it would cast at every token. The
    weights must not change meanwhile.
    """
    kept = [(p, p.data) for p in product_weights(model) if p.dtype == torch.float32]
    try:
        for p, data in kept:
            p.data = data.to(computed_in(data))
        yield
    finally:
        for p, data in kept:
            p.data = data


def product_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers, without those that an embedding shares, and without slices (ZeRO-3)."""
    modules = [(m, isinstance(m, nn.Linear | Conv1D) and not isinstance(m, Float32Linear)) for m in model.modules()]
    elsewhere = {id(p) for m, is_product in modules if not is_product for p in m.parameters(recurse=False)}
    found = {id(p): p for m, is_product in modules if is_product for p in m.parameters(recurse=False)}
    return [p for key, p in found.items() if key not in elsewhere and not hasattr(p, "ds_id")]


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, PEFT's layer) of each layer with adapters."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def merged(model: nn.Module, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A model's whole weights with its adapters added, one by one, under the names of the model without adapters.

    W + alpha / rank B A, for each active set of adapters. Each W is removed from `state`, so that memory never contains
    both.
    """
    layers: dict[str, Any] = dict(adapted_layers(model))
    for name in [name for name in state if ".lora_" not in name]:
        weight, plain = state.pop(name), name.replace(".base_layer.", ".")
        layer: Any = layers.get(plain.removesuffix(".weight")) if name.endswith(".base_layer.weight") else None
        for adapter in layer.active_adapters if layer is not None else ():
            a, b = (state[f"{plain.removesuffix('.weight')}.{part}.{adapter}.weight"] for part in ("lora_A", "lora_B"))
            change = layer.scaling[adapter] * (b @ a)
            weight = weight + (change.T if layer.fan_in_fan_out else change)
        yield plain, weight

"""The optimizers of every stage (AdamW, Muon) and the schedules of their learning rates."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rlhf.config.stages import OptimizerConfig


def shape_of(parameter: Any) -> torch.Size:
    """The whole shape, also of a parameter that ZeRO-3 has divided."""
    return getattr(parameter, "ds_shape", parameter.shape)


def make_adamw(groups: list[dict[str, Any]], *, on_host: bool = False) -> torch.optim.Optimizer:
    """AdamW over groups of `decay_groups`. on_host: DeepSpeed's, where ZeRO offloads the optimizer."""
    if not on_host:
        devices = {p.device.type for group in groups for p in group["params"]}
        fused = True if devices == {"cuda"} else None  # one kernel updates all; otherwise torch chooses
        return torch.optim.AdamW(groups, weight_decay=0.0, fused=fused)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, weight_decay=0.0, adamw_mode=True)


def make_schedule(settings: Any, steps: int, warmup: int | None = None) -> Callable[[int], float]:
    """The learning rate's factor after some steps: linear warm-up over `warmup` or settings.warmup_fraction, then the schedule."""
    warmup = math.ceil(settings.warmup_fraction * steps) if warmup is None else warmup
    return lambda step: (step + 1) / warmup if step < warmup else fallen(settings, step - warmup, steps - warmup)


def fallen(settings: OptimizerConfig, done: int, steps: int) -> float:
    """The factor that the schedule gives after `done` of its `steps`: 1 at first, final_lr_fraction at the end.
    linear: 1 - (1 - final) t;   cosine: final + (1 - final) (1 + cos(pi t)) / 2;   constant: 1        t = done / steps, at most 1
    """
    final, steps = settings.final_lr_fraction, max(1, steps)  # a warm-up may outlast the schedule
    done = min(done, steps)
    if settings.schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * (done / steps)))
    return 1.0 - (1.0 - final) * done / steps if settings.schedule == "linear" else 1.0


def decay_groups(model: nn.Module, settings: Any, **more: Any) -> list[dict[str, Any]]:
    """AdamW's parameter groups by a stage's settings: weight decay on matrices only. more: of each group."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (len(shape_of(p)) >= 2) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    stated = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2)} | more
    return [stated | group for group in groups if group["params"]]


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for the matrices of the layers; torch's AdamW for embeddings, the unembedding and vectors.

    Both work on this optimizer's own state and groups, so that training reads and writes them as any other's. Weight decay acts
    on matrices only. Muon orthogonalises whole matrices, so it does not work on ZeRO's slices.
    Source: Jordan et al. 2024 (Muon); Loshchilov and Hutter 2019 (AdamW).
    """

    def __init__(self, model: nn.Module, settings: Any):
        inner = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in f".{name}"}
        matrices = [p for p in model.parameters() if id(p) in inner and p.requires_grad]
        rest = [p for p in model.parameters() if id(p) not in inner and p.requires_grad]
        self.muon = torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay)
        self.adamw = make_adamw([{"params": rest, "lr": settings.lr, "betas": (settings.beta1, settings.beta2)}])
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self.muon.state = self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.muon.step(closure)
        self.adamw.step()


def steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether AdamW counts its steps in a tensor on the parameters' device, as its fused form does."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)

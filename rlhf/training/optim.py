"""The optimizers of every stage (AdamW, Muon) and the schedules of their learning rates."""

import math
from typing import Any

import torch
from torch import nn

BETAS = (0.9, 0.95)  # of AdamW (RECIPE, sections 2 to 4)


def make_adamw(
    groups: list[dict[str, Any]], *, lr: float = 1e-3, betas: tuple[float, float] = BETAS, on_host: bool = False
) -> torch.optim.Optimizer:
    """AdamW over parameter groups, each with its own weight_decay (default 0).

    lr: for groups without their own. on_host: DeepSpeed's AdamW for the host's memory, where ZeRO offloads the optimizer.
    """
    if not on_host:
        devices = {p.device.type for group in groups for p in group["params"]}
        fused = True if devices == {"cuda"} else None  # one kernel updates all; otherwise torch chooses
        return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=0.0, fused=fused)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, lr=lr, betas=betas, weight_decay=0.0, adamw_mode=True)


def cosine_schedule(step: int, steps: int, warmup: int, final: float) -> float:
    """Factor on the learning rate: linear warm-up, then a half cosine down to `final`."""
    if step < warmup:
        return (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share))


def inverse_sqrt_schedule(step: int, warmup: int) -> float:
    """Factor on the learning rate: linear warm-up, then sqrt(warmup / steps). Source: Vaswani et al. 2017, equation 3."""
    return min((step + 1) / max(1, warmup), math.sqrt(max(1, warmup) / (step + 1)))


def linear_schedule(step: int, steps: int, warmup: int) -> float:
    """Factor on the learning rate: linear warm-up, then linear decay to 0."""
    return (step + 1) / warmup if step < warmup else (steps - step) / (steps - warmup)


def decay_groups(
    model: nn.Module, weight_decay: float, lr: float, betas: tuple[float, float] = BETAS
) -> list[dict[str, Any]]:
    """Parameter groups with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [{"lr": lr, "betas": betas} | group for group in groups if group["params"]]


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for the matrices of the layers; torch's AdamW for embeddings, the unembedding and vectors.

    Both work on this optimizer's own state and groups, so that training reads and writes them as any other's. Weight decay acts
    on matrices only. Muon orthogonalises whole matrices, so it does not work on ZeRO's slices.
    Source: Jordan et al. 2024 (Muon); Loshchilov and Hutter 2019 (AdamW).
    """

    def __init__(self, model: nn.Module, *, muon_lr: float, lr: float, betas: tuple[float, float], weight_decay: float):
        inner = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in f".{name}"}
        matrices = [p for p in model.parameters() if id(p) in inner and p.requires_grad]
        rest = [p for p in model.parameters() if id(p) not in inner and p.requires_grad]
        self.muon = torch.optim.Muon(matrices, lr=muon_lr, weight_decay=weight_decay)
        self.adamw = make_adamw([{"params": rest}], lr=lr, betas=betas)
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

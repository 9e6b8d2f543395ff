"""The optimizers of every stage (AdamW, Muon) and the schedules of their learning rates."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config.stages import OptimizerConfig


def shape_of(parameter: Any) -> torch.Size:
    """The whole shape, also of a parameter that ZeRO-3 has divided."""
    return getattr(parameter, "ds_shape", parameter.shape)


def make_adamw(groups: list[dict[str, Any]], *, on_host: bool = False) -> torch.optim.Optimizer:
    """AdamW over groups of `decay_groups`. on_host: DeepSpeed's, where ZeRO offloads the optimizer."""
    if not on_host:
        devices = {p.device.type for group in groups for p in group["params"]}
        # on a GPU one kernel updates all; otherwise torch chooses
        return torch.optim.AdamW(groups, weight_decay=0.0, fused=True if devices == {"cuda"} else None)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, weight_decay=0.0, adamw_mode=True)


def make_schedule(settings: Any, steps: int, warmup: int | None = None) -> Callable[[int], float]:
    """The learning rate's factor after some steps: linear warm-up over `warmup` or settings.warmup_fraction, then the schedule."""
    warmup = math.ceil(settings.warmup_fraction * steps) if warmup is None else warmup
    return lambda step: (step + 1) / warmup if step < warmup else fallen(settings, step - warmup, steps - warmup)


def fallen(settings: OptimizerConfig, done: int, steps: int) -> float:
    """The factor that the schedule gives after `done` of its `steps`: 1 at first, final_lr_fraction at the end.
    linear: 1 - (1 - final) t;   cosine: final + (1 - final) (1 + cos(pi t)) / 2;   constant: 1        t = done / steps,
    at most 1
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


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al.'s coefficients: singular values end near 1 after five steps
MUON_MOMENTUM = 0.95


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers; torch's AdamW for embeddings, the unembedding and vectors.

    Both work on this optimizer's own state and groups, so that training reads and writes them as any other's. Weight
    decay acts on matrices only. Muon orthogonalises whole matrices, so it does not work on ZeRO's slices.
    Source: Jordan et al. 2024 (Muon); Loshchilov and Hutter 2019 (AdamW).
    """

    def __init__(self, model: nn.Module, settings: Any):
        inner = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in f".{name}"}
        matrices = [p for p in model.parameters() if id(p) in inner and p.requires_grad]
        rest = [p for p in model.parameters() if id(p) not in inner and p.requires_grad]
        muon = {"params": matrices, "lr": settings.muon_lr, "weight_decay": settings.weight_decay}
        self.adamw = make_adamw([{"params": rest, "lr": settings.lr, "betas": (settings.beta1, settings.beta2)}])
        super().__init__([muon, *self.adamw.param_groups], {})
        self.adamw.param_groups, self.adamw.state = self.param_groups[1:], self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - MUON_MOMENTUM)
                update = orthogonalised(p.grad.lerp(momentum, MUON_MOMENTUM))  # Nesterov's
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1])))
        self.adamw.step()


def orthogonalised(x: Tensor) -> Tensor:
    """A matrix with the singular vectors of `x` and singular values near 1, by five Newton-Schulz steps, as
    torch.optim.Muon makes it.
    Differs: in float32 on a CPU without AVX-512, where torch multiplies bfloat16 matrices 25 times slower.
    """
    a, b, c = NEWTON_SCHULZ
    slow = x.device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    wide = x.to(torch.float32 if slow else torch.bfloat16)
    tall = x.shape[0] > x.shape[1]
    wide = wide.T if tall else wide
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


def steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether AdamW counts its steps in a tensor on the parameters' device, as its fused form does."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)

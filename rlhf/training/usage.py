"""Cost of training, as metrics: the fraction of the device's peak rate that it reaches (MFU), and peak memory.

The operations are those of `rlhf.planning.formulas` for the model's own weights.
"""

from collections.abc import Iterable

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlhf.config import Config
from rlhf.config.precision import precision_of
from rlhf.model.blocks import SwitchMLP
from rlhf.model.interface import unwrapped
from rlhf.planning.formulas import PEAK_TFLOPS, TRAINING_PASSES, pass_flops
from rlhf.system.memory import peak_rss_mb
from rlhf.training.state import shape_of


def peak_flops(config: Config, device: torch.device) -> float | None:
    """Operations per second of one device: tracking.peak_tflops, or by the GPU's name; None if unknown."""
    if config.tracking.peak_tflops is not None:
        return config.tracking.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    half = precision_of(config) == "bfloat16"
    return known_peak(torch.cuda.get_device_name(device), half)


def known_peak(name: str, half: bool) -> float | None:
    """Operations per second of a GPU by its name, in bfloat16 (`half`) or float32; None for an unknown one."""
    for part, (bfloat16_peak, float32_peak) in PEAK_TFLOPS.items():
        if part in name.upper():
            return 1e12 * (bfloat16_peak if half else float32_peak)
    return None


def forward_flops(model: nn.Module, tokens: float, context: float) -> float:
    """Operations of a forward pass over `tokens` tokens in rows of `context`: `formulas.pass_flops` of the model's weights.

    Of several experts only one counts.
    """
    model = unwrapped(model)
    idle = {id(part) for layer in model.modules() if isinstance(layer, SwitchMLP)
            for expert in layer.experts[1:] for part in expert.modules()}  # fmt: skip
    weights = sum(
        shape_of(module.weight).numel()
        for module in model.modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) not in idle
    )
    config = getattr(model, "config", None)
    config = getattr(config, "trunk", None) or config  # of a reward model
    layers, heads, width = (
        float(getattr(config, name, 0) or 0) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    width = heads * (getattr(config, "head_dim", None) or 0) or width
    return pass_flops(weights * tokens, layers * width, tokens, context)


def training_flops(model: nn.Module, tokens: float, context: float) -> float:
    """Operations of forward and backward."""
    return TRAINING_PASSES * forward_flops(model, tokens, context)


def update_flops(
    policy: nn.Module,
    critic: nn.Module | None,
    frozen: Iterable[nn.Module],
    tokens: float,
    context: float,
    *,
    passes: float,
    with_policy: bool = True,
) -> float:
    """Operations of one update of PPO over `tokens` tokens of prompts and responses, in rows of `context`.

    A forward of the policy to sample, one of each frozen model (reference, reward model) and of the critic to score, and
    `passes` times forward and backward of the critic and, if it trains, of the policy.
    """
    trained = [module for module, trains in ((policy, with_policy), (critic, True)) if module is not None and trains]
    once = [policy, *frozen, *([] if critic is None else [critic])]
    return sum(forward_flops(model, tokens, context) for model in once) + passes * sum(
        training_flops(model, tokens, context) for model in trained
    )


def usage_metrics(
    config: Config, device: torch.device, flops: float, seconds: float, processes: int = 1
) -> dict[str, float]:
    """Peak memory so far, and time/mfu for `flops` operations of all processes in `seconds`.

    Without a known peak, as on a CPU, there is no time/mfu.
    """
    metrics = {"memory/peak_rss_mb": peak_rss_mb()}
    if device.type == "cuda":
        metrics["memory/peak_gpu_mb"] = round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    peak = peak_flops(config, device)
    if peak:
        metrics["time/mfu"] = flops / seconds / (peak * processes)
    return metrics

"""What training takes of a device: how many tokens a forward with gradients may have, by what a stage holds and keeps
per token and its memory budget; and as metrics the fraction of the device's peak rate that it reaches (MFU), and peak
memory.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlhf.config import Config
from rlhf.config.commands import uses
from rlhf.config.precision import precision_of
from rlhf.errors import UserError
from rlhf.model.blocks import SwitchMLP
from rlhf.ops.fast import keep_freed_memory
from rlhf.planning.formulas import (
    CPU_GAPS,
    PEAK_TFLOPS,
    ROOM,
    TRAINING_PASSES,
    Shape,
    activation_bytes,
    loss_bytes,
    pass_flops,
    shape_of_config,
)
from rlhf.runs.stage import Stage
from rlhf.system.memory import GB, budget_bytes, peak_rss_mb, used_bytes
from rlhf.system.processes import share
from rlhf.training.engine import Engine
from rlhf.training.optim import shape_of
from rlhf.training.setup import transformers_in

CPU_BYTES = 1.5e9  # of activations that are kept: on a CPU more tokens per forward are not faster, but padded more
# Bytes of a block that goes back to the system at once if activations are recomputed: each layer leaves its small input in the
# middle of what its large temporaries freed, so that the next layer's fit into no gap, and little would be saved.
LARGE = 2**22


def set_budget(
    stage: Stage, engine: Engine, longest: int, items: int, measure: Callable[[int], float | None] | None = None
) -> None:
    """Limit the forwards with gradients of a stage before its first step, the same on all ranks; print what it needs.
    If the largest item does not fit otherwise, activations are computed again in the backward pass. A resumed stage
    keeps its limit if that still fits by what was measured then, so that it ends with the same bytes.

    longest: padded tokens of the largest item. items: the most that share a forward. measure: runs the largest forward
    and backward of at most so many tokens, and returns its bytes per token; called if the estimate is above half the
    budget.
    Raises: UserError if the largest item does not fit, with settings that help.
    """
    config, on_cpu, ranks = stage.config, engine.device.type == "cpu", engine.ranks
    most = -int(ranks.max(-budget_bytes(config.memory.budget_gb, engine.device)))  # bytes of this process
    held = int(ranks.max(used_bytes(engine.device) + bytes_to_come(engine)))  # at every step
    for_weights = f"{held / GB:.1f} for weights, gradients and optimizer"
    fast = CPU_BYTES / kept_per_token(engine, recomputes=False) if on_cpu else math.inf  # more tokens are not faster
    per_token = kept_per_token(engine)

    def fitting() -> int:
        """Most padded tokens of a forward."""
        return max(0, int((ROOM * most - held) / per_token))

    def needs(tokens: float) -> int:
        """Bytes if a forward has so many tokens, unless its only item has more or all items that may share it have fewer."""
        return int(held + per_token * max(longest, min(tokens, longest * items)))

    supported = all(model.supports_gradient_checkpointing for model in transformers_in(engine.module))
    if longest > fitting() and not engine.recomputes and supported:
        engine.recompute_activations()
        so_that = f"so that the longest row, {longest:,} tokens, fits"
        stage.say(f"activations are computed again in the backward pass, {so_that}")
        per_token = kept_per_token(engine)
    if engine.recomputes and on_cpu:
        keep_freed_memory(LARGE)
    recorded = share(stage.memory)  # of a resumed stage
    before = recorded.get("tokens")
    measured = recorded.get("measured", 0.0) if recorded.get("recomputes") == engine.recomputes else 0.0
    tokens = int(min(fitting(), fast))
    if before is None and measure and not engine.sharded and most / 2 < needs(tokens) and longest <= fitting():
        measured = ranks.max(measure(tokens) or 0.0)
    per_token = measured or per_token
    tokens = int(min(fitting(), fast))
    if longest > fitting():
        helps = ["lora.rank=16"] if not config.lora.rank and uses(stage.name, "lora.rank") else []
        helps += [f"data.max_tokens={max(16, fitting())}"] if fitting() else []
        helps = [f"pretrain.global_batch_tokens={max(16, fitting())}"] if stage.name == "pretrain" else helps
        needed = f"needs {needs(tokens) / GB:.1f} GB and has {most / GB:.1f}: {for_weights}"
        remedy = f"try {' or '.join(helps) or 'a smaller model'}, or raise memory.budget_gb if there is more"
        raise UserError(f"{stage.name}: {needed}, the rest for its longest row of {longest:,} tokens: {remedy}")
    if before is not None and before <= fitting():
        tokens = int(before)
    elif before is not None:
        stage.say(f"{before:,} tokens per forward no longer fit: goes on with {tokens:,}, equal up to rounding")
    engine.most_tokens = tokens
    stage.memory = {"tokens": tokens, "needs_gb": needs(tokens) / GB, "budget_gb": most / GB}
    if measured:  # bytes per token
        stage.memory |= {"measured": measured, "recomputes": float(engine.recomputes)}
    stage.note_progress()
    takes = f"needs {needs(tokens) / GB:.1f} of {most / GB:.1f} GB: {for_weights}"
    stage.say(f"{takes}; up to {tokens:,} tokens per forward, the longest row has {longest:,}")


def bytes_to_come(engine: Engine) -> int:
    """What the first step allocates on this rank: gradients, without ZeRO AdamW's moments, and the loss's chunks of logits."""
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    logits = max(loss_bytes(trunk_shape(model)) for model in transformers_in(engine.module))
    if engine.sharded:
        return logits + 4 * sum(shape_of(p).numel() for p in trained) // engine.ranks.count
    return logits + sum(4 * p.numel() * (1 + 2 * (not engine.optimizer.state.get(p))) for p in trained)


def kept_per_token(engine: Engine, recomputes: bool | None = None) -> float:
    """Bytes that a forward keeps per padded token, in the transformer that keeps most; under ZeRO in all."""
    checkpointing = engine.recomputes if recomputes is None else recomputes
    lora = any("lora_" in name for name, _ in engine.module.named_parameters())
    gaps = CPU_GAPS[lora] if engine.device.type == "cpu" else 1.0
    kind = "bf16" if engine.bfloat16 else "fp32"

    def kept(model: Any) -> float:
        dropout = max((m.p for m in model.modules() if isinstance(m, nn.Dropout)), default=0.0)
        return gaps * activation_bytes(trunk_shape(model), 1, kind, checkpointing, dropout)

    each = [kept(model) for model in transformers_in(engine.module)]
    return sum(each) if engine.sharded else max(each)


def trunk_shape(model: Any) -> Shape:
    """The shape of one of transformers' models or of ours, of a reward model that of its trunk."""
    return shape_of_config((getattr(model.config, "trunk", None) or model.config).get_text_config())


# ------------------------------------------------------------------------------------------------- as metrics


def known_peak(name: str, half: bool) -> float | None:
    """Operations per second of a GPU by its name, in bfloat16 (`half`) or float32; None for an unknown one."""
    return next((1e12 * peaks[not half] for part, peaks in PEAK_TFLOPS.items() if part in name.upper()), None)


def forward_flops(model: nn.Module, tokens: float, context: float) -> float:
    """Operations of a forward pass over tokens in rows of `context`; of several experts only one counts."""
    idle = {id(part) for layer in model.modules() if isinstance(layer, SwitchMLP)
            for expert in layer.experts[1:] for part in expert.modules()}  # fmt: skip
    linear = (m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and id(m) not in idle)
    weights = sum(shape_of(layer.weight).numel() for layer in linear)
    shapes = map(trunk_shape, transformers_in(model))
    return pass_flops(weights * tokens, sum(x.n_layer * x.query_width for x in shapes), tokens, context)


def update_flops(
    once: Sequence[nn.Module], trained: Sequence[nn.Module], tokens: float, context: float, passes: float
) -> float:
    """Operations of an update: a forward of each model of `once`, `passes` of forward and backward of those `trained`."""
    forwards, training = (sum(forward_flops(m, tokens, context) for m in models) for models in (once, trained))
    return forwards + passes * TRAINING_PASSES * training


def usage_metrics(
    config: Config, device: torch.device, flops: float, seconds: float, processes: int = 1
) -> dict[str, float]:
    """Peak memory so far, and time/mfu for `flops` operations of all processes in `seconds`.
    The peak rate is tracking.peak_tflops, or the GPU's by its name; without one, as on a CPU, there is no time/mfu.
    """
    metrics, peak = {"memory/peak_rss_mb": peak_rss_mb()}, (config.tracking.peak_tflops or 0) * 1e12
    if device.type == "cuda":
        metrics["memory/peak_gpu_mb"] = round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
        peak = peak or known_peak(torch.cuda.get_device_name(device), precision_of(config) == "bfloat16") or 0.0
    if peak:
        metrics["time/mfu"] = flops / seconds / (peak * processes)
    return metrics

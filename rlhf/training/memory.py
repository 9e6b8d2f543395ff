"""How many tokens a forward with gradients may take: what a stage holds and keeps per token, against its memory budget."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.ops.fast import keep_freed_memory
from rlhf.planning.formulas import CPU_GAPS, ROOM, activation_bytes, loss_bytes
from rlhf.planning.shapes import Shape, shape_of_config
from rlhf.runs.stage import Stage
from rlhf.system.memory import GB, budget_bytes, used_bytes
from rlhf.system.processes import share
from rlhf.training.engine import Engine

CPU_BYTES = 1.5e9  # of activations that are kept: on a CPU more tokens per forward are not faster, but padded more
# Bytes of a block that goes back to the system at once if activations are recomputed: each layer leaves its small input in the
# middle of what its large temporaries freed, so that the next layer's fit into no gap, and little would be saved.
LARGE = 2**22


@dataclass(frozen=True)
class Budget:
    """What the forwards and backwards of a stage may take, in bytes.

    most: of this process. held: at every step: weights, gradients, the optimizer's moments, frozen models, the libraries.
    per_token: what a padded token of a forward keeps for its backward. longest: padded tokens of the largest item, which is not
    divided. together: of the most items that other limits let into a forward. fast: padded tokens from which on a forward is not faster.
    """

    most: int
    held: int
    per_token: float
    longest: int
    together: int
    fast: float
    kept_tokens: int | None = None  # of a resumed stage

    @property
    def fitting(self) -> int:
        """Most padded tokens of a forward."""
        return max(0, int((ROOM * self.most - self.held) / self.per_token))

    @property
    def tokens(self) -> int:
        """Padded tokens of a forward, unless its only item has more."""
        return self.kept_tokens or int(min(self.fitting, self.fast))

    @property
    def needs(self) -> int:
        return int(self.held + self.per_token * max(self.longest, min(self.tokens, self.together)))


def set_budget(
    stage: Stage, engine: Engine, longest: int, items: int, measure: Callable[[int], float | None] | None = None
) -> None:
    """Limit the forwards with gradients of a stage whose models are loaded, before its first step, the same on all ranks; print
    what it needs. If the largest item does not fit otherwise, activations are computed again in the backward pass. A resumed
    stage keeps its limit if that still fits by what was measured then, so that it ends with the same bytes.

    longest: padded tokens of the largest item. items: the most that share a forward. measure: runs the largest forward and backward
    of at most so many tokens, and returns its bytes per token; called if the estimate is above half the budget.

    Raises: UserError if the largest item does not fit, with settings that help.
    """
    config, on_cpu, ranks = stage.config, engine.device.type == "cpu", engine.ranks
    most = -int(ranks.max(-budget_bytes(config.memory.budget_gb, engine.device)))
    held = int(ranks.max(used_bytes(engine.device) + bytes_to_come(engine)))
    fast = CPU_BYTES / kept_per_token(engine, recomputes=False) if on_cpu else math.inf
    budget = Budget(most, held, kept_per_token(engine), longest, longest * items, fast)
    models = transformers_in(engine.module)
    if longest > budget.fitting and not engine.recomputes and all(m.supports_gradient_checkpointing for m in models):
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        engine.recomputes = True
        stage.say(
            f"the longest row has {longest:,} tokens: activations are computed again in the backward pass, to fit"
        )
        budget = replace(budget, per_token=kept_per_token(engine))
    if engine.recomputes and on_cpu:
        keep_freed_memory(LARGE)
    recorded = share(stage.memory)  # of a resumed stage
    before = recorded.get("tokens")
    measured = recorded.get("measured", 0.0) if recorded.get("recomputes") == engine.recomputes else 0.0
    if before is None and measure and not engine.sharded and most / 2 < budget.needs and longest <= budget.fitting:
        measured = ranks.max(measure(budget.tokens) or 0.0)
    if measured:
        budget = replace(budget, per_token=measured)
    if longest > budget.fitting:
        fitting = max(16, budget.fitting)
        helps = [] if config.lora.rank else ["lora.rank=16"]
        helps += [f"data.max_tokens={fitting}"] if budget.fitting else []
        helps = [f"pretrain.global_batch_tokens={fitting}"] if stage.name == "pretrain" else helps
        raise UserError(
            f"{stage.name}: needs {budget.needs / GB:.1f} GB and has {most / GB:.1f}: {held / GB:.1f} for weights, gradients and "
            f"optimizer, the rest for its longest row of {longest:,} tokens: try {' or '.join(helps) or 'a smaller model'}, or raise "
            "memory.budget_gb if there is more"
        )
    if before is not None and before <= budget.fitting:
        budget = replace(budget, kept_tokens=int(before))
    elif before is not None:
        stage.say(f"{before:,} tokens per forward no longer fit: goes on with {budget.tokens:,}, equal up to rounding")
    engine.most_tokens = budget.tokens
    stage.memory = {"tokens": budget.tokens, "needs_gb": budget.needs / GB, "budget_gb": most / GB}
    if measured:  # bytes per token
        stage.memory |= {"measured": measured, "recomputes": float(engine.recomputes)}
    stage.note_progress()
    stage.say(
        f"needs {budget.needs / GB:.1f} of {most / GB:.1f} GB: {held / GB:.1f} for weights, gradients and optimizer; up to "
        f"{budget.tokens:,} tokens per forward, the longest row has {longest:,}"
    )


def bytes_to_come(engine: Engine) -> int:
    """What the first step allocates on this rank: gradients, AdamW's moments, and the loss's chunks of logits."""
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    count = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
    logits = max(loss_bytes(trunk_shape(model)) for model in transformers_in(engine.module))
    if engine.sharded:  # DeepSpeed has allocated the rest
        return 3 * 4 * count // engine.ranks.count + logits
    return logits + sum(4 * p.numel() * (1 + 2 * (not engine.optimizer.state.get(p))) for p in trained)


def kept_per_token(engine: Engine, recomputes: bool | None = None) -> float:
    """Bytes that a forward keeps per padded token: of the transformer that keeps most, or under ZeRO, which runs all at once, the
    sum. recomputes: whether activations are computed again; as the engine does unless given.
    """
    checkpointing = engine.recomputes if recomputes is None else recomputes
    lora = any("lora_" in name for name, _ in engine.module.named_parameters())
    gaps = CPU_GAPS[lora] if engine.device.type == "cpu" else 1.0
    kind = "bf16" if engine.bfloat16 else "fp32"

    def kept(model: Any) -> float:
        dropout = max((m.p for m in model.modules() if isinstance(m, nn.Dropout)), default=0.0)
        how: Any = {"checkpointing": checkpointing, "fused": True, "dropout": dropout}
        return gaps * activation_bytes(trunk_shape(model), 1, 1, kind, **how)

    each = [kept(model) for model in transformers_in(engine.module)]
    return sum(each) if engine.sharded else max(each)


def trunk_shape(model: Any) -> Shape:
    return shape_of_config((getattr(model.config, "trunk", None) or model.config).get_text_config())


def transformers_in(module: nn.Module) -> list[Any]:
    if isinstance(module, PreTrainedModel):
        return [module]
    return [found for child in module.children() for found in transformers_in(child)]

"""What one process does in test_sharding.py: whole stages, one after the other, some cut off after a checkpoint.

Run as `sharding_ranks.py <out.json> <job> …`, each job `<stage>:<saves>:<overrides separated by blanks>`. With saves above 0
the stage is cut off right after that many checkpoints. The first process writes what each job left on the devices; the job
`held:<deepspeed>:<precision>:<persistence threshold>` measures what a small GPT holds.
"""

import contextlib
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from rlhf.config.compose import compose_config
from rlhf.stages import pretrain, sft
from rlhf.system.exits import leave
from rlhf.system.processes import connect, disconnect, is_first
from rlhf.training.loop import TrainingLoop
from tests.stages.state_bytes import measure_state


class CutOff(Exception):
    """Raised right after a checkpoint."""


def held(model: torch.nn.Module, engine: Any) -> dict[str, float]:
    """Elements of weights and of AdamW's first moment that this process holds, over those of the model."""
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    weights = sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in model.parameters())
    states = engine.optimizer.optimizer.state.values()
    return {"weights": weights / whole, "moments": sum(s["exp_avg"].numel() for s in states) / whole}


def main(arguments: list[str]) -> None:
    out, *jobs = arguments
    found: list[Any] = []
    save = TrainingLoop.save
    train = pretrain.train

    def measured(loop: TrainingLoop, *arguments: Any) -> None:
        train(loop, *arguments)
        if loop.engine.sharded:
            found[-1] = held(loop.engine.module, loop.engine)

    pretrain.train = sft.train = measured
    for job in jobs:
        if job.startswith("held:"):
            connect(torch.device("cpu"))
            _, name, precision, threshold = job.split(":")
            found.append(measure_state(name, precision, int(threshold)))
            continue
        stage, saves, overrides = job.split(":", 2)
        left = int(saves)

        def cutting(*args: Any, **kwargs: Any) -> None:
            nonlocal left
            save(*args, **kwargs)
            left -= 1
            if left == 0:
                raise CutOff

        TrainingLoop.save = cutting
        found.append(None)
        with contextlib.suppress(CutOff):
            import_module(f"rlhf.stages.{stage}").run(compose_config(overrides.split()))
    if is_first():
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
    if disconnect():
        leave(0)

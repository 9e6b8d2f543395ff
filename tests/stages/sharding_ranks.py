"""What one process does in test_sharding.py: whole stages, one after the other, some cut off after a checkpoint.

Run as `sharding_ranks.py <out.json> <job> …`, each job `<stage>:<saves>:<overrides separated by blanks>`. With saves above 0
the stage is cut off right after that many checkpoints. The first process writes what each job left on the devices; the job
`held:<deepspeed>:<precision>:<persistence threshold>` measures what a small GPT holds while it trains.
"""

import contextlib
import gc
import json
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhf.config.compose import compose_config
from rlhf.config.stages import SftConfig
from rlhf.model.gpt import GPTForCausalLM
from rlhf.stages import pretrain
from rlhf.system.exits import leave
from rlhf.system.processes import connect, disconnect, is_first, rank
from rlhf.training import batches
from rlhf.training.divided import load_lm
from rlhf.training.engine import deepspeed_settings, import_deepspeed
from rlhf.training.loop import TrainingLoop
from rlhf.training.optim import decay_groups, shape_of
from rlhf.training.state import gathered_state, is_partitioned
from tests.presets import preset


class CutOff(Exception):
    """Raised right after a checkpoint."""


def shares(model: torch.nn.Module, engine: Any) -> dict[str, float]:
    """Elements of weights and of AdamW's first moment that this process holds, over those of the model."""
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    weights = sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in model.parameters())
    states = engine.optimizer.optimizer.state.values()
    return {"weights": weights / whole, "moments": sum(s["exp_avg"].numel() for s in states) / whole}


def tensors() -> list[torch.Tensor]:
    """All tensors that Python can reach, with their gradients."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are no leaves and have no gradient to show
        return found + [x.grad for x in found if x.grad is not None]


def held(chosen: list[torch.Tensor]) -> int:
    """Bytes of their storages, each once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in chosen if x.device.type == "cpu"}
    return sum(storages.values())


def measure_state(name: str, precision: str, threshold: int) -> dict[str, int]:
    """Bytes of a GPT under a ZeRO stage; the parts are told apart by when they come and go.

    Gradients are those after the first of two micro-batches: after the last one ZeRO-1 keeps only its share of them too.
    """
    sharding = [f"sharding.persistence_threshold={threshold}", "sharding.bucket_elements=5000"]
    config = compose_config([f"deepspeed={name}", *sharding, "device=cpu"])
    before = held(tensors())
    model = GPTForCausalLM(preset("tiny", vocab_size=64))
    parameters = sum(p.numel() for p in model.parameters())
    persistent = sum(p.numel() for p in model.parameters() if p.numel() <= threshold) if name == "zero3" else 0
    optimizer = torch.optim.AdamW(decay_groups(model, SftConfig(lr=1e-3, weight_decay=0.1)))
    settings = deepspeed_settings(config, bfloat16=precision == "bf16") | {"gradient_accumulation_steps": 2}
    engine = import_deepspeed(torch.device("cpu")).initialize(model=model, optimizer=optimizer, config=settings)[0]
    rows = torch.arange(4)[None] + rank()

    def backward() -> None:
        engine.backward(engine(rows, labels=rows, use_cache=False).loss)

    for _ in range(2):
        backward()
        engine.step()
    rested = held(tensors()) - before
    weights = [p.ds_tensor if is_partitioned(p) else p.data for p in model.parameters()]
    kept = [p.data for p in model.parameters() if p.data.numel()]  # under ZeRO-3 those below the threshold stay whole
    own = held(weights + kept)
    backward()
    gradients = held(tensors()) - before - rested
    ready = held([engine.optimizer.grad_partitions_flat_buffer]) if name == "zero3" else 0  # made before any backward
    engine.destroy()
    found = {"weights": own, "gradients": gradients + ready, "optimizer": rested - own - ready}
    return {"parameters": parameters, "persistent": persistent, **found}


def measure_loading(folder: str) -> dict[str, Any]:
    """The most bytes that were held when a weight was divided, the model's own after all, and whether they are the file's."""
    device, config = torch.device("cpu"), compose_config(["deepspeed=zero3", "device=cpu"])
    deepspeed = import_deepspeed(device)
    before, most, divide = held(tensors()), 0, deepspeed.zero.Init

    def measured(*arguments: Any, **keywords: Any) -> None:
        nonlocal most
        most = max(most, held(tensors()) - before)
        divide(*arguments, **keywords)

    deepspeed.zero.Init = measured
    try:
        model = load_lm(config, Path(folder), device)
    finally:
        deepspeed.zero.Init = divide
    bytes_of = {name: 4 * shape_of(p).numel() for name, p in model.named_parameters()}
    state, stored = gathered_state(model), load_file(Path(folder) / "model.safetensors")
    same = state is None or (state.keys() == stored.keys() and all(state[n].equal(stored[n]) for n in stored))
    return {"most": most, "largest": max(bytes_of.values()), "whole": sum(bytes_of.values()), "same": same}


def main(arguments: list[str]) -> None:
    out, *jobs = arguments
    found: list[Any] = []
    save, train = TrainingLoop.save, batches.train

    def measured(loop: TrainingLoop, *arguments: Any, **keywords: Any) -> None:
        train(loop, *arguments, **keywords)
        if loop.engine.sharded:
            found[-1] = shares(loop.engine.module, loop.engine)

    pretrain.train = batches.train = measured
    for job in jobs:
        if job.startswith("held:"):
            connect(torch.device("cpu"))
            _, name, precision, threshold = job.split(":")
            found.append(measure_state(name, precision, int(threshold)))
            continue
        if job.startswith("loading:"):
            connect(torch.device("cpu"))
            found.append(measure_loading(job.removeprefix("loading:")))
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
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
    if disconnect():
        leave(0)

"""What one process does in test_sharding.py: whole stages, one after the other, some cut off after a checkpoint.

Run as `sharding_ranks.py <out.json> <job> …`, each job `<stage>:<saves>:<overrides separated by blanks>`. With saves above 0
the stage is cut off right after that many checkpoints. The first process writes what each job left on the devices; the job
`held:<deepspeed>:<precision>:<persistence threshold>` measures what a small GPT holds while it trains; `average:<deepspeed>` checks
its own results.
"""

import contextlib
import gc
import json
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhf.config.compose import compose_config
from rlhf.config.stages import SftConfig
from rlhf.model import batching
from rlhf.model.gpt import GPTForCausalLM
from rlhf.runs import stage as runs_stage
from rlhf.stages import reward
from rlhf.system.exits import end
from rlhf.system.files import hash_files
from rlhf.system.processes import connect, disconnect, is_first, rank
from rlhf.training.divided import load_lm
from rlhf.training.engine import deepspeed_settings, import_deepspeed, make_engine
from rlhf.training.loop import TrainingLoop
from rlhf.training.optim import decay_groups, shape_of
from rlhf.training.state import Ema, gathered_state, is_partitioned
from tests.presets import preset

make_reward_model = reward.make_model


class CutOff(Exception):
    """Raised right after a checkpoint."""


def shares(model: torch.nn.Module, engine: Any) -> dict[str, float]:
    """Elements of weights and of AdamW's first moment that this process holds, over those of the model."""
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    weights = sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in model.parameters())
    states = engine.optimizer.optimizer.state.values()
    return {"weights": weights / whole, "moments": sum(s["exp_avg"].numel() for s in states) / whole}


def draw_head_alike(*given: Any) -> Any:
    """A reward model whose head is drawn from a seed of its own: under ZeRO-3 the trunk is not drawn before it."""
    model = make_reward_model(*given)
    torch.manual_seed(0)
    model.head.initialise()
    return model


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


def measure_state(case: str) -> dict[str, int]:
    """Bytes of a GPT under a ZeRO stage; the parts are told apart by when they come and go.

    Gradients are those after the first of two micro-batches: after the last one ZeRO-1 keeps only its share of them too.
    """
    name, precision, persistence = case.split(":")
    threshold = int(persistence)
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


def check_average(way: str) -> None:
    """In bfloat16: the average of five steps of 1e-5, which bfloat16 weights near 0.3 do not show."""
    from deepspeed.utils import safe_get_full_fp32_param

    decay, steps = 0.9, 5
    config = compose_config(["experiment=gold", f"deepspeed={way}", "precision=bfloat16", "device=cpu"])
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    groups, settings = [{"params": list(model.parameters()), "lr": 1e-5}], SftConfig(max_grad_norm=1e9)
    engine = make_engine(config, model, settings, torch.device("cpu"), groups=groups)
    engine.keep_average("", engine.module, decay)
    seen = []
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
        engine.step()
        seen.append(safe_get_full_fp32_param(engine.module.weight).clone())
    shares = torch.tensor([decay ** (steps - 1 - i) for i in range(steps)])
    wanted = sum(share * x for share, x in zip(shares / shares.sum(), seen, strict=True))
    found = engine.ema.state_dict()
    assert (seen[0] - seen[-1]).abs().min() > 3e-5, "the weights moved"
    assert torch.allclose(found["weight"].view_as(wanted), wanted, rtol=0, atol=1e-7), way
    again = Ema(engine.module, decay, engine.ema.rank, engine.ema.ranks)
    again.load_state_dict(found, steps)
    assert torch.equal(again.state_dict()["weight"], found["weight"]), way


def main(arguments: list[str]) -> None:
    out, *jobs = arguments
    found: list[Any] = []
    save, steps = TrainingLoop.save, TrainingLoop.steps

    def measured(loop: TrainingLoop) -> Any:
        yield from steps(loop)
        if loop.engine.sharded:
            found[-1] = shares(loop.engine.module, loop.engine)

    def late(*args: Any, **kwargs: Any) -> dict[str, str]:
        time.sleep(0.5)  # evaluate must wait for it on all ranks
        return hash_files(*args, **kwargs)

    TrainingLoop.steps, reward.make_model = measured, draw_head_alike
    if any(job.startswith("evaluate:") for job in jobs):
        runs_stage.hash_files = late
    # some rows each: by their lengths the ranks score in different numbers of forwards
    batching.SCORING_BYTES = 300_000
    measures = {"held": measure_state, "loading": measure_loading, "average": check_average}
    for job in jobs:
        kind, case = job.split(":", 1)
        if kind in measures:
            connect(torch.device("cpu"))
            found.append(measures[kind](case))
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
        end(0, at_once=True)

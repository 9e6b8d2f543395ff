"""The bytes that a process holds while it trains a small GPT under a ZeRO stage, for test_sharding.py.

Bytes are those of all tensors that Python can reach, each storage once; the parts are told apart by when they come and go.
Gradients are those after the first of two micro-batches: after the last one ZeRO-1 keeps only its share of them too.
"""

import gc
import warnings

import torch
import torch.distributed as dist

from rlhf.config.compose import compose_config
from rlhf.model.gpt import GPTForCausalLM
from rlhf.training.engine import deepspeed_settings, import_deepspeed
from rlhf.training.optim import decay_groups
from rlhf.training.state import is_partitioned
from tests.presets import preset


def tensors() -> list[torch.Tensor]:
    """All tensors alive, with their gradients."""
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
    config = compose_config(
        [
            f"deepspeed={name}",
            f"sharding.persistence_threshold={threshold}",
            "sharding.bucket_elements=5000",
            "device=cpu",
        ]
    )
    before = held(tensors())
    model = GPTForCausalLM(preset("tiny", vocab_size=64))
    parameters = sum(p.numel() for p in model.parameters())
    persistent = sum(p.numel() for p in model.parameters() if p.numel() <= threshold) if name == "zero3" else 0
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1, 1e-3))
    settings = deepspeed_settings(config, bfloat16=precision == "bf16") | {"gradient_accumulation_steps": 2}
    engine = import_deepspeed(torch.device("cpu")).initialize(model=model, optimizer=optimizer, config=settings)[0]
    rows = torch.arange(4)[None] + dist.get_rank()

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
    return {
        "parameters": parameters,
        "persistent": persistent,
        "weights": own,
        "gradients": gradients + ready,
        "optimizer": rested - own - ready,
    }

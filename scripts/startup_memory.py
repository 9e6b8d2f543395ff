"""Peak memory of each process while a model starts under ZeRO-3, against the process's share of the weights.

    python scripts/startup_memory.py --shape 350m --out startup      # makes startup/350m once, 1.4 GB, in shards of 500 MB

Two processes on the CPU over gloo. Each prints the peak of its memory (VmHWM) less what it had before, when everything was imported
and connected, its share, and the limit of 1.3 shares and a shard. --what reference: a frozen model, whose share is half of the weights;
policy, or critic with a new scalar head: with DeepSpeed's engine and AdamW. --whole reads as without ZeRO-3, for comparison.
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

SHAPES = {  # width, layers, heads, of a Llama with tied embeddings
    "tiny": (128, 4, 4),
    "350m": (1024, 24, 16),
    "1.3b": (2048, 24, 16),
}
SHARD = 500_000_000  # bytes
GIB = 2**30


def make_checkpoint(folder: Path, shape: str, dtype: torch.dtype) -> None:
    """Random weights in shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads = SHAPES[shape]
    sizes: Any = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": 8 * width // 3, "vocab_size": 50304}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    model.to(dtype).save_pretrained(str(folder), max_shard_size=SHARD)


def memory(name: str) -> float:
    """VmRSS or VmHWM of this process in GiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(rf"{name}:\s*(\d+) kB", status)[0]) / 2**20


def rank_main(rank: int, folder: Path, asked: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(asked.port), "OMP_NUM_THREADS": "1"}
    from rlhf.config.compose import compose_config
    from rlhf.config.stages import SftConfig
    from rlhf.ppo.models import Reference
    from rlhf.training.divided import load_lm, reward_model_on
    from rlhf.training.engine import import_deepspeed, make_engine, shard_frozen
    from rlhf.training.setup import load_policy, set_up

    settings = [f"precision={asked.precision}", "device=cpu", "threads=1", "sharding.bucket_elements=5000000"]
    config = compose_config(["deepspeed=zero3", *settings])
    device = set_up(config)
    import_deepspeed(device)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM starts again from here
    before = memory("VmRSS")
    load = (lambda *_: load_policy(folder)) if asked.whole else load_lm if asked.what != "critic" else reward_model_on
    model = load(config, folder, device)
    loaded, numbers = memory("VmHWM"), sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    if asked.what == "reference":
        model = shard_frozen(config, Reference(model.requires_grad_(False)), device)
    else:
        model = make_engine(config, model, SftConfig(lr=1e-5), device)
    peak = memory("VmHWM") - before  # GiB, as all that follow
    width = 2 if asked.precision == "bfloat16" else 4
    # float32: weights, the optimizer's copy, its gradients and two moments; bfloat16: weights and gradients take half
    share = numbers * (width if asked.what == "reference" else 2 * width + 4 + 8) / 2 / GIB
    found = {"rank": rank, "numbers": numbers, "read": loaded - before, "peak": peak, "kept": memory("VmRSS") - before}
    found |= {"share": share, "limit": 1.3 * share + SHARD / GIB}
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}), flush=True)
    torch.distributed.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    types = ("float32", "bfloat16")
    choices = {
        "shape": ("350m", *SHAPES),
        "what": ("reference", "policy", "critic"),
        "precision": types,
        "stored": types,
    }
    for name, values in choices.items():  # the first is the default
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--port", type=int, default=29547)
    parser.add_argument("--out", type=Path, default=Path("startup"))
    asked = parser.parse_args()
    folder = asked.out / f"{asked.shape}-{asked.stored}"
    if not folder.exists():
        make_checkpoint(folder, asked.shape, getattr(torch, asked.stored))
    multiprocessing.spawn(rank_main, (folder, asked), nprocs=2)


if __name__ == "__main__":
    main()

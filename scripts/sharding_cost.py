"""The cost of sharding per step: one process, two with whole copies, ZeRO-1, 2 and 3, alternating.

    torchrun --standalone --nproc-per-node 2 scripts/sharding_cost.py [--size tiny|small] [--rounds 15] [--out cost.json]

All take the same step (next-token loss of one global batch, AdamW) on a GPT with the same weights. The one-process step runs in the
first process while the others wait, so it has one core, as each of the others has. Prints medians and their ratio to one process,
and the computed time of the same communication over a real interconnect.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from rlhf.config import Config
from rlhf.model.fused_loss import NextToken
from rlhf.model.gpt import GPTConfig, GPTForCausalLM
from rlhf.system.exits import end
from rlhf.system.files import write_json
from rlhf.system.processes import disconnect, process_count, rank
from rlhf.training.engine import Engine, make_engine
from rlhf.training.setup import set_up

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"n_layer": 4, "n_head": 4, "width": 128, "vocab_size": 2048, "context_length": 128},
    "small": {"n_layer": 6, "n_head": 6, "width": 384, "vocab_size": 2048, "context_length": 256},
}
ROWS = 16  # of the global batch
WAYS = ("none", "zero1", "zero2", "zero3")
# Bytes per second and GPU, one direction: NVLink 4 of an H100 (900 GB/s both ways), and 400 Gb/s InfiniBand NDR per GPU.
LINKS = {"NVLink 4": 450e9, "InfiniBand NDR": 50e9}
PEAK, MFU = 989e12, 0.4  # an H100's dense bfloat16 operations per second (data sheet), and the assumed share of them


def make(size: str, way: str, device: torch.device) -> Engine:
    config = Config(deepspeed=way, precision="float32")
    config.sharding.bucket_elements = 5_000_000
    torch.manual_seed(0)
    module = NextToken(GPTForCausalLM(GPTConfig(**SIZES[size])))
    return make_engine(config, module, config.sft, device, groups=[{"params": list(module.parameters()), "lr": 1e-4}])


def measure(size: str, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """{way: seconds of each step}; the ways alternate, and the first round is left out."""
    shape = SIZES[size]
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape["vocab_size"], (ROWS, shape["context_length"]), generator=drawn).to(device)
    mine, denominator = tokens[rank() :: process_count()], ROWS * (shape["context_length"] - 1)
    engines = {way: make(size, way, device) for way in WAYS}
    torch.manual_seed(0)
    alone = NextToken(GPTForCausalLM(GPTConfig(**shape))).to(device)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    seconds: dict[str, list[float]] = {name: [] for name in ("one process", *WAYS)}
    for turn in range(rounds + 1):
        for way in seconds:
            torch.distributed.barrier()
            began = time.perf_counter()
            if way != "one process":
                engines[way].backward(engines[way](mine, denominator, input_ids=mine))
                engines[way].step()
            elif rank() == 0:
                alone(tokens, denominator, input_ids=tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            torch.distributed.barrier()
            if turn:
                seconds[way].append(time.perf_counter() - began)
    return seconds


def on_paper(parameters: float = 1.3e9, tokens: int = 16 * 2048) -> list[dict[str, Any]]:
    """Communication's share of a step without overlap: bfloat16, `tokens` per GPU and step.

    Among many ranks each sends 3 times the weights' bytes in a step of ZeRO-3, else twice (Rajbhandari et al. 2020, section 7).
    """
    compute, weights = 6 * parameters * tokens / (PEAK * MFU), 2 * parameters
    return [
        {"link": name, "way": way, "compute_s": compute, "communication_s": (3 if way == "zero3" else 2) * weights / speed}
        for name, speed in LINKS.items() for way in WAYS
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args()
    if process_count() < 2:
        parser.error("start it with torchrun --nproc-per-node 2")
    device = set_up(Config(threads=1))
    seconds = measure(given.size, given.rounds, device)
    if rank():
        return
    base, figures = statistics.median(seconds["one process"]), {}
    print(f"{given.size}, {process_count()} processes on {device}, {given.rounds} steps each, {ROWS} rows per step")
    for way, times in seconds.items():
        median, least, most = statistics.median(times), min(times), max(times)
        figures[way] = {"median_s": median, "ratio": median / base, "least_s": least, "most_s": most}
        spread = f"({1000 * least:.1f} to {1000 * most:.1f})"
        print(f"{way:<12} {1000 * median:8.1f} ms  {median / base:.2f} x one process  {spread}")
    print("on paper, 1.3 B parameters in bfloat16, 32,768 tokens per GPU and step, an H100 at 40% MFU, no overlap:")
    for row in (paper := on_paper()):
        share = row["communication_s"] / (row["communication_s"] + row["compute_s"])
        beside = f"{1000 * row['communication_s']:7.1f} ms beside {1000 * row['compute_s']:.0f} ms"
        print(f"{row['link']:<15} {row['way']:<6} {beside}: {share:.1%}")
    if given.out:
        write_json(given.out, {"size": given.size, "measured": figures, "on_paper": paper})


if __name__ == "__main__":
    main()
    if disconnect():
        end(0, at_once=True)

"""The largest GPT whose PPO fits on a device: one update each at growing sizes, until memory is short.

    python scripts/bench/fit.py --device cuda --out fit.json

Shapes of Brown et al. 2020, table 2.1, once with all weights trained and once with low-rank adapters; policy, reference, critic
and reward model have one shape; bfloat16 on a GPU. The update is small, 8 episodes of 64 + 16 tokens, since
the question is whether weights, gradients and optimizer states fit. Each size runs in a separate process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import ppo

SHAPES = {  # layers, heads, width
    "gpt3-small": (12, 12, 768), "gpt3-xl": (24, 24, 2048), "gpt3-2.7b": (32, 32, 2560), "gpt3-6.7b": (32, 32, 4096),
    "gpt3-13b": (40, 40, 5120),
}  # fmt: skip
WAYS = {"all weights": (), "LoRA": ("lora.rank=16",)}
SHORT = "out of memory"


def update(size: str, way: str, device: str, threads: int) -> dict[str, Any]:
    """Figures of one update, in this process."""
    sys.path.insert(0, str(harness.HERE.parents[1]))
    if size in SHAPES:
        layers, heads, width = SHAPES[size]
        harness.SIZES[size] = {
            "n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": 128, "vocab_size": 50257,
        }  # fmt: skip
    harness.reset_peak(device)
    with tempfile.TemporaryDirectory() as home:
        ppo.make_tokenizer(Path(home), "quick")  # which tokens there are does not matter: the model has more
        spec = {
            "size": size, "reward": size, "shape": harness.SIZES[size], "episodes": 8, "prompt": 64, "new": 16, "epochs": 1,
            "micro": 2, "tokenizer": home, "vocabulary": harness.SIZES[size]["vocab_size"], "device": device,
            "threads": threads, "more": WAYS[way], "half": True,
        }  # fmt: skip
        if size == "quick":
            spec |= {"prompt": 16, "vocabulary": 300}
        started = time.monotonic()
        ppo.ours(spec, OneTurn())
        return {
            "fits": True,
            "seconds": round(time.monotonic() - started, 1),
            "peak_mb": round(harness.peak_mb(device)),
        }


class OneTurn(harness.Turns):
    """A single turn whose figures are not reported."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Any:
        return iter([None])

    def done(self, **figures: float) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="one very small shape: that it runs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        size, way = given.one
        print(json.dumps(update(size, way, given.device, given.threads)))
        return
    results: dict[str, dict[str, Any]] = {}
    for way in given.ways:
        for size in ["quick"] if given.quick else SHAPES:
            command = [sys.executable, __file__, "--one", size, way, "--device", given.device, "--out", str(given.out)]
            done = subprocess.run([*command, "--threads", str(given.threads)], capture_output=True, text=True)
            short = done.returncode != 0 and SHORT in done.stderr.lower()
            if done.returncode and not short:
                sys.exit(f"{size}, {way}: {done.stderr[-2000:]}")
            row = {"fits": False} if short else json.loads(done.stdout.splitlines()[-1])
            results.setdefault(way, {})[size] = row
            outcome = f"peak {row['peak_mb']:,} MB, {row['seconds']} s" if row["fits"] else "does not fit"
            print(f"{way:12} {size:12} {outcome}", flush=True)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            what = {
                "subject": "fit",
                "device": given.device,
                "commit": harness.commit(),
                "versions": harness.versions(),
            }
            given.out.write_text(
                json.dumps(what | {"found": results}, indent=1) + "\n"
            )  # what there is, should the limit come
            if short:
                break


if __name__ == "__main__":
    main()

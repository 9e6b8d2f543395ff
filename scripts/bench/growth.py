"""How cost grows with work: model size, context, answers per prompt, episodes, corpus and labels, a decade of each.

    python scripts/bench/growth.py --out growth.json --picture docs/img/growth.png   # one thread; --only corpus labels

Each point is a process of its own that does the work twice; the second time counts, in processor time, and memory is the peak
of resident memory beyond what it held before. `cost` is processor time per unit of work over that of the axis's first point:
1 everywhere means that time grows as the work does. A unit is the operations of the products for model size and context (6 per
weight and token, and 6 L D t of attention), a response for answers and episodes, a byte for corpus and labels.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import harness

sys.path[:0] = [str(harness.HERE.parents[1]), str(harness.HERE.parent)]
VOCABULARY, LAYERS, WIDTH, CONTEXT = 2048, 4, 128, 128  # as "tiny"
STEP_TOKENS = 2560


class Clock:
    """Stands in for `harness.Turns`: two turns, of which the last one's units, processor time and memory are kept."""

    device = "cpu"
    units = seconds = peak = 0.0

    def __iter__(self) -> Iterator[None]:
        base = harness.memory("VmRSS")
        for _ in range(2):
            self.open = True
            harness.reset_peak("cpu")
            self.restart()
            yield
            if self.open:
                self.done()
        self.peak = harness.memory("VmHWM") - base

    def restart(self) -> None:
        self.begun = time.process_time()

    def done(self, units: float = 0.0, **_: Any) -> None:
        self.open, self.units, self.seconds = False, units, time.process_time() - self.begun


def shape(width: int = WIDTH, context: int = CONTEXT) -> str:
    """The name of a size for the benchmarks."""
    harness.SIZES["growing"] = {
        "n_layer": LAYERS, "n_head": 4, "n_embd": width, "n_positions": context, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return "growing"


def train(clock: Any, width: int, context: int) -> float:
    import pretraining

    spec = {"size": shape(width, context), "device": "cpu", "batch": STEP_TOKENS // context, "steps": 1}
    pretraining.ours(spec, clock)
    weights = 12 * LAYERS * width**2 + VOCABULARY * width
    return clock.units * 6 * (weights + LAYERS * width * context)


def model_size(clock: Any, width: float, home: Path) -> float:
    return train(clock, int(width), CONTEXT)


def context(clock: Any, tokens: float, home: Path) -> float:
    return train(clock, WIDTH, int(tokens))


def answers(clock: Any, count: float, home: Path) -> float:
    import reward

    k = int(count)
    reward.ours({"size": shape(), "device": "cpu", "prompts": 4, "answers": k, "micro": 4 * k}, clock)
    return clock.units / (k * (k - 1) / 2) * k


def episodes(clock: Any, count: float, home: Path) -> float:
    import ppo

    size = shape()
    ppo.make_tokenizer(home / "tokenizer", size)
    spec = {
        "size": size, "reward": size, "shape": harness.SIZES[size], "episodes": int(count), "prompt": 32, "new": 24, "epochs": 1,
        "micro": 8, "tokenizer": str(home / "tokenizer"), "vocabulary": VOCABULARY, "device": "cpu", "threads": 1,
    }  # fmt: skip
    ppo.ours(spec, clock)
    return count


def corpus(clock: Any, megabytes: float, home: Path) -> float:
    import random

    import ppo
    from import_speed import text

    from rlhf.data.corpus import pack_corpus
    from rlhf.data.tokenizer import load_tokenizer

    ppo.make_tokenizer(home / "tokenizer", shape())
    random_ = random.Random(0)
    documents, size = [], 0
    while size < megabytes * 1e6:
        documents.append(text(random_, 50, 400))
        size += len(documents[-1])
    for _ in clock:
        pack_corpus(documents, load_tokenizer(str(home / "tokenizer")), home / "corpus", held_out_fraction=0.01, seed=0)
    return size


def labels(clock: Any, megabytes: float, home: Path) -> float:
    from import_speed import make_comparisons

    from rlhf.commands.import_data import run
    from rlhf.config.commands import ImportConfig

    path = home / "labels.jsonl"
    make_comparisons(path, megabytes, 0)
    for turn, _ in enumerate(clock):
        run(ImportConfig(path=str(path), out=str(home / f"import-{turn}")))
    return path.stat().st_size


AXES: dict[str, tuple[Callable[[Any, float, Path], float], str, list[float]]] = {  # what does it, its unit, its points
    "model size": (model_size, "width", [64, 96, 144, 224]),
    "context": (context, "tokens", [64, 160, 320, 640]),
    "answers per prompt": (answers, "K", [2, 5, 10, 20]),
    "episodes": (episodes, "per update", [8, 16, 40, 80]),
    "corpus": (corpus, "MB", [0.5, 1, 2, 5]),
    "labels": (labels, "MB of rankings", [1, 2, 5, 10]),
}


def measure(axis: str, x: float) -> dict[str, float]:
    """One point, in its own process."""
    import torch

    torch.set_num_threads(1)
    clock = Clock()
    nowhere = io.StringIO()
    with tempfile.TemporaryDirectory() as home, redirect_stdout(nowhere), redirect_stderr(nowhere):
        work = AXES[axis][0](clock, x, Path(home))
    return {"x": x, "work": work, "seconds": clock.seconds, "peak_mb": clock.peak / 1e6}


def with_cost(points: list[dict[str, float]]) -> list[dict[str, float]]:
    """Each point with its work and its processor time per unit of work over those of the first."""
    first, least = points[0]["work"], points[0]["seconds"] / points[0]["work"]
    return [one | {"growth": one["work"] / first, "cost": one["seconds"] / one["work"] / least} for one in points]


def draw(measured: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(2, 3, figsize=(9, 5), layout="constrained")
    for axes, (axis, points) in zip(plots.flat, measured.items(), strict=False):
        xs = [one["x"] for one in points]
        axes.plot(xs, [one["cost"] for one in points], "o-", color="#2a5f99", label="processor time per unit of work")
        memory = [one["peak_mb"] / points[0]["peak_mb"] for one in points]
        axes.plot(xs, memory, "s--", color="#c8641f", label="peak memory")
        axes.plot(xs, [one["growth"] for one in points], ":", color="#6f7782", label="work")
        axes.set(title=axis, xlabel=AXES[axis][1], xscale="log", yscale="log")
        axes.set(xticks=xs, xticklabels=[f"{x:g}" for x in xs])
        axes.set(ylim=(0.4, 20), yticks=[0.5, 1, 2, 5, 10, 20], yticklabels=["0.5", "1", "2", "5", "10", "20"])
        axes.minorticks_off()
        axes.grid(color="#ecece7")
    plots[0, 0].legend(fontsize=7)
    figure.supylabel("over the first point")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON; points that it has are not measured again")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(AXES), default=list(AXES))
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import rlhf.stages.ppo  # noqa: F401 (imported before the processes are forked)

    measured = json.loads(given.out.read_text(encoding="utf-8")) if given.out and given.out.exists() else {}
    for axis in given.only:
        points = measured.get(axis, [])
        _, unit, xs = AXES[axis]
        for x in xs[len(points) :]:
            with get_context("fork").Pool(1) as pool:
                points.append(pool.apply(measure, (axis, x)))
            measured[axis] = points
            if given.out:
                given.out.write_text(json.dumps(measured, indent=1), encoding="utf-8")
        print(f"\n| {axis} ({unit}) | work | processor s | cost | MB |\n|---|---|---|---|---|")
        for one in with_cost(points):
            cells = (
                f"{one['x']:g} | {one['growth']:.1f} | {one['seconds']:.2f} | {one['cost']:.2f} | {one['peak_mb']:.0f}"
            )
            print(f"| {cells} |")
    if given.picture:
        draw({axis: with_cost(points) for axis, points in measured.items()}, given.picture)


if __name__ == "__main__":
    main()

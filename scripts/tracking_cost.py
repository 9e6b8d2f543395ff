"""The cost of logging in PPO: updates with W&B (offline) and updates without tracking, alternating.

    python scripts/tracking_cost.py RUNS_DIR RUN 12 [overrides of the run]

RUN must have its stages up to the reward model; it is not changed. Prints three figures, each as a share of an update: the time
that the loop spends in the tracker, the processor time of W&B's process and threads, and the difference between the medians of
updates with and without W&B (on a busy machine the last one is noise). Use one thread: torch's other threads would count as W&B's.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("RLHF_PROGRESS", "off")


class Timed:
    """A tracker whose calls are timed."""

    def __init__(self, tracker: Any) -> None:
        self._tracker, self.seconds = tracker, 0.0

    def __getattr__(self, name: str) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = getattr(self._tracker, name)(*arguments, **options)
            self.seconds += time.perf_counter() - started
            return result

        return timed


def other_seconds() -> float:
    """Processor time of W&B's service, and of all threads of this process except the first."""
    import psutil

    process = psutil.Process()
    threads = sum(thread.user_time + thread.system_time for thread in process.threads() if thread.id != process.pid)
    return threads + sum(sum(child.cpu_times()[:2]) for child in process.children(recursive=True))


def main(runs_dir: str, name: str, count: int, overrides: list[str]) -> None:
    from rlhf.config.compose import compose_config
    from rlhf.gold.truth import make_truth
    from rlhf.recipe import ancestors
    from rlhf.runs.stage import open_stage
    from rlhf.runs.trackers import Tracker
    from rlhf.stages import ppo

    with tempfile.TemporaryDirectory() as home:
        for parent in ancestors("ppo"):
            if (Path(runs_dir) / name / parent).is_dir():
                shutil.copytree(Path(runs_dir) / name / parent, Path(home) / name / parent)
        own = [f"runs_dir={home}", f"run={name}", "ppo.eval_every=1", "ppo.samples_every=1"]
        config = compose_config([*overrides, *own])
        with open_stage(config, "ppo") as stage:
            truth = make_truth(config)
            parts = ppo.load_parts(config, stage, truth)

            def one_update(update: int, tracker: Any) -> None:
                metrics = ppo.one_update(update=update, **vars(parts))
                held_out, rows = ppo.evaluate_held_out(parts, truth)
                tracker.samples(update, rows)
                tracker.log(metrics | held_out, step=update, episodes=update, tokens=parts.state.tokens)

            config.tracking.kind = "wandb"
            wandb: Any = Timed(Tracker(replace(stage, folder=Path(home) / "on")))
            off = Tracker(replace(stage, writes=False))
            one_update(1, off)  # the first one warms up and checks the invariants
            wandb.log({"objective/kl": 0.0}, step=0)
            time.sleep(3)  # until W&B has started in its thread
            wandb.seconds, other = 0.0, other_seconds()
            spent: dict[str, list[float]] = {"on": [], "off": []}
            worked: dict[str, list[float]] = {"on": [], "off": []}
            for update in range(2, 2 + count):
                kind = "on" if update % 4 in (0, 3) else "off"  # off on on off: drift affects both equally
                started, processor = time.perf_counter(), time.thread_time()
                one_update(update, wandb if kind == "on" else off)
                spent[kind].append(time.perf_counter() - started)
                worked[kind].append(time.thread_time() - processor)
            calls = wandb.seconds / len(spent["on"])
            other = (other_seconds() - other) / len(spent["on"])
            wandb.finish()
            off.finish()
    each = statistics.median(spent["off"])
    for unit, times in (("seconds", spent), ("processor seconds of the loop", worked)):
        without, with_ = statistics.median(times["off"]), statistics.median(times["on"])
        change = f"{without:.3f} without, {with_:.3f} with ({100 * (with_ / without - 1):+.2f}%)"
        print(f"{unit} per update, medians of {len(times['on'])}: {change}")
    print(f"in the tracker's calls: {1000 * calls:.2f} ms per update ({100 * calls / each:.3f}%)")
    print(f"processor time beside the loop: {1000 * other:.2f} ms per update ({100 * other / each:.3f}%)")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: python scripts/tracking_cost.py RUNS_DIR RUN UPDATES [override …]")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])

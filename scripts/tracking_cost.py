"""What logging costs an update of PPO: the same updates with W&B (offline) and with nothing, by turns.

    python scripts/tracking_cost.py RUNS_DIR RUN 12 [overrides of the run]

RUN has everything up to its reward model; it is not changed. Three figures, each as a share of an update: the time that
the loop itself spends in the tracker, the processor time of W&B's own process and threads, and the difference between
the medians of the updates with and without it (on a busy machine the last one is noise). Use one thread: torch's own
would count as W&B's.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("RLHF_PROGRESS", "off")


class Timed:
    """A tracker whose calls are timed."""

    def __init__(self, tracker: Any) -> None:
        self._tracker, self.seconds = tracker, 0.0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._tracker, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def other_seconds() -> float:
    """Processor time of W&B's service and of this process' threads but the first."""
    import psutil

    own = psutil.Process()
    threads = sum(one.user_time + one.system_time for one in own.threads() if one.id != own.pid)
    return threads + sum(sum(child.cpu_times()[:2]) for child in own.children(recursive=True))


def main(runs_dir: str, name: str, count: int, overrides: list[str]) -> None:
    from rlhf.composing import compose_config
    from rlhf.ppo.setup import make_ppo_run
    from rlhf.recipe import ancestors
    from rlhf.runs.sources import hash_sources
    from rlhf.runs.stage import open_stage
    from rlhf.stages.ppo import one_update
    from rlhf.tracking.writers import make_tracker
    from rlhf.training.setup import set_up

    with tempfile.TemporaryDirectory() as home:
        for stage in ancestors("ppo"):
            if (Path(runs_dir) / name / stage).is_dir():
                shutil.copytree(Path(runs_dir) / name / stage, Path(home) / name / stage)
        config = compose_config(
            [*overrides, f"runs_dir={home}", f"run={name}", "ppo.eval_every=1", "ppo.samples_every=1"]
        )
        with open_stage(config, "ppo", hash_sources(config, "ppo")) as stage:
            trainer = make_ppo_run(config, stage, set_up(config))
            options: dict[str, Any] = {"run": name, "stage": "ppo", "config": {"seed": config.seed}}
            wandb = Timed(make_tracker("wandb", folder=Path(home) / "on", **options))
            off = make_tracker("silent", folder=Path(home) / "off", **options)
            one_update(trainer, 1, off)  # the first one warms up and checks the invariants
            wandb.log({"objective/kl": 0.0}, step=0)
            time.sleep(3)  # W&B starts in a thread of its own
            wandb.seconds, other = 0.0, other_seconds()
            spent: dict[str, list[float]] = {"on": [], "off": []}
            worked: dict[str, list[float]] = {"on": [], "off": []}
            for update in range(2, 2 + count):
                kind = "on" if update % 4 in (0, 3) else "off"  # off on on off: what grows over time falls on both
                started, processor = time.perf_counter(), time.thread_time()
                one_update(trainer, update, wandb if kind == "on" else off)
                spent[kind].append(time.perf_counter() - started)
                worked[kind].append(time.thread_time() - processor)
            calls = wandb.seconds / len(spent["on"])
            other = (other_seconds() - other) / len(spent["on"])
            wandb.finish()
            off.finish()
    each = statistics.median(spent["off"])
    for told, found in (("seconds", spent), ("processor seconds of the loop", worked)):
        off_, on = statistics.median(found["off"]), statistics.median(found["on"])
        print(
            f"{told} per update, medians of {len(found['on'])}: {off_:.3f} without, {on:.3f} with ({100 * (on / off_ - 1):+.2f}%)"
        )
    print(f"in the tracker's calls: {1000 * calls:.2f} ms per update ({100 * calls / each:.3f}%)")
    print(f"processor time beside the loop: {1000 * other:.2f} ms per update ({100 * other / each:.3f}%)")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: python scripts/tracking_cost.py RUNS_DIR RUN UPDATES [override …]")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])

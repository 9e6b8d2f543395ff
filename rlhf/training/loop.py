"""The training loop of all stages: resume, lines of metrics, progress, a checkpoint when due, an orderly end after a signal."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlhf.errors import UserError
from rlhf.ops.fast import adapting_threads
from rlhf.runs.checkpoints import (
    checkpoint_due,
    checkpoint_step,
    checkpoints,
    latest_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from rlhf.runs.metric_table import Sums
from rlhf.runs.progress import Progress, format_seconds
from rlhf.runs.stage import Stage
from rlhf.runs.trackers import Tracker
from rlhf.system.exits import finish_step, stop_requested
from rlhf.system.processes import gather, on_first_rank, rank
from rlhf.training.engine import Engine, NonFinite
from rlhf.training.state import put_random_state, random_state, read_state, write_state
from rlhf.training.usage import update_flops, usage_metrics


class TrainingLoop:
    """The steps of one stage; the first `done` of `total` were taken before this process started."""

    def __init__(self, stage: Stage, engine: Engine, total: int, resume: Path | None, tracker: Tracker, bar: Progress):
        self.stage, self.engine, self.ranks, self.total = stage, engine, engine.ranks, total
        self.tracker, self.bar = tracker, bar
        self.done, self.saved, self.tokens = 0, 0, 0  # tokens: seen so far, over all ranks
        self.writing = 0.0  # seconds that the last checkpoint took
        self.figure: float | None = None  # of a step, for checkpoints.keep_best, higher is better
        self.improved = False  # whether a step has to have a checkpoint, since its held-out loss is the best
        self.notes: dict[str, Any] = {}  # what else the stage's loop keeps in its checkpoints, as JSON
        self.sums = Sums()  # of this rank, since the last line of metrics
        if resume is not None:
            state, self.notes = read_state(resume)
            engine.restore(state)
            put_random_state(resume)
            self.done = self.saved = checkpoint_step(resume)
            self.tokens = self.notes.pop("tokens")
            sums = self.notes.pop("sums")
            if self.ranks.rank == 0:
                self.sums.merge(sums)
        elif self.ranks.count > 1:  # dropout differs among the ranks
            torch.manual_seed(stage.config.seed + self.ranks.rank)
        self.saved_at = self.logged_at = time.monotonic()
        self.logged = {"tokens": self.tokens, "rows": 0}
        self.rows = 0  # sequences trained on by this process's loop, over all ranks
        self.threads = adapting_threads(stage.config.threads, engine.device, self.ranks.count)

    def steps(self) -> Iterator[int]:
        """The numbers of the steps; a checkpoint after each, if due. Raises: KeyboardInterrupt after a signal, once it is saved."""
        self.bar.started = time.monotonic()  # what came before took no step
        with finish_step(self.stage.name):
            for step in range(self.done + 1, self.total + 1):
                self.figure, self.improved = None, False
                yield step
                if self.threads is not None:
                    self.threads.look()
                waited, keep = time.monotonic() - self.saved_at, self.stage.config.checkpoints
                due = self.improved or checkpoint_due(keep, step, waited, self.writing, first=self.saved == 0)
                # rank 0's clock decides for all; a signal may have reached any rank
                level = self.ranks.max(2 if stop_requested() else 1 if due and self.ranks.rank == 0 else 0)
                if level:
                    self.save(step)
                if level == 2:
                    raise KeyboardInterrupt

    def save(self, step: int) -> None:
        """Write a checkpoint. Every rank has to call it."""
        started = time.monotonic()
        notes = self.notes | {"tokens": self.tokens, "sums": self.ranks.merge(self.sums).state()}
        keep = self.stage.config.checkpoints
        keep = replace(keep, keep_best=max(keep.keep_best, int("best" in notes)))
        state, random = self.engine.state(), gather(random_state())
        if state is not None:  # on rank 0
            state["rng"] = {name: x for of_rank in random for name, x in of_rank.items()}
            write = partial(write_state, state=state, notes=notes)
            save_checkpoint(self.stage.checkpoints, step, write, keep, self.figure)
        self.stage.note_progress()
        self.saved, self.saved_at = step, time.monotonic()
        self.writing = self.saved_at - started

    def is_enough(self, step: int, loss: float, patience: int | None) -> bool:
        """Note a held-out loss; whether `patience` of them in a row were no better than the best."""
        best = self.notes.get("best")
        if patience is None:
            return False
        if best is None or loss < best["loss"]:
            self.notes["best"] = {"step": step, "loss": loss, "since": 0}
            self.figure, self.improved = -loss, True
            return False
        best["since"] += 1
        return best["since"] >= patience

    def restore_best(self) -> None:
        """Give the module the weights of the step with the best held-out loss, if losses were noted. Every rank has to call it."""
        best = self.notes.get("best")
        if best is not None and best["step"] != self.total:
            self.engine.restore(read_state(self.stage.checkpoints / f"step-{best['step']}")[0])
            kept = f"keeps step {best['step']} of {self.total}"
            self.stage.say(f"{kept}, whose held-out loss {best['loss']:.3f} is the best")

    def say_time(self, seconds: float, measured: str) -> None:
        """Print how long the steps take. seconds: of one of them, from what was `measured` here before the first."""
        left, unit = self.total - self.done, self.bar.unit
        time_left = format_seconds(left * self.ranks.max(seconds))
        self.stage.say(f"takes about {time_left} for {left:,} {unit}{'s' if left > 1 else ''}, by {measured}")

    def log_held_out(self, figures: Mapping[str, float], split: str = "dev") -> None:
        """Write and print figures of a split after training."""
        if figures:
            self.tracker.log({f"eval/{split}/{name}": value for name, value in figures.items()}, step=self.total)
            self.stage.say("held out: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))

    def log(self, step: int, **progressed: int) -> dict[str, float]:
        """Write the metrics summed up since the last line, with speed and memory, and begin new sums."""
        metrics = self.ranks.merge(self.sums).reduce()
        now = time.monotonic()
        seconds = max(1e-9, now - self.logged_at)
        tokens, rows = self.tokens - self.logged["tokens"], self.rows - self.logged["rows"]
        metrics |= {"time/tokens_per_s": tokens / seconds, "time/samples_per_s": rows / seconds}
        flops = update_flops([], [self.engine.module], tokens, tokens / max(1, rows), passes=1)
        metrics |= usage_metrics(self.stage.config, self.engine.device, flops, seconds, self.ranks.count)
        self.tracker.log(metrics, step=step, tokens=self.tokens, **progressed)
        self.sums, self.logged_at, self.logged = Sums(), now, {"tokens": self.tokens, "rows": self.rows}
        return metrics


@contextlib.contextmanager
def open_loop(stage: Stage, engine: Engine, total: int, unit: str = "step") -> Iterator[TrainingLoop]:
    """The loop of a stage, from its newest checkpoint on. Raises: UserError if a value is not finite; the batch is saved."""
    resume = newest_checkpoint(stage)
    first = checkpoint_step(resume) if resume else 0
    if resume:
        stage.say(f"resuming from {unit} {first}")
    stage.plan(total)
    with Tracker(stage, first) as tracker, Progress(total, stage.name, unit=unit, initial=first) as bar:
        try:
            yield TrainingLoop(stage, engine, total, resume, tracker, bar)
        except NonFinite as error:
            where = ""
            if error.batch:
                path = stage.folder / f"offending_batch{f'-{rank()}' if rank() else ''}.safetensors"
                kept = {name: x.detach().cpu().contiguous() for name, x in error.batch.items() if isinstance(x, Tensor)}
                save_file(kept, str(path))
                where = f", the batch is in {path}"
            stopped = f"{stage.name}: {error} not finite: stopped before the step, the last checkpoint is kept{where}"
            raise UserError(f"{stopped}: look at the data, or lower the learning rate and run again") from None


def newest_checkpoint(stage: Stage) -> Path | None:
    """The checkpoint to resume from: the newest whole one. Damaged ones are named and, like unfinished ones, removed."""
    newest = on_first_rank(lambda: latest_checkpoint(stage.checkpoints, stage.say))
    for path in checkpoints(stage.checkpoints) if stage.writes else []:
        if newest is None or checkpoint_step(path) > checkpoint_step(newest):
            remove_checkpoint(path)
    return newest

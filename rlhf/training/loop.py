"""The training loop of all stages: resume, progress, a checkpoint when due, an orderly end after a signal.

Our own loops (reward model, PPO) take their steps from `StageLoop.steps`; transformers' Trainer (pretraining, SFT) reports each
step to `StageLoop.after`. Also here: the gradient's norm, and the check that values are finite.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf.cpu.threads import adapting_threads
from rlhf.errors import UserError
from rlhf.runs.checkpoints import (
    checkpoint_due,
    checkpoint_step,
    checkpoints,
    latest_checkpoint,
    remove_checkpoint,
)
from rlhf.runs.progress import Progress, progress
from rlhf.runs.stage import Stage
from rlhf.runs.trackers import Tracker
from rlhf.system.interrupts import finish_step, stop_requested
from rlhf.system.processes import Ranks, on_first_rank, rank
from rlhf.training.setup import open_tracker


class StageLoop:
    """The steps of one stage; the first `first` of `total` were done before this process started."""

    def __init__(self, stage: Stage, ranks: Ranks, total: int, resume: Path | None, tracker: Tracker, bar: Progress):
        self.stage, self.ranks, self.total, self.resume = stage, ranks, total, resume
        self.first = checkpoint_step(resume) if resume else 0
        self.tracker, self.bar = tracker, bar
        self.saved_at = time.monotonic()
        self.threads = adapting_threads(stage.config.threads, ranks.device, ranks.count)

    def steps(self, save: Callable[[int], None]) -> Iterator[int]:
        """The numbers of the steps to take. save: writes a checkpoint of a step; every rank calls it.

        Raises: KeyboardInterrupt after a signal, once the current step has its checkpoint.
        """
        with finish_step(self.stage.name):
            for step in range(self.first + 1, self.total + 1):
                yield step
                due, stop = self.after(step)
                if due:
                    save(step)
                    self.saved()
                if stop:
                    raise KeyboardInterrupt

    def after(self, step: int) -> tuple[bool, bool]:
        """(write a checkpoint, stop), the same on every rank: due by rank 0's clock, stop if a signal reached any rank.

        A loop that stops writes a checkpoint first.
        """
        if self.threads is not None:
            self.threads.look()
        due = checkpoint_due(self.stage.config.checkpoints, step, time.monotonic() - self.saved_at)
        wish = self.ranks.max(2 if stop_requested() else 1 if due and self.ranks.rank == 0 else 0)
        return wish >= 1, wish == 2

    def saved(self) -> None:
        """Call it after a checkpoint was written."""
        self.stage.note_progress()
        self.saved_at = time.monotonic()


@contextlib.contextmanager
def open_loop(stage: Stage, ranks: Ranks, total: int, unit: str = "step") -> Iterator[StageLoop]:
    """The loop of a stage of `total` steps, from its newest checkpoint on, with its tracker and its progress bar."""
    resume = newest_checkpoint(stage)
    first = checkpoint_step(resume) if resume else 0
    if resume:
        stage.say(f"resuming from {unit} {first}")
    stage.plan(total)
    with open_tracker(stage, first) as tracker, progress(total, stage.name, unit=unit, initial=first) as bar:
        yield StageLoop(stage, ranks, total, resume, tracker, bar)


def newest_checkpoint(stage: Stage) -> Path | None:
    """The checkpoint to resume from: the newest whole one. Damaged ones are named and, like unfinished ones, removed."""
    newest = on_first_rank(lambda: latest_checkpoint(stage.checkpoints, stage.say))
    for path in checkpoints(stage.checkpoints) if stage.writes else []:
        if newest is None or checkpoint_step(path) > checkpoint_step(newest):
            remove_checkpoint(path)
    return newest


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The joint 2-norm of all gradients, on their device; 0 if there are none."""
    given = list(parameters)
    norms = [p.grad.norm() for p in given if p.grad is not None]
    return torch.stack(norms).norm() if norms else torch.zeros((), device=given[0].device if given else None)


def refuse_nonfinite(stage: Any, values: Mapping[str, Tensor | float], batch: Mapping[str, Tensor]) -> None:
    """Invariant 8: stop before the optimizer step if a value is not finite, and save the batch that caused it.

    Raises: UserError.
    """
    bad = [name for name, value in values.items() if not torch.isfinite(torch.as_tensor(value)).all()]
    if not bad:
        return
    kept = ""
    if batch:
        path = stage.folder / f"offending_batch{f'-{rank()}' if rank() else ''}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in batch.items()}, str(path))
        kept = f", the batch is in {path}: look at it"
    raise UserError(
        f"{stage.name}: {', '.join(bad)} not finite: stopped before the step, the last checkpoint is kept{kept}, or lower the "
        "learning rate and run again"
    )

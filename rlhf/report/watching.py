"""The state of a run, read from its files by another process: stages, steps, time left, figures. It only reads."""

import glob
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.recipe import ROUND_STAGES, STAGES
from rlhf.runs.folders import under_way
from rlhf.runs.progress import format_figure, format_seconds
from rlhf.runs.run_files import is_number, number, parse_line
from rlhf.system.files import read_json
from rlhf.system.terminal import printable

# The figures shown for a stage, by label.
FIGURES: dict[str, tuple[tuple[str, str], ...]] = {
    "pretrain": (("loss", "pretrain/loss"), ("bits per byte", "eval/heldout/bpb")),
    "sft": (("loss", "sft/loss"), ("held out", "eval/dev/loss")),
    "reward": (("loss", "reward/loss"), ("accuracy", "reward/accuracy"), ("held out", "eval/dev/accuracy")),
    "judge": (("loss", "reward/loss"), ("accuracy", "reward/accuracy"), ("held out", "eval/dev/accuracy")),
    "ppo": (("reward", "objective/scores"), ("KL", "objective/kl"), ("length", "rollout/response_len"),
            ("gold", "gold/total")),
    "dpo": (("loss", "dpo/loss"), ("accuracy", "dpo/accuracy"), ("held out", "eval/dev/accuracy")),
}  # fmt: skip
MARKS = {"complete": "●", "running": "◐", "stopped": "✕"}  # of stages that have begun
BLOCKS = "▁▂▃▄▅▆▇█"
# Lines over which the speed is measured.
RATE_LINES = 20


@dataclass(slots=True)
class Tail:
    """A JSON Lines file that another process appends to, read from where the last `look` ended."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    at: int = 0
    inode: int = 0

    def look(self) -> bool:
        """Read new lines; returns whether there were any. A file that was replaced or cut is read from its beginning."""
        try:
            status = self.path.stat()
        except OSError:
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):
            changed = bool(self.rows)
            self.rows, self.at = [], 0
            return changed
        if status.st_size < self.at or status.st_ino != self.inode:
            self.rows, self.at, self.inode = [], 0, status.st_ino
        if status.st_size == self.at:
            return False
        with self.path.open("rb") as file:
            file.seek(self.at)
            text = file.read()
        whole = text.rfind(b"\n") + 1  # the writer may be in the middle of a line
        self.at += whole
        self.rows += [row for line in text[:whole].splitlines() if (row := parse_line(line)) is not None]
        return whole > 0


@dataclass(slots=True)
class Watched:
    """The current state of one stage."""

    name: str
    home: Path  # runs/<run>/<stage>
    folder: Path  # where it is written now: a replacement is written next to the old stage
    tail: Tail
    title: str = ""  # its name; for a labelling round before the last with its run's name
    record: dict[str, Any] = field(default_factory=dict)
    locked: bool = False

    def follow(self, folder: Path) -> None:
        """Look at another folder from now on."""
        if folder != self.folder:
            self.folder, self.tail, self.record = folder, Tail(folder / "metrics.jsonl"), {}

    @property
    def status(self) -> str:
        if not self.record and not self.locked:
            return "waiting"
        if self.record.get("status") == "complete":
            return "complete"
        return "running" if self.locked else "stopped"

    @property
    def step(self) -> int:
        steps = [row["progress/step"] for row in self.tail.rows[-1:] if is_number(row.get("progress/step"))]
        return int(steps[-1]) if steps else 0

    @property
    def total(self) -> int | None:
        """The stage's number of steps, from its record or its configuration; None if it depends on the data."""
        recorded = self.record.get("steps")
        if isinstance(recorded, int):
            return recorded
        keys = {"ppo": ("episodes", "episodes_per_update"), "pretrain": ("tokens", "global_batch_tokens")}
        if self.name not in keys:
            return None
        whole, per_step = (number(self.record, "config", self.name, key) for key in keys[self.name])
        return int(whole // per_step) if whole is not None and per_step is not None and per_step > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at the speed of the last lines."""
        last = [row for row in self.tail.rows if is_number(row.get("time/elapsed_s"))][-RATE_LINES:]
        if self.total is None or len(last) < 2:
            return None
        steps = last[-1]["progress/step"] - last[0]["progress/step"]
        seconds = last[-1]["time/elapsed_s"] - last[0]["time/elapsed_s"]
        return (self.total - self.step) * seconds / steps if steps > 0 and seconds > 0 else None

    def values(self, metric: str) -> list[float]:
        return [row[metric] for row in self.tail.rows if is_number(row.get(metric))]

    def figures(self) -> Iterator[tuple[str, list[float]]]:
        """(label, values over time) of the figures to show."""
        for label, metric in FIGURES.get(self.name, ()):
            if values := self.values(metric):
                yield label, values


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a stage; None if unknown.

    Taking the lock to find out could keep a stage from starting, so the kernel's list of locks is read.
    """
    try:
        inode = path.stat().st_ino
    except OSError:
        return False
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return any(line.split()[5].rsplit(":", 1)[-1] == str(inode) for line in lines if len(line.split()) > 5)


def watched(folder: Path, name: str, title: str) -> Watched:
    home = folder / name
    return Watched(name, home, home, Tail(home / "metrics.jsonl"), title)


class Watch:
    """A run that is polled, with the labelling rounds that the pipeline runs before the last one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shown = (row.name for row in STAGES.values() if not row.optional or (folder / row.name).is_dir())
        self.stages = [watched(folder, name, name) for name in shown]
        self.rounds: set[Path] = set()

    def _find_rounds(self) -> None:
        """Insert the stages of newly started rounds before this run's labelling, in order."""
        numbers = {
            p: p.name.rpartition("-")[2] for p in self.folder.parent.glob(f"{glob.escape(self.folder.name)}-round-*")
        }
        started = {folder: int(number) for folder, number in numbers.items() if number.isdigit()}
        for folder in sorted(started.keys() - self.rounds, key=lambda folder: started[folder]):
            at = next(i for i, stage in enumerate(self.stages) if stage.title == "label")
            self.stages[at:at] = [watched(folder, name, f"{folder.name}/{name}") for name in ROUND_STAGES]
        self.rounds |= started.keys()

    def look(self) -> bool:
        """Read new lines; returns whether there were any."""
        changed = False
        self._find_rounds()
        for stage in self.stages:
            stage.follow(under_way(stage.home))
            record = read_json(stage.folder / "stage.json")
            held = is_locked(stage.folder / ".lock")
            # If locks are unknown, an incomplete stage counts as running while its files change.
            locked = held if held is not None else record.get("status") == "running" and self._fresh(stage)
            changed |= (record.get("status"), locked) != (stage.record.get("status"), stage.locked)
            stage.record, stage.locked = record or stage.record, locked
            changed |= stage.tail.look()
        return changed

    def _fresh(self, stage: Watched) -> bool:
        times = [p.stat().st_mtime for p in (stage.tail.path, stage.folder / "stage.json") if p.exists()]
        return bool(times) and time.time() - max(times) < 120

    @property
    def begun(self) -> list[Watched]:
        return [stage for stage in self.stages if stage.status != "waiting"]

    @property
    def current(self) -> Watched | None:
        """The running stage, else the one whose files changed last."""
        stages = [stage for stage in self.begun if stage.status == "running"] or self.begun
        return stages[-1] if stages else None

    @property
    def ended(self) -> bool:
        """Whether the pipeline wrote its table after the last stage."""
        table = self.folder / "pipeline.json"
        records = [stage.folder / "stage.json" for stage in self.begun]
        times = [os.path.getmtime(path) for path in records if path.exists()]
        return table.exists() and bool(times) and table.stat().st_mtime >= max(times) and not self.running

    @property
    def running(self) -> bool:
        return any(stage.status == "running" for stage in self.stages)


def line(stage: Watched) -> str:
    """One plain line: the state of a stage."""
    unit = "update" if stage.name == "ppo" else "step"
    parts = [f"{stage.title}: {stage.status}"]
    if stage.step:
        of = f"/{stage.total:,} ({100 * stage.step / stage.total:.0f}%)" if stage.total else ""
        parts.append(f"{unit} {stage.step:,}{of}")
    if stage.status == "running" and stage.seconds_left is not None:
        parts.append(f"{format_seconds(stage.seconds_left)} left")
    if stage.status == "complete" and is_number(stage.record.get("seconds")):
        parts.append(format_seconds(stage.record["seconds"]))
    parts += [f"{label} {format_figure(values[-1])}" for label, values in stage.figures()]
    return "  ".join(parts)


def screen(watch: Watch, width: int) -> list[str]:
    """The live view: a line per stage, and below the current one a bar and a small curve for each figure."""
    stage = watch.current
    if stage is None:
        return [f"{watch.folder.name}  nothing has started"]
    stages = " → ".join(f"{MARKS[one.status]} {one.title}" for one in watch.begun)
    lines = [f"{watch.folder.name}  {stages}", line(stage)]
    if stage.total:
        room = max(10, min(60, width - 4))
        done = round(room * min(1.0, stage.step / stage.total))
        lines.append("━" * done + "─" * (room - done))
    for label, values in stage.figures():
        if len(values) > 1:
            ends = f"  {format_figure(values[0])} → {format_figure(values[-1])}"
            lines.append(f"{label:<10}{sparkline(values, max(10, min(48, width - 12 - len(ends))))}{ends}")
    return [printable(text)[:width] for text in lines]


def sparkline(values: list[float], width: int) -> str:
    """A curve of at most `width` characters, each the mean of a stretch."""
    width = min(width, len(values))
    means = []
    for i in range(width):
        part = values[i * len(values) // width : (i + 1) * len(values) // width]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int(len(BLOCKS) * (mean - low) / span))] for mean in means)

"""`rlhf watch run=x`: follows a run from another terminal until it ends. It only reads the run's files."""

import functools
import glob
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.recipe import ROUND_STAGES, STAGES
from rlhf.runs.folders import run_folder, under_way
from rlhf.runs.metric_table import CHARTS
from rlhf.runs.progress import format_figure, format_seconds
from rlhf.runs.run_files import is_figure, read_jsonl
from rlhf.system.files import read_json
from rlhf.system.terminal import printable, say, write

# Seconds between two plain lines, and seconds without a lock after which a run counts as ended: a pipeline takes some
# seconds from one stage to the next.
PLAIN_INTERVAL, PATIENCE = 10.0, 30.0
RATE_LINES = 20  # over which the speed is measured
MARKS = {"complete": "●", "running": "◐", "stopped": "✕"}
BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class StageState:
    """A stage that has begun, as its files show it. As text: its state in one line."""

    folder: Path
    title: str  # its name; for a labelling round before the last with its run's name
    status: str
    record: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def step(self) -> int:
        return int(self.rows[-1]["progress/step"]) if self.rows else 0

    @property
    def curves(self) -> list[tuple[str, list[float]]]:
        """(label, values over time): the first and a held-out curve of each chart that has a label for `rlhf watch`."""
        logged, curves = dict.fromkeys(name for row in self.rows for name in row), []
        for chart in CHARTS.get(self.title.rpartition("/")[2], ()):
            pairs = chart.expand(logged) if chart.watch else []
            for i, (metric, word) in enumerate([p for p in pairs if p is pairs[0] or p[0].startswith("eval/")][:2]):
                if values := [row[metric] for row in self.rows if is_figure(row.get(metric))]:
                    curves.append((f"{chart.watch} {word}" if i else chart.watch, values))
        return curves

    def __str__(self) -> str:
        parts, total = [f"{self.title}: {self.status}"], self.record.get("steps")
        if self.step:
            of = f"/{total:,} ({100 * self.step / total:.0f}%)" if total else ""
            parts.append(f"{'update' if self.title.endswith('ppo') else 'step'} {self.step:,}{of}")
        if self.status == "running" and total and self.rows:
            last, first = self.rows[-1], self.rows[-RATE_LINES:][0]
            steps, seconds = (last.get(x, 0) - first.get(x, 0) for x in ("progress/step", "time/elapsed_s"))
            parts += [f"{format_seconds((total - self.step) * seconds / steps)} left"] if steps > 0 else []
        if self.status == "complete" and is_figure(self.record.get("seconds")):
            parts.append(format_seconds(self.record["seconds"]))
        return "  ".join([*parts, *(f"{label} {format_figure(values[-1])}" for label, values in self.curves)])


def look(run: Path) -> list[StageState]:
    """The stages that have begun, in order, with those of earlier labelling rounds before this run's labelling."""
    homes, at, stages = [(run / name, name) for name in STAGES], list(STAGES).index("label"), []
    rounds = [p for p in run.parent.glob(f"{glob.escape(run.name)}-round-*") if p.name.rpartition("-")[2].isdigit()]
    for folder in sorted(rounds, key=lambda p: -int(p.name.rpartition("-")[2])):
        homes[at:at] = [(folder / name, f"{folder.name}/{name}") for name in ROUND_STAGES]
    for home, title in homes:
        folder = under_way(home)
        record, locked = read_json(folder / "stage.json"), is_locked(folder / ".lock")
        if record or locked:
            status = "complete" if record.get("status") == "complete" else "running" if locked else "stopped"
            path = folder / "metrics.jsonl"
            rows = read_steps(path, path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else []
            stages.append(StageState(folder, title, status, record, rows))
    return stages


@functools.lru_cache(maxsize=64)
def read_steps(path: Path, modified: int, size: int) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that have a step; read again when the file has changed."""
    return [row for row in read_jsonl(path) if is_figure(row.get("progress/step"))]


def is_locked(path: Path) -> bool:
    """Whether a process holds a stage's lock, by the kernel's list: taking the lock could keep a stage from starting."""
    kernel = Path("/proc/locks")
    if not path.exists() or not kernel.exists():  # without a list, a lock file that exists counts
        return path.exists()
    return f":{path.stat().st_ino} " in kernel.read_text(encoding="ascii")


def draw_screen(run: Path, stages: list[StageState], width: int) -> list[str]:
    """The live view: the stages, and of the current one its state, a bar and a small curve per figure."""
    if not stages:
        return [f"{run.name}  nothing has started"[:width]]
    stage = next((one for one in reversed(stages) if one.status == "running"), stages[-1])
    lines = [f"{run.name}  {' → '.join(f'{MARKS[one.status]} {one.title}' for one in stages)}", str(stage)]
    if total := stage.record.get("steps"):
        room = max(10, min(60, width - 4))
        done = round(room * min(1.0, stage.step / total))
        lines.append("━" * done + "─" * (room - done))
    for label, values in stage.curves:
        ends = f"  {format_figure(values[0])} → {format_figure(values[-1])}"
        if len(values) > 1:
            lines.append(f"{label:<15} {sparkline(values, max(10, min(48, width - 17 - len(ends))))}{ends}")
    return [printable(text)[:width] for text in lines]


def sparkline(values: list[float], width: int) -> str:
    """A curve of at most `width` characters, each the mean of a stretch."""
    width = min(width, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means), max(means) - min(means) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * (mean - low) / span))] for mean in means)


def run(config: Config) -> None:
    """Show the state of the run until it ends. Raises: UserError if there is no such run, or if it stopped."""
    folder = run_folder(config)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run: check run=… and runs_dir=…")
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    try:
        write("\x1b[?25l" if live else "")  # no cursor
        follow(folder, config.watch.every_seconds, config.watch.wait, sys.stdout, live)
    except KeyboardInterrupt:
        say()
    finally:
        write("\x1b[?25h" if live else "")


def follow(run: Path, every: float, wait: bool, out: TextIO, live: bool, patience: float = PATIENCE) -> None:
    """Redraws a small screen, or prints a line when a stage begins or ends and every PLAIN_INTERVAL seconds.

    Raises: UserError if the run is incomplete and no process has worked on it for `patience` seconds.
    """
    printed, printed_at, height, changed_at, seen = dict[str, tuple[str, str]](), 0.0, 0, 0.0, None
    while True:
        stages, now = look(run), time.monotonic()
        shown = {stage.title: (stage.status, str(stage)) for stage in stages}
        if live:
            lines = draw_screen(run, stages, max(20, shutil.get_terminal_size().columns))
            up = f"\x1b[{height}A" if height else ""
            write(up + "".join(f"\x1b[2K{text}\n" for text in lines) + "\x1b[0J", out)
            height = len(lines)
        for title, (status, text) in {} if live else shown.items():
            before = printed.get(title, ("", ""))
            if status != before[0] or (text != before[1] and now - printed_at >= PLAIN_INTERVAL):
                say(text, out)
                printed[title], printed_at = (status, text), now
        running = any(stage.status == "running" for stage in stages)
        changed_at, seen = now if running or shown != seen else changed_at, shown
        times = [path.stat().st_mtime for one in stages if (path := one.folder / "stage.json").exists()]
        table = run / "pipeline.json"  # written after the last stage
        ended = bool(times) and table.exists() and table.stat().st_mtime >= max(times) and not running
        if not wait or ended or now - changed_at >= patience:
            break
        time.sleep(max(0.05, every))
    if wait and (stopped := [stage for stage in stages if stage.status == "stopped"]):
        at = f" at step {stopped[-1].step:,}" if stopped[-1].step else ""
        remedy = "and no process works on it: run the same command again, it resumes"
        raise UserError(f"{stopped[-1].folder}: {stopped[-1].title} stopped{at} {remedy}")

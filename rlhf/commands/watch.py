"""`rlhf watch run=x`: follows a run from another terminal until it ends. It only reads the run's files."""

import glob
import sys
import time
from pathlib import Path
from typing import NamedTuple, TextIO

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.recipe import ROUND_STAGES, STAGES
from rlhf.runs.folders import ROUND, existing_run, under_way
from rlhf.runs.metric_table import CHARTS
from rlhf.runs.progress import format_count, format_figure, format_seconds
from rlhf.runs.run_files import StageFiles, number_at, read_stage_files
from rlhf.system.files import is_locked
from rlhf.system.terminal import say

# Seconds between two lines, and seconds without a lock after which a run counts as ended: a pipeline takes some
# seconds from one stage to the next.
INTERVAL, PATIENCE = 10.0, 30.0
RATE_POINTS = 20  # over which the speed is measured


class StageState(NamedTuple):
    """A stage that has begun. As text: its state in one line."""

    title: str  # its name; for a labelling round before the last with its run's name
    status: str
    folder: Path
    files: StageFiles

    def __str__(self) -> str:
        """With the newest values of each chart that has a label for `rlhf watch`: of its first curve and of a held-out one."""
        parts, step = [f"{self.title}: {self.status}"], int(self.files.last_step)
        total = int(number_at(self.files.record, "steps") or 0) or None
        if step:
            parts.append(format_count("update" if self.title.endswith("ppo") else "step", step, total))
        if self.status == "running" and total and "time/elapsed_s" in self.files.points:
            steps, seconds = (values[-1] - values[-RATE_POINTS:][0] for values in self.files.points["time/elapsed_s"])
            parts += [f"{format_seconds((total - step) * seconds / steps)} left"] if steps > 0 else []
        if self.status == "complete" and (taken := number_at(self.files.record, "seconds")) is not None:
            parts.append(format_seconds(taken))
        for chart in (chart for chart in CHARTS.get(self.title.rpartition("/")[2], ()) if chart.watch):
            for i, (metric, word) in enumerate(chart.expand(self.files.points)[:2]):
                if i == 0 or metric.startswith("eval/"):
                    label = chart.watch if i == 0 else f"{chart.watch} {word}"
                    parts.append(f"{label} {format_figure(self.files.points[metric][1][-1])}")
        return "  ".join(parts)


def look(run: Path) -> list[StageState]:
    """The stages that have begun, in order, with those of earlier labelling rounds before this run's labelling."""
    titles, stages = list(STAGES), []
    names = [path.name for path in run.parent.glob(f"{glob.escape(run.name)}-round-*") if ROUND.search(path.name)]
    names.sort(key=lambda name: int(name.rpartition("-")[2]))
    titles[titles.index("label") : titles.index("label")] = [f"{name}/{s}" for name in names for s in ROUND_STAGES]
    for title in titles:
        place = (run.parent if "/" in title else run) / title
        folder, locked = under_way(place), is_locked(place)
        files = read_stage_files(folder)
        if files.record or locked:
            status = files.status if files.status == "complete" else "running" if locked else "stopped"
            stages.append(StageState(title, status, folder, files))
    return stages


def run(config: Config) -> None:
    folder = existing_run(config)
    try:
        follow(folder, config.watch.every_seconds, config.watch.wait, sys.stdout)
    except KeyboardInterrupt:
        say()


def follow(run: Path, every: float, wait: bool, out: TextIO, patience: float = PATIENCE) -> None:
    """Prints a line when a stage begins or ends, and every INTERVAL seconds if it has changed. patience: seconds without a process."""
    printed, printed_at, changed_at, seen = dict[str, str](), 0.0, 0.0, None
    while True:
        stages, now = look(run), time.monotonic()
        for stage in stages:
            before, text = printed.get(stage.title, ""), str(stage)
            begun_or_ended = not before.startswith(f"{stage.title}: {stage.status}")
            if begun_or_ended or (text != before and now - printed_at >= INTERVAL):
                say(text, out)
                printed[stage.title], printed_at = text, now
        running, shown = any(stage.status == "running" for stage in stages), [str(stage) for stage in stages]
        changed_at, seen = now if running or shown != seen else changed_at, shown
        times = [path.stat().st_mtime for one in stages if (path := one.folder / "stage.json").exists()]
        table = run / "pipeline.json"  # written after the last stage
        ended = bool(times) and table.exists() and table.stat().st_mtime >= max(times) and not running
        if not wait or ended or now - changed_at >= patience:
            break
        time.sleep(max(0.05, every))
    if stopped := [stage for stage in stages if stage.status == "stopped"]:
        step = stopped[-1].files.last_step
        where = f"{stopped[-1].folder}: {stopped[-1].title} stopped{f' at step {step:,}' if step else ''}"
        raise UserError(f"{where} and no process works on it: run the same command again, it resumes")

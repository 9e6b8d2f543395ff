"""Writes a stage's metrics and samples: JSON Lines in its folder, and optionally W&B or TensorBoard.

The files are the record: the report, the tests and a resume read them. W&B and TensorBoard show the same numbers from a
thread of their own, and may fail at any time without affecting training. Make one tracker per stage, on the main process only,
and one of kind "silent" on every other process.
"""

import importlib.util
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TextIO, get_args

from rlhf.errors import UserError
from rlhf.runs.metric_table import CHARTS, check_names, metric_pattern
from rlhf.runs.run_files import encode_line, truncate_jsonl

logger = logging.getLogger(__name__)

TrackerKind = Literal["wandb", "tensorboard", "jsonl", "off", "silent"]
SampleRows = list[dict[str, Any]]
# Seconds that finishing W&B may take in addition to W&B's own limits, and that closing TensorBoard may take.
FINISH_MARGIN, TENSORBOARD_TIMEOUT = 5.0, 60.0


class Background:
    """Calls a sink's methods in another thread, in order, so that no slow or broken service delays training.

    A sink has log(row, step), samples(rows, step), table(name, columns, rows), summary(values) and finish(failed). `start` makes
    it in the thread, since starting may hang too. A method that fails is not called again, apart from the others: online, a table
    needs responses from the service and a number does not. Only the first failure is reported.
    """

    def __init__(self, name: str, start: Callable[[], Any], finish_timeout: float) -> None:
        self._name, self._finish_timeout = name, finish_timeout
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._reported = False
        self._thread = threading.Thread(target=self._work, args=(start,), name=f"tracking {name}", daemon=True)
        self._thread.start()

    def _work(self, start: Callable[[], Any]) -> None:
        sink, failed = None, set[str]()
        doing: str = "start"
        arguments: tuple[Any, ...] = ()
        while doing != "finish" and "start" not in failed:
            try:
                sink = start() if sink is None else sink
                doing, arguments = self._queue.get()
                if doing not in failed:
                    getattr(sink, doing)(*arguments)
            except Exception as error:
                failed.add(doing)
                self._warn(f"could not {doing} ({type(error).__name__}: {' '.join(str(error).split())[:300]})")

    def _warn(self, what: str) -> None:
        if not self._reported:
            logger.warning(
                "%s %s: continuing without it, metrics.jsonl and samples.jsonl have everything", self._name, what
            )
        self._reported = True

    def call(self, name: str, *arguments: Any) -> None:
        if self._thread.is_alive():
            self._queue.put((name, arguments))

    def finish(self, failed: bool) -> None:
        """Waits until everything is written, but at most `finish_timeout` seconds."""
        self.call("finish", failed)
        self._thread.join(self._finish_timeout)
        if self._thread.is_alive():
            self._warn(f"did not finish in {self._finish_timeout:.0f} s")


class Tracker:
    """Writes one stage's metrics and samples. A context manager; made by `make_tracker`."""

    def __init__(
        self,
        folder: Path | None,
        resume_step: int,
        view: Callable[[], Background] | None = None,
        with_samples: bool = True,
    ) -> None:
        """view: starts the service, after the files are open. with_samples: false keeps no generated text."""
        self._folder, self._with_samples, self._resume_step = folder, with_samples, resume_step
        self._warned: set[str] = set()
        self._files: dict[str, TextIO] = {}
        self._started = time.monotonic()
        self._axes: dict[str, float] = {}  # of the last line: another one of its step has the same
        # What the files have of the step to resume from: a stage killed after its checkpoint logs some of it again.
        self._kept, self._kept_samples = set[str](), set[str]()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._open(folder / "metrics.jsonl", folder / "samples.jsonl")
        self._view = view() if view is not None else None

    def _open(self, metrics: Path, samples: Path) -> None:
        if self._resume_step == 0:
            metrics.unlink(missing_ok=True)
            samples.unlink(missing_ok=True)
        else:
            lines = truncate_jsonl(metrics, "progress/step", self._resume_step)
            self._started -= float(lines[-1].get("time/elapsed_s") or 0.0) if lines else 0.0  # the clock continues
            for row in lines:
                if row["progress/step"] == self._resume_step:
                    self._kept |= row.keys()
                    self._axes |= {name: row[name] for name in row if name.startswith("progress/")}
            rows = truncate_jsonl(samples, "step", self._resume_step)
            self._kept_samples = {str(row.get("id")) for row in rows if row["step"] == self._resume_step}
        self._write("metrics.jsonl", [])

    def _write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._folder is None:
            return
        if name not in self._files:
            self._files[name] = (self._folder / name).open("a", encoding="utf-8", errors="backslashreplace")
        self._files[name].writelines(encode_line(row) for row in rows)
        self._files[name].flush()

    def _show(self, call: str, *arguments: Any) -> None:
        if self._view is not None:
            self._view.call(call, *arguments)

    def log(
        self, metrics: Mapping[str, float], *, step: int, episodes: int | None = None, tokens: int | None = None
    ) -> None:
        """Writes one line. Several lines may share a step; log a step before its checkpoint is saved.

        Values are numbers or one-element tensors. `time/elapsed_s` is added, and `objective/sqrt_kl` to `objective/kl`. A value
        that is not finite is written as null, with one warning per name.
        Raises: ValueError if the table of metrics lacks a name.
        """
        check_names(metrics)
        values = {name: float(value) for name, value in metrics.items()}
        if (kl := values.get("objective/kl")) is not None:
            values["objective/sqrt_kl"] = math.sqrt(kl) if kl > 0 else 0.0 * kl
        if step == self._resume_step:
            values = {name: value for name, value in values.items() if name not in self._kept}
            if self._kept and not values:
                return
        axes = {"progress/step": step, "progress/episodes": episodes, "progress/tokens": tokens}
        before = self._axes if self._axes.get("progress/step") == step else {}
        self._axes = before | {name: int(value) for name, value in axes.items() if value is not None}
        row = self._axes | {"time/elapsed_s": round(time.monotonic() - self._started, 3)} | values
        shown = {name: value for name, value in row.items() if math.isfinite(value)}
        for name in row.keys() - shown.keys() - self._warned:
            self._warned.add(name)
            logger.warning("%s is %s: written as null (only one warning per name)", name, row[name])
        self._write("metrics.jsonl", [{name: shown.get(name) for name in row}])
        self._show("log", shown, step)

    def samples(self, step: int, rows: SampleRows) -> None:
        """Writes generated text, one row per response: the table that grows while the policy changes.

        Give the same held-out prompts each time, by `id`. Keys: id, prompt, response; score; kl, nats of the whole
        response; length, response tokens; parts, {name: number} that the score is made of; gold, the judge's own
        parts; tokens and kl_tokens, lists of the response's tokens as text and of logp - logp_ref for each, which
        the report shades. All except the first three may be missing.
        """
        if step == self._resume_step:
            rows = [row for row in rows if str(row["id"]) not in self._kept_samples]
        full = [finite({"step": int(step), "score": None, "kl": None} | row) for row in rows]
        if self._with_samples:
            self._write("samples.jsonl", full)
        self._show("samples", full, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Shows a small table in the view; on disk it belongs to the stage's own results."""
        self._show("table", name, columns, rows)

    def summary(self, values: Mapping[str, float]) -> None:
        """Shows the stage's final numbers in the view; on disk they belong to stage.json, which the stage writes.

        Raises: ValueError if the table of metrics lacks a name.
        """
        check_names(values)
        self._show("summary", {name: float(value) for name, value in values.items()})

    def finish(self, failed: bool = False) -> None:
        """Closes everything; a second call does nothing."""
        for file in self._files.values():
            file.close()
        view, self._folder, self._view = self._view, None, None
        if view is not None:
            view.finish(failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.finish(failed=kind is not None)


def finite(value: Any) -> Any:
    """A value of JSON with null for every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_tracker(
    kind: TrackerKind,
    *,
    folder: Path,
    run: str,
    stage: str,
    config: dict[str, Any],
    resume_step: int = 0,
    project: str = "rlhf",
    labels: Mapping[str, Any] | None = None,
) -> Tracker:
    """Opens the records of one stage.

    folder: of the stage; metrics.jsonl, samples.jsonl and wandb/ or tensorboard/ are written to it. "off" writes
        metrics.jsonl alone, "silent" nothing.
    resume_step: the step of the checkpoint from which training continues. Lines after it are dropped, since
        they will be written again; 0 empties the files.
    labels: arguments of `wandb.init` in place of the name and the group that the run gives.
    W&B is offline unless WANDB_API_KEY is set or WANDB_MODE says otherwise, groups the stages of a run, and
    keeps its run id over a resume. Its failures give one warning and stop nothing.
    Raises: UserError for an unknown kind, and for tensorboard if the package is missing.
    """
    if kind not in get_args(TrackerKind):
        raise UserError(f"tracking: got {kind!r}, want wandb, tensorboard, jsonl or off: set tracking to one of them")
    if kind == "silent":
        return Tracker(None, 0)
    if kind == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        missing = "the package tensorboard is not installed"
        raise UserError(f"tracking=tensorboard: {missing}: run pip install tensorboard, or set tracking=jsonl")

    def view() -> Background:
        if kind == "tensorboard":
            start = lambda: Tensorboard(folder, stage, config, resume_step)  # noqa: E731
            return Background("TensorBoard", start, TENSORBOARD_TIMEOUT)
        from rlhf.runs import wandb_run

        return Background(
            "Weights & Biases",
            lambda: wandb_run.WandbRun(folder, run, stage, config, project, labels or {}),
            # a stage may end before W&B has started, so the wait covers both
            wandb_run.init_timeout() + wandb_run.finish_timeout() + FINISH_MARGIN,
        )

    return Tracker(folder, resume_step, view if kind in ("wandb", "tensorboard") else None, with_samples=kind != "off")


def tracking_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's record as the configuration of its run: lineage at the top, then every setting by its own key."""
    lineage = {key: record.get(key) for key in ("stage", "run", "seed", "parents", "data", "versions")}
    settings = {key: value for key, value in (record.get("config") or {}).items() if key not in lineage}
    return {**lineage, "git": record.get("git") or {}, **settings}


class Tensorboard:
    """Event files under folder/tensorboard. A resumed stage makes TensorBoard drop the steps that are written again."""

    def __init__(self, folder: Path, stage: str, config: Mapping[str, Any], resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        home = folder / "tensorboard"
        if resume_step == 0:
            for old in home.glob("events.out.tfevents.*"):
                old.unlink()
        self._writer: Any = SummaryWriter(str(home), purge_step=resume_step + 1 if resume_step else None)
        charts = {chart.title: ["Multiline", [metric_pattern(chart.metrics)]] for chart in CHARTS.get(stage, ())}
        if charts:
            self._writer.add_custom_scalars({stage: charts})
        self._text("config", [f"{key}: {value}" for key, value in config.items() if not isinstance(value, Mapping)])

    def _text(self, name: str, lines: Sequence[str], step: int = 0) -> None:
        """A block of code in Markdown, which shows model output unchanged."""
        self._writer.add_text(name, "\n".join(f"    {line}" for text in lines for line in text.splitlines()), step)

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            if name != "progress/step":
                self._writer.add_scalar(name, value, step)

    def samples(self, rows: SampleRows, step: int) -> None:
        for number, row in enumerate(rows):
            texts = [f"{key}:\n{row.get(key)}" for key in ("prompt", "response", "score", "kl")]
            self._text(f"samples/{number}", texts, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._text(name, ["\t".join(map(str, row)) for row in (columns, *rows)])

    def summary(self, values: Mapping[str, float]) -> None:
        self._text("summary", [f"{name}\t{value:.6g}" for name, value in values.items()])

    def finish(self, failed: bool) -> None:
        self._writer.close()

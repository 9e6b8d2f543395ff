"""Writes a stage's metrics and samples: JSON Lines in its folder, and optionally W&B or TensorBoard.

The files are the record: the report, the tests and a resume read them. W&B and TensorBoard show the same numbers and may
fail at any time without affecting training. `metrics.py` defines the metrics. Make one tracker per stage, on the main
process only, and one of kind "silent" on every other process.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TextIO, cast, get_args

from rlhf.errors import UserError
from rlhf.runs.background import Background, Sink
from rlhf.runs.jsonl import encode_line, read_jsonl, truncate_jsonl
from rlhf.runs.metrics import check_names, derive

__all__ = ["SAMPLE_KEYS", "Kind", "Tracker", "make_tracker", "read_jsonl", "truncate_jsonl"]

logger = logging.getLogger(__name__)

Kind = Literal["wandb", "tensorboard", "jsonl", "off", "silent"]
SAMPLE_KEYS = ("id", "prompt", "response")
# Seconds that finishing a view may take in addition to the view's own limit.
FINISH_MARGIN = 5.0


class Tracker:
    """Writes one stage's metrics and samples. A context manager; made by `make_tracker`."""

    def __init__(
        self, folder: Path | None, resume_step: int, view: Callable[[], Sink] | None = None, with_samples: bool = True
    ) -> None:
        """view: makes the sink, after the files are open. with_samples: false keeps no generated text."""
        self._with_samples = with_samples
        self._warned: set[str] = set()
        self._metrics: TextIO | None = None
        self._samples: TextIO | None = None
        self._samples_path = Path("samples.jsonl")
        self._started = time.monotonic()
        self._axes: dict[str, float] = {}
        self._resume_step, self._kept, self._kept_samples = resume_step, set[str](), set[str]()
        if folder is not None:
            self._open(folder)
        self._view = view() if view is not None else None

    def _open(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        metrics, self._samples_path = folder / "metrics.jsonl", folder / "samples.jsonl"
        if self._resume_step > 0:
            newest = truncate_jsonl(metrics, "progress/step", self._resume_step)
            truncate_jsonl(self._samples_path, "step", self._resume_step)
            self._remember(metrics, self._samples_path)
            # The clock continues from the end of the kept lines.
            self._started -= float(newest.get("time/elapsed_s") or 0.0)
        else:
            self._samples_path.unlink(missing_ok=True)
            metrics.unlink(missing_ok=True)
        self._metrics = metrics.open("a", encoding="utf-8", errors="backslashreplace")

    def _remember(self, metrics: Path, samples: Path) -> None:
        """The names in the kept lines of the step from which a stage resumes: written after that step's checkpoint."""
        for row in read_jsonl(metrics):
            if row["progress/step"] == self._resume_step:
                self._kept |= row.keys()
                self._axes |= {name: row[name] for name in row if name.startswith("progress/")}
        self._kept_samples = {str(row.get("id")) for row in read_jsonl(samples) if row["step"] == self._resume_step}

    def log(
        self, metrics: Mapping[str, float], *, step: int, episodes: int | None = None, tokens: int | None = None
    ) -> None:
        """Writes one line. Several lines may share a step; log a step before its checkpoint is saved.

        For the step from which a stage resumes, names that the file already has are skipped: a stage that was killed after
        that step's checkpoint logs them again.

        Values are numbers or one-element tensors. `time/elapsed_s` is added. A value that is not finite is
        written as null, with one warning per name, so that the file stays valid JSON.
        Raises: ValueError if the table of metrics lacks a name.
        """
        check_names(metrics)
        if step == self._resume_step and self._kept:
            metrics = {name: value for name, value in metrics.items() if name not in self._kept}
            if not metrics:
                return
        row: dict[str, float | None] = {"progress/step": int(step)}
        # A second line of a step, such as an evaluation, has the same value on every axis.
        row |= self._axes if self._axes.get("progress/step") == step else {}
        if episodes is not None:
            row["progress/episodes"] = int(episodes)
        if tokens is not None:
            row["progress/tokens"] = int(tokens)
        self._axes = cast("dict[str, float]", dict(row))
        metrics = derive(metrics)
        row["time/elapsed_s"] = round(time.monotonic() - self._started, 3)
        row |= {name: self._finite(name, float(value)) for name, value in metrics.items()}
        if self._metrics is not None:
            self._metrics.write(encode_line(row))
            self._metrics.flush()
        if self._view is not None:
            self._view.log({name: value for name, value in row.items() if value is not None}, step)

    def _finite(self, name: str, value: float) -> float | None:
        if math.isfinite(value):
            return value
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("%s is %s: written as null (only one warning per name)", name, value)
        return None

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Writes generated text, one row per response: the table that grows while the policy changes.

        Give the same held-out prompts each time, by `id`. Keys: id, prompt, response; score; kl, nats of the whole
        response; length, response tokens; parts, {name: number} that the score is made of; gold, the judge's own
        parts; tokens and kl_tokens, lists of the response's tokens as text and of logp - logp_ref for each, which
        the report shades. All except the first three may be missing.
        Raises: ValueError if a row lacks id, prompt or response, or its tokens and kl_tokens differ in number.
        """
        for row in rows:
            missing = [key for key in SAMPLE_KEYS if key not in row]
            if missing:
                raise ValueError(f"samples at step {step}: a row lacks {', '.join(missing)}")
            if len(row.get("tokens") or ()) != len(row.get("kl_tokens") or ()):
                raise ValueError(f"samples at step {step}: tokens and kl_tokens must be as many")
        if step == self._resume_step:
            rows = [row for row in rows if str(row["id"]) not in self._kept_samples]
        full = [{"step": int(step), "score": None, "kl": None} | self._clean(row) for row in rows]
        if self._metrics is not None and self._with_samples:
            if self._samples is None:
                self._samples = self._samples_path.open("a", encoding="utf-8", errors="backslashreplace")
            self._samples.writelines(encode_line(row) for row in full)
            self._samples.flush()
        if self._view is not None:
            self._view.samples(full, step)

    def _clean(self, row: Mapping[str, Any]) -> dict[str, Any]:
        clean: dict[str, Any] = {}
        for key, value in row.items():
            if isinstance(value, Mapping):
                clean[key] = self._clean(value)
            elif value is None or isinstance(value, str | int):
                clean[key] = value
            elif isinstance(value, list | tuple):
                clean[key] = list(self._clean({f"{key}[{i}]": one for i, one in enumerate(value)}).values())
            else:
                clean[key] = self._finite(f"samples: {key}", float(value))
        return clean

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Shows a small table in the view; on disk it belongs to the stage's own results."""
        if self._view is not None:
            self._view.table(name, columns, rows)

    def summary(self, values: Mapping[str, float]) -> None:
        """Shows the stage's final numbers in the view; on disk they belong to stage.json, which the stage writes.

        Raises: ValueError if the table of metrics lacks a name.
        """
        check_names(values)
        if self._view is not None:
            self._view.summary({name: float(value) for name, value in values.items()})

    def finish(self, failed: bool = False) -> None:
        """Closes everything; a second call does nothing."""
        for file in (self._metrics, self._samples):
            if file is not None:
                file.close()
        self._metrics = self._samples = None
        view, self._view = self._view, None
        if view is not None:
            view.finish(failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.finish(failed=kind is not None)


def make_tracker(
    kind: Kind,
    *,
    folder: Path,
    run: str,
    stage: str,
    config: dict[str, Any],
    resume_step: int = 0,
    project: str = "rlhf",
) -> Tracker:
    """Opens the records of one stage.

    folder: of the stage; metrics.jsonl, samples.jsonl and wandb/ or tensorboard/ are written to it. "off" writes
        metrics.jsonl alone, "silent" nothing.
    resume_step: the step of the checkpoint that training goes on from. Lines after it are dropped, since
        they will be written again; 0 empties the files.
    W&B is offline unless WANDB_API_KEY is set or WANDB_MODE says otherwise, groups the stages of a run, and
    keeps its run id over a resume. Its failures give one warning and stop nothing.
    Raises: UserError for an unknown kind, and for tensorboard if the package is missing.
    """
    if kind not in get_args(Kind):
        raise UserError(f"tracking: got {kind!r}, want wandb, tensorboard, jsonl or off: set tracking to one of them")
    if kind == "silent":
        return Tracker(None, 0)
    view: Callable[[], Sink] | None = None
    if kind == "wandb":
        view = partial(_wandb_view, folder, run, stage, config, project)
    elif kind == "tensorboard":
        view = _tensorboard_view(folder, config, resume_step)
    return Tracker(folder, resume_step, view, with_samples=kind != "off")


def _wandb_view(folder: Path, run: str, stage: str, config: dict[str, Any], project: str) -> Sink:
    from rlhf.runs import wandb_run

    # read before this process appends to the files
    metrics = [row for row in read_jsonl(folder / "metrics.jsonl") if isinstance(row.get("progress/step"), int)]
    samples = [row for row in read_jsonl(folder / "samples.jsonl") if isinstance(row.get("step"), int)]

    def start() -> Sink:
        return wandb_run.WandbSink(folder, run, stage, config, project, (metrics, samples))

    limit = wandb_run.seconds_allowed("RLHF_WANDB_FINISH_SECONDS", wandb_run.FINISH_TIMEOUT)
    # a stage may end before W&B has started, so the wait covers both
    limit += wandb_run.seconds_allowed("RLHF_WANDB_INIT_SECONDS", wandb_run.INIT_TIMEOUT)
    return Background("Weights & Biases", start, limit + FINISH_MARGIN)


def _tensorboard_view(folder: Path, config: dict[str, Any], resume_step: int) -> Callable[[], Sink]:
    from rlhf.runs.tensorboard import TensorboardSink, require_tensorboard

    require_tensorboard()
    return lambda: Background("TensorBoard", lambda: TensorboardSink(folder, config, resume_step), 60.0)

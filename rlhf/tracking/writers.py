"""Where a stage's metrics and samples go: JSON Lines in its folder, and Weights & Biases where asked for.

The files are the record: the report, the tests and a resume read them. W&B is a view of the same numbers and
may fail at any time without touching training. Nothing here knows what a metric means (`metrics.py`). Make
one tracker a stage, on the main process only, and one of kind "off" on every other process.
"""

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from rlhf.errors import UserError
from rlhf.tracking.metrics import check_names

logger = logging.getLogger(__name__)

Kind = Literal["wandb", "jsonl", "off"]
SAMPLE_KEYS = ("id", "prompt", "response")
# Seconds after which W&B is given up: starting online, and uploading what is left at the end.
WANDB_INIT_TIMEOUT, WANDB_FINISH_TIMEOUT = 30.0, 120.0


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file; a torn or foreign line is passed over, a missing file is empty."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line, parse_constant=lambda _: None)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def truncate_jsonl(path: Path, key: str, last: int) -> dict[str, Any]:
    """Keeps the lines of `path` whose integer `row[key]` is at most `last`, and returns the newest of them.

    A run that stopped wrote some steps past its last checkpoint and perhaps half a line; the resumed run
    writes those steps again. The file is replaced in one move, so that a stop in here loses nothing.
    """
    newest: dict[str, Any] = {}
    if not path.is_file():
        return newest
    kept = path.with_name(path.name + ".kept")
    with kept.open("w", encoding="utf-8", errors="backslashreplace") as out:
        for row in read_jsonl(path):
            if isinstance(row.get(key), int) and row[key] <= last:
                out.write(_encode(row))
                newest = row
    os.replace(kept, path)
    return newest


def _encode(row: Mapping[str, Any]) -> str:
    # A lone surrogate cannot be UTF-8: the file's `backslashreplace` writes it as JSON's own escape.
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


class Tracker:
    """Writes one stage's metrics and samples. A context manager; made by `make_tracker`."""

    def __init__(self, folder: Path | None, resume_step: int, wandb: "_Wandb | None") -> None:
        self._wandb = wandb
        self._warned: set[str] = set()
        self._metrics: TextIO | None = None
        self._samples: TextIO | None = None
        self._samples_path = Path("samples.jsonl")
        self._started = time.monotonic()
        if folder is not None:
            newest = self._open(folder, resume_step)
            # The clock goes on where the kept part of the run stopped.
            self._started -= float(newest.get("time/elapsed_s") or 0.0)

    def _open(self, folder: Path, resume_step: int) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        newest: dict[str, Any] = {}
        metrics, samples = folder / "metrics.jsonl", folder / "samples.jsonl"
        if resume_step > 0:
            newest = truncate_jsonl(metrics, "progress/step", resume_step)
            truncate_jsonl(samples, "step", resume_step)
        else:
            samples.unlink(missing_ok=True)
            metrics.unlink(missing_ok=True)
        self._metrics = metrics.open("a", encoding="utf-8", errors="backslashreplace")
        self._samples_path = samples
        return newest

    def log(
        self,
        metrics: Mapping[str, float],
        *,
        step: int,
        episodes: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """Writes one line. Several lines may share a step; log a step before its checkpoint is saved.

        Values are numbers or one-element tensors. `time/elapsed_s` is added. A value that is not finite is
        written as null, with one warning a name, so that the file stays JSON.
        Raises: ValueError where the table of metrics lacks a name.
        """
        check_names(metrics)
        row: dict[str, float | None] = {"progress/step": int(step)}
        if episodes is not None:
            row["progress/episodes"] = int(episodes)
        if tokens is not None:
            row["progress/tokens"] = int(tokens)
        row["time/elapsed_s"] = round(time.monotonic() - self._started, 3)
        row |= {name: self._finite(name, float(value)) for name, value in metrics.items()}
        if self._metrics is not None:
            self._metrics.write(_encode(row))
            self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in row.items() if value is not None}, step)

    def _finite(self, name: str, value: float) -> float | None:
        if math.isfinite(value):
            return value
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("%s is %s: written as null (said once)", name, value)
        return None

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Writes generated text: rows of {id, prompt, response, score, kl}; gold where it is known.

        Raises: ValueError where a row lacks id, prompt or response.
        """
        for row in rows:
            missing = [key for key in SAMPLE_KEYS if key not in row]
            if missing:
                raise ValueError(f"samples at step {step}: a row lacks {', '.join(missing)}")
        full = [{"step": int(step), "score": None, "kl": None} | self._clean(row) for row in rows]
        if self._metrics is not None:
            if self._samples is None:
                self._samples = self._samples_path.open("a", encoding="utf-8", errors="backslashreplace")
            self._samples.writelines(_encode(row) for row in full)
            self._samples.flush()
        if self._wandb is not None:
            self._wandb.samples(full, step)

    def _clean(self, row: Mapping[str, Any]) -> dict[str, Any]:
        clean: dict[str, Any] = {}
        for key, value in row.items():
            if isinstance(value, Mapping):
                clean[key] = self._clean(value)
            elif value is None or isinstance(value, str | int):
                clean[key] = value
            else:
                clean[key] = self._finite(f"samples: {key}", float(value))
        return clean

    def summary(self, values: Mapping[str, float]) -> None:
        """Shows the stage's final numbers in W&B; on disk they belong to stage.json, which the stage writes.

        Raises: ValueError where the table of metrics lacks a name.
        """
        check_names(values)
        if self._wandb is not None:
            self._wandb.summary({name: float(value) for name, value in values.items()})

    def finish(self, failed: bool = False) -> None:
        """Closes everything; a second call does nothing."""
        for file in (self._metrics, self._samples):
            if file is not None:
                file.close()
        self._metrics = self._samples = None
        if self._wandb is not None:
            self._wandb.finish(failed)
            self._wandb = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish(failed=kind is not None)


class _Wandb:
    """A W&B run that may fail: the first failure is told once, and everything after it does nothing."""

    def __init__(self, folder: Path, run: str, stage: str, config: dict[str, Any], resume: bool, project: str) -> None:
        self._run: Any = None
        self._table: Any = None
        self._saved_env: dict[str, str | None] = {}
        self._try("start", lambda: self._start(folder, run, stage, config, resume, project))

    def _try(self, doing: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._run = None
            told = " ".join(str(error).split())
            logger.warning(
                "Weights & Biases could not %s (%s: %s): going on without it, metrics.jsonl has everything",
                doing,
                type(error).__name__,
                told[:300],
            )
            self._restore_env()

    def _start(self, folder: Path, run: str, stage: str, config: dict[str, Any], resume: bool, project: str) -> None:
        home = folder / "wandb"
        home.mkdir(parents=True, exist_ok=True)
        # Tables are staged there; without these W&B writes to the user's home, which may be read-only.
        self._set_env(WANDB_DATA_DIR=str(home), WANDB_CACHE_DIR=str(home), WANDB_ERROR_REPORTING="false")
        import wandb

        id_file = home / "run-id"
        if not (resume and id_file.is_file()):
            id_file.write_text(secrets.token_hex(4) + "\n", encoding="ascii")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", project),
            dir=str(folder),
            id=id_file.read_text(encoding="ascii").strip(),
            name=f"{run}/{stage}",
            group=run,
            job_type=stage,
            config=config,
            resume="allow",
            reinit="create_new",
            mode=_wandb_mode(wandb),
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                init_timeout=WANDB_INIT_TIMEOUT,
                finish_timeout=WANDB_FINISH_TIMEOUT,
            ),
        )
        self._run.define_metric("progress/step")
        self._run.define_metric("*", step_metric="progress/step")

    def _set_env(self, **values: str) -> None:
        for name, value in values.items():
            if name not in os.environ:
                self._saved_env[name] = None
                os.environ[name] = value

    def _restore_env(self) -> None:
        for name in self._saved_env:
            os.environ.pop(name, None)
        self._saved_env.clear()

    def log(self, row: dict[str, float], step: int) -> None:
        if self._run is not None:
            # With our step W&B drops what a resumed run repeats: no point stands twice.
            self._try("log", lambda: self._run.log(row, step=step))

    def samples(self, rows: list[dict[str, Any]], step: int) -> None:
        if self._run is not None:
            self._try("log samples", lambda: self._log_table(rows, step))

    def _log_table(self, rows: list[dict[str, Any]], step: int) -> None:
        columns: list[str | int] = ["step", "id", "prompt", "response", "score", "kl", "gold"]
        if self._table is None:
            import wandb

            self._table = wandb.Table(columns=columns, log_mode="INCREMENTAL")
        for row in rows:
            gold = (row.get("gold") or {}).get("total")
            self._table.add_data(*(row[str(name)] for name in columns[:-1]), gold)
        self._run.log({"samples": self._table, "progress/step": step}, step=step)

    def summary(self, values: dict[str, float]) -> None:
        if self._run is not None:
            self._try("write the summary", lambda: self._run.summary.update(values))

    def finish(self, failed: bool) -> None:
        if self._run is not None:
            self._try("finish", lambda: self._run.finish(exit_code=int(failed)))
        self._restore_env()


def _wandb_mode(wandb: Any) -> Literal["online", "offline"] | None:
    """Offline unless the user asked otherwise; None leaves it to WANDB_MODE. No reason to prompt is left."""
    asked = os.environ.get("WANDB_MODE")
    if os.environ.get("WANDB_API_KEY"):
        return None if asked else "online"
    if asked in ("offline", "disabled", "dryrun"):
        return None
    if asked and wandb.login(prompt=False, verify=False):
        return None
    return "offline"


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

    folder: the stage's own; metrics.jsonl, samples.jsonl and wandb/ come to lie there. "off" writes nothing.
    resume_step: the step of the checkpoint that training goes on from. Lines after it are dropped, since
        they will be written again; 0 starts the files anew.
    W&B is offline unless WANDB_API_KEY is set or WANDB_MODE says otherwise, groups the stages of a run, and
    keeps its run id over a resume. Its failures are told once and stop nothing.
    Raises: UserError for an unknown kind.
    """
    if kind == "off":
        return Tracker(None, 0, None)
    if kind not in ("wandb", "jsonl"):
        raise UserError(f"tracking: got {kind!r}, want wandb, jsonl or off: set tracking to one of them")
    wandb = _Wandb(folder, run, stage, config, resume_step > 0, project) if kind == "wandb" else None
    return Tracker(folder, resume_step, wandb)

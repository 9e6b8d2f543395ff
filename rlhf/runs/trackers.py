"""Writes a stage's metrics and samples: JSON Lines in its folder, and optionally a W&B run.

The files are the record. W&B shows the same numbers from a thread of its own, and may fail at any time without
affecting training. A resumed stage keeps its W&B run id: online it continues the run, offline it begins a second folder
of the same run.
"""

import json
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO

from rlhf.config import TrackingConfig
from rlhf.config.setting import flatten, listed
from rlhf.runs.metric_table import X_AXES, check_names
from rlhf.runs.run_files import encode_line, truncate_jsonl
from rlhf.runs.stage import Stage

logger = logging.getLogger(__name__)

FINISH_MARGIN = 5.0  # seconds that finishing may take in addition to W&B's own limits


class Tracker(AbstractContextManager["Tracker"]):
    """Writes metrics.jsonl, samples.jsonl and wandb/ in a stage's folder, as tracking.kind says; on ranks other than 0
    it writes nothing.
    A context manager. resume_step: of the checkpoint from which training continues: later lines are dropped, since they
    will be written again; 0: all.
    """

    def __init__(self, stage: Stage, resume_step: int = 0) -> None:
        folder, tracking = stage.folder if stage.writes else None, stage.config.tracking
        self.view: Background | None = None
        self._folder, self._with_samples, self._resume_step = folder, tracking.kind != "off", resume_step
        self._warned, self._files, self._started = set[str](), dict[str, TextIO](), time.monotonic()
        self._axes: dict[str, float] = {}  # of the last line: another one of its step has the same
        # What the files have of the step to resume from: a stage killed after its checkpoint logs some of it again.
        self._kept, self._kept_samples = set[str](), set[str]()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            # With resume_step 0 nothing stays, as no step is below 0.
            last = resume_step or -1
            lines = truncate_jsonl(folder / "metrics.jsonl", "progress/step", last)
            self._started -= float(lines[-1].get("time/elapsed_s") or 0.0) if lines else 0.0  # the clock continues
            for row in lines:
                if row["progress/step"] == resume_step:
                    self._kept |= row.keys()
                    self._axes |= {name: row[name] for name in row if name.startswith("progress/")}
            rows = truncate_jsonl(folder / "samples.jsonl", "step", last)
            self._kept_samples = {str(row.get("id")) for row in rows if row["step"] == resume_step}
            self._write("metrics.jsonl", [])
            if tracking.kind == "wandb":  # a stage may end before W&B has started, so the wait covers both
                limit = seconds_allowed("INIT") + seconds_allowed("FINISH") + FINISH_MARGIN
                self.view = Background(partial(WandbRun, folder, stage.record("running"), tracking), limit)

    def _write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._folder is None:
            return
        if name not in self._files:
            self._files[name] = (self._folder / name).open("a", encoding="utf-8", errors="backslashreplace")
        self._files[name].writelines(encode_line(row) for row in rows)
        self._files[name].flush()

    def log(
        self, metrics: Mapping[str, float], *, step: int, episodes: int | None = None, tokens: int | None = None
    ) -> None:
        """Writes one line, before its step's checkpoint is saved. Several lines may share a step.

        Values are numbers or one-element tensors; one that is not finite is written as null, with one warning per name.
        `objective/sqrt_kl` is added to `objective/kl`. Raises: ValueError if the table of metrics lacks a name.
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
        if self.view is not None:
            self.view.call("log", shown, step)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Writes generated text, one row per response to the same held-out prompts each time. Keys: id, prompt,
        response; and if known score; kl, nats of the whole response; length, response tokens; parts, {name: number} of
        the score; gold, the judge's own parts.
        """
        if step == self._resume_step:
            rows = [row for row in rows if str(row["id"]) not in self._kept_samples]
        text = json.dumps([{"step": int(step), "score": None, "kl": None} | row for row in rows])
        full = json.loads(text, parse_constant=lambda _: None)  # numbers that are not finite as null
        if self._with_samples:
            self._write("samples.jsonl", full)
        if self.view is not None:
            self.view.call("samples", full, step)

    def finish(self, failed: bool = False) -> None:
        """Closes everything; a second call does nothing."""
        for file in self._files.values():
            file.close()
        view, self._folder, self.view = self.view, None, None
        if view is not None:
            view.finish(failed)

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.finish(failed=kind is not None)


# --- W&B ----------------------------------------------------------------------------------------------------


class Background:
    """Calls the methods of a `WandbRun` in another thread, in order, so that a slow or broken service never delays
    training.

    `start` makes it in the thread, since starting may hang too. A method that fails is not called again, apart from the
    others: online, a table needs responses from the service and a number does not. Only the first failure is reported.
    """

    def __init__(self, start: Callable[[], Any], finish_timeout: float) -> None:
        self._finish_timeout, self._reported = finish_timeout, False
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(start,), name="Weights & Biases", daemon=True)
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
            without = "continuing without it, metrics.jsonl and samples.jsonl have everything"
            logger.warning("Weights & Biases %s: %s", what, without)
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


class WandbRun:
    """One stage as one W&B run: its id, its axes, its tables. `Background` handles the errors of wandb that it raises."""

    def __init__(self, folder: Path, record: Mapping[str, Any], tracking: TrackingConfig) -> None:
        """record: the stage's. Its settings are the run's configuration, each by its own key, with the lineage at the top."""
        self._table: Any = None
        self._columns: list[str] = []
        home, run, stage = folder / "wandb", record["run"], record["stage"]
        home.mkdir(parents=True, exist_ok=True)
        for place in ("DATA", "CACHE", "CONFIG"):  # the user's home may be read-only
            os.environ.setdefault(f"WANDB_{place}_DIR", str(home))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        id_file = home / "run-id"
        run_id = id_file.read_text(encoding="ascii", errors="replace").strip() if id_file.is_file() else ""
        if not run_id:
            run_id = secrets.token_hex(4)
            id_file.write_text(run_id + "\n", encoding="ascii")
        lineage = {key: record[key] for key in ("stage", "run", "seed", "parents", "data", "versions", "git")}
        self._run = start_run(
            home,
            id=run_id,
            name=f"{tracking.name or run}/{stage}",
            group=tracking.group or run,
            job_type=stage,
            entity=tracking.entity,
            tags=listed(tracking.tags) or None,
            project=project_of(tracking.project),
            config=record["config"] | lineage,
        )
        for axis in ("progress/step", "progress/episodes", "progress/tokens"):
            self._run.define_metric(axis)
        self._run.define_metric("*", step_metric=X_AXES.get(stage, "progress/step"))
        # The first step that the server lacks: one that was killed had sent some after its checkpoint.
        self._first_step = self._run.starting_step  # offline 0

    def log(self, row: Mapping[str, float], step: int) -> None:
        if step >= self._first_step:
            self._run.log(dict(row), step=step)

    def samples(self, rows: list[dict[str, Any]], step: int) -> None:
        import wandb

        if step < self._first_step:
            return
        flat = [flatten(row, "/") for row in rows]  # the parts of scores as columns
        if self._table is None:
            first = ("step", "id", "prompt", "response", "score", "kl", "length")
            self._columns = list(dict.fromkeys([*first, *(name for row in flat for name in row)]))
            self._table = wandb.Table(columns=[*self._columns], log_mode="INCREMENTAL")
        for row in flat:
            self._table.add_data(*(row.get(name) for name in self._columns))
        self._run.log({"samples": self._table, "progress/step": step}, step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def seconds_allowed(what: str) -> float:
    """How long W&B may take, after which the stage continues without it; the variables RLHF_WANDB_<what>_SECONDS change it."""
    return float(os.environ.get(f"RLHF_WANDB_{what}_SECONDS", {"INIT": 20.0, "FINISH": 30.0}[what]))


def project_of(given: str | None) -> str:
    """The W&B project of tracking.project."""
    return given or os.environ.get("WANDB_PROJECT", "rlhf")


def start_run(home: Path, **options: Any) -> Any:
    """A W&B run, offline if no key is set or the server does not answer in time. It never prompts. home: the stage's folder wandb/."""
    import wandb

    settings: dict[str, Any] = {"silent": True, "console": "off", "save_code": False, "x_save_requirements": False}
    settings |= dict.fromkeys(("disable_code", "disable_git", "disable_job_creation"), True)
    settings |= dict.fromkeys(("x_disable_stats", "x_disable_meta", "x_disable_machine_info"), True)
    settings |= {"init_timeout": seconds_allowed("INIT"), "finish_timeout": seconds_allowed("FINISH")}
    options |= {"settings": wandb.Settings(**settings), "dir": str(home.parent)}
    options |= {"resume": "allow", "reinit": "create_new"}
    mode = choose_mode()
    try:
        return wandb.init(**options, mode=mode)
    except Exception as error:
        if mode == "offline":
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        stays = f"this stage is kept offline in {home}, `wandb sync` uploads it later"
        logger.warning("Weights & Biases did not answer (%s): %s", reason, stays)
        wandb.teardown()  # its service holds the run's id
        return wandb.init(**options, mode="offline")


def choose_mode() -> Literal["online", "offline"] | None:
    """Offline unless the user chose otherwise; None leaves it to WANDB_MODE. W&B then never prompts."""
    import wandb

    chosen = os.environ.get("WANDB_MODE")
    if os.environ.get("WANDB_API_KEY"):
        return None if chosen else "online"
    if chosen in ("offline", "disabled", "dryrun") or (chosen and wandb.login(prompt=False, verify=False)):
        return None
    return "offline"

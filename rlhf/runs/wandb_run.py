"""One stage as one W&B run: the run's id, its configuration, its axes, its tables. Training never waits for it.

`background.py` runs it in a thread of its own. The run is published from metrics.jsonl and samples.jsonl: a resumed stage keeps its
run id and logs again what these files contain. Offline that makes a new folder under wandb/, and the one before is removed;
online only the steps that the server lacks are sent.
"""

import logging
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhf.runs.background import Rows, Sink
from rlhf.runs.metrics import X_AXES
from rlhf.runs.panels import TABLES

logger = logging.getLogger(__name__)

# Seconds after which the stage continues without W&B: starting online, uploading the rest, and the thread that does so.
INIT_TIMEOUT, FINISH_TIMEOUT = 20.0, 30.0
# Dicts of a sample row whose entries become separate columns.
SAMPLE_PARTS = ("parts", "gold")
# Only in samples.jsonl, for the report: a list per row is not a column.
NOT_COLUMNS = ("tokens", "kl_tokens")


def seconds_allowed(name: str, default: float) -> float:
    """A limit in seconds that the environment may lower or raise: RLHF_WANDB_INIT_SECONDS, RLHF_WANDB_FINISH_SECONDS."""
    try:
        return max(0.1, float(os.environ.get(name, default)))
    except ValueError:
        return default


class Environment:
    """W&B's variables while a run is open: its files next to the stage's, no output, no error reports.

    Variables that the user has set are kept.
    """

    def __init__(self, home: Path) -> None:
        # Tables are staged there; without these W&B writes to the user's home, which may be read-only.
        wanted = {
            "WANDB_DATA_DIR": str(home),
            "WANDB_CACHE_DIR": str(home),
            "WANDB_CONFIG_DIR": str(home),
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_SILENT": "true",
        }
        self._set = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(self._set)

    def restore(self) -> None:
        for name, value in self._set.items():
            if os.environ.get(name) == value:
                os.environ.pop(name)


class WandbSink(Sink):
    """A W&B run. It raises wandb's errors, which the caller must catch."""

    def __init__(
        self, folder: Path, run: str, stage: str, config: dict[str, Any], project: str, kept: tuple[Rows, Rows]
    ) -> None:
        """kept: the lines of metrics.jsonl and samples.jsonl that a resumed stage continues."""
        self._folder = folder
        self._table: Any = None
        self._columns: list[str] = []
        self._step = 0  # of the last line: a table is logged at the same step
        self._first_step = 0  # the first one that the server lacks
        home = folder / "wandb"
        home.mkdir(parents=True, exist_ok=True)
        self._environment = Environment(home)
        try:
            self._start(run, stage, config, project, kept)
        except BaseException:
            self._environment.restore()
            raise

    def _start(self, run: str, stage: str, config: dict[str, Any], project: str, kept: tuple[Rows, Rows]) -> None:
        run_id = open_run_id(self._folder)
        home = self._folder / "wandb"
        # W&B names folders by the second, so the next name may be the same.
        for folder in home.glob(f"offline-run-*-{run_id}"):
            folder.rename(folder.with_name(f"replaced-{folder.name}"))
        self._run = start_run(self._folder, run_id, run, stage, config, project)
        for axis in ("progress/step", "progress/episodes", "progress/tokens"):
            self._run.define_metric(axis)
        self._run.define_metric("*", step_metric=X_AXES.get(stage, "progress/step"))
        self._first_step = 0 if self._run.offline else int(getattr(self._run, "starting_step", 0) or 0)
        self._publish(*kept)
        for folder in home.glob(f"replaced-offline-run-*-{run_id}"):
            shutil.rmtree(folder, ignore_errors=True)

    def _publish(self, metrics: Rows, samples: Rows) -> None:
        """Log what the files contain, in the order of the steps."""
        at: dict[int, Rows] = {}
        for row in samples:
            at.setdefault(row["step"], []).append(row)
        for row in metrics:
            step = row["progress/step"]
            if step in at:
                self.samples(at.pop(step), step)
            self.log({name: value for name, value in row.items() if value is not None}, step)

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._step = step
        if step >= self._first_step:
            self._run.log(dict(row), step=step)

    def samples(self, rows: Rows, step: int) -> None:
        if step < self._first_step:
            return
        import wandb

        if self._table is None:
            self._columns = columns_of(rows)
            columns: list[str | int] = list(self._columns)
            self._table = wandb.Table(columns=columns, log_mode="INCREMENTAL")
        for row in rows:
            flat = flatten(row)
            self._table.add_data(*(flat.get(name) for name in self._columns))
        self._run.log({"samples": self._table, "progress/step": step}, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table, "progress/step": self._step}, step=self._step)

    def summary(self, values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(values))

    def finish(self, failed: bool) -> None:
        finish_run(self._run, self._folder, failed, self._environment)


def finish_run(run: Any, folder: Path, failed: bool, environment: Environment) -> None:
    try:
        run.finish(exit_code=int(failed))
    finally:
        environment.restore()
    shutil.rmtree(folder / "wandb" / "artifacts" / "staging", ignore_errors=True)  # empty by now


def open_run_id(folder: Path) -> str:
    """The stage's run id: the stored one, or a new one if the stage starts in an empty folder."""
    id_file = folder / "wandb" / "run-id"
    if id_file.is_file() and (run_id := id_file.read_text(encoding="ascii", errors="replace").strip()):
        return run_id
    run_id = secrets.token_hex(4)
    id_file.write_text(run_id + "\n", encoding="ascii")
    return run_id


def start_run(folder: Path, run_id: str, run: str, stage: str, config: dict[str, Any], project: str) -> Any:
    """A W&B run, offline if no key is set or the server does not answer in time. It never prompts."""
    import wandb

    place = {"project": os.environ.get("WANDB_PROJECT", project), "dir": str(folder), "id": run_id}
    labels = {"name": f"{run}/{stage}", "group": run, "job_type": stage}
    options: dict[str, Any] = place | labels | {"config": config, "resume": "allow", "reinit": "create_new"}
    settings = wandb.Settings(
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
        init_timeout=seconds_allowed("RLHF_WANDB_INIT_SECONDS", INIT_TIMEOUT),
        finish_timeout=seconds_allowed("RLHF_WANDB_FINISH_SECONDS", FINISH_TIMEOUT),
    )
    mode = choose_mode(wandb)
    try:
        return wandb.init(**options, mode=mode, settings=settings)
    except Exception as error:
        if mode == "offline":
            raise
        logger.warning(
            "Weights & Biases did not answer (%s: %s): this stage is kept offline in %s, `wandb sync` uploads it later",
            type(error).__name__,
            " ".join(str(error).split())[:200],
            folder / "wandb",
        )
        wandb.teardown()  # its service holds the run's id
        return wandb.init(**options, mode="offline", settings=settings)


def choose_mode(wandb: Any) -> Literal["online", "offline"] | None:
    """Offline unless the user chose otherwise; None leaves it to WANDB_MODE. W&B then never prompts."""
    chosen = os.environ.get("WANDB_MODE")
    if os.environ.get("WANDB_API_KEY"):
        return None if chosen else "online"
    if chosen in ("offline", "disabled", "dryrun") or (chosen and wandb.login(prompt=False, verify=False)):
        return None
    return "offline"


def columns_of(rows: Rows) -> list[str]:
    """The samples table's columns: the fixed ones, then one for each part of a score."""
    parts = {f"{group}/{name}": None for row in rows for group in SAMPLE_PARTS for name in row.get(group) or {}}
    return [*TABLES["samples"], *parts]


def flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    """A sample row with its parts as columns, without the lists that only the report reads."""
    flat = {name: value for name, value in row.items() if name not in (*SAMPLE_PARTS, *NOT_COLUMNS)}
    for group in SAMPLE_PARTS:
        flat |= {f"{group}/{name}": value for name, value in (row.get(group) or {}).items()}
    return flat

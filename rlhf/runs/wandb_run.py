"""One stage as one W&B run: the run's id, its configuration, its axes, its tables. Training never waits for it.

`trackers.Background` runs it in a thread of its own. A resumed stage keeps its run id: online it continues the run, offline it
begins a second folder of the same run.
"""

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlhf.runs.metric_table import TABLES, X_AXES
from rlhf.runs.trackers import SampleRows

logger = logging.getLogger(__name__)

# Only in samples.jsonl, for the report: a list per row is not a column.
NOT_COLUMNS = ("tokens", "kl_tokens")


def seconds_allowed(name: str, default: float) -> float:
    """A limit in seconds that the environment may lower or raise: RLHF_WANDB_INIT_SECONDS and the like."""
    try:
        return max(0.1, float(os.environ.get(name, default)))
    except ValueError:
        return default


# Seconds after which the stage continues without W&B: starting online, sending the rest.
init_timeout = partial(seconds_allowed, "RLHF_WANDB_INIT_SECONDS", 20.0)
finish_timeout = partial(seconds_allowed, "RLHF_WANDB_FINISH_SECONDS", 30.0)


class WandbRun:
    """A W&B run, written by `trackers.Background`, which handles the errors of wandb that it raises."""

    def __init__(
        self, folder: Path, run: str, stage: str, config: dict[str, Any], project: str, labels: Mapping[str, Any]
    ) -> None:
        self._table: Any = None
        self._columns: list[str] = []
        self._step = 0  # of the last line: a table is logged at the same step
        home = folder / "wandb"
        home.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as until_finish:
            until_finish.enter_context(environment(home))
            id_file = home / "run-id"
            run_id = id_file.read_text(encoding="ascii", errors="replace").strip() if id_file.is_file() else ""
            if not run_id:
                run_id = secrets.token_hex(4)
                id_file.write_text(run_id + "\n", encoding="ascii")
            defaults = {"name": f"{run}/{stage}", "group": run, "job_type": stage}
            self._run = start_run(folder, run_id, config, project, {**defaults, **labels})
            for axis in ("progress/step", "progress/episodes", "progress/tokens"):
                self._run.define_metric(axis)
            self._run.define_metric("*", step_metric=X_AXES.get(stage, "progress/step"))
            self._until_finish = until_finish.pop_all()
        # The first step that the server lacks: one that was killed had sent some after its checkpoint.
        self._first_step = 0 if self._run.offline else int(getattr(self._run, "starting_step", 0) or 0)

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._step = step
        if step >= self._first_step:
            self._run.log(dict(row), step=step)

    def samples(self, rows: SampleRows, step: int) -> None:
        import wandb

        if step < self._first_step:
            return
        flat = [flatten_sample(row) for row in rows]
        if self._table is None:
            self._columns = list(dict.fromkeys([*TABLES["samples"], *(name for row in flat for name in row)]))
            self._table = wandb.Table(columns=[*self._columns], log_mode="INCREMENTAL")
        for row in flat:
            self._table.add_data(*(row.get(name) for name in self._columns))
        self._run.log({"samples": self._table, "progress/step": step}, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table, "progress/step": self._step}, step=self._step)

    def summary(self, values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(values))

    def finish(self, failed: bool) -> None:
        with self._until_finish:
            self._run.finish(exit_code=int(failed))


@contextlib.contextmanager
def environment(home: Path) -> Iterator[None]:
    """W&B's files next to the stage's, since the user's home may be read-only. The user's own variables are kept."""
    wanted = dict.fromkeys(("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"), str(home))
    wanted |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in added.items():
            if os.environ.get(name) == value:
                del os.environ[name]


def start_run(folder: Path, run_id: str, config: dict[str, Any], project: str, labels: dict[str, Any]) -> Any:
    """A W&B run, offline if no key is set or the server does not answer in time. It never prompts."""
    import wandb

    place = {"project": os.environ.get("WANDB_PROJECT", project), "dir": str(folder), "id": run_id}
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
        init_timeout=init_timeout(),
        finish_timeout=finish_timeout(),
    )
    mode = choose_mode()
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


def choose_mode() -> Literal["online", "offline"] | None:
    """Offline unless the user chose otherwise; None leaves it to WANDB_MODE. W&B then never prompts."""
    import wandb

    chosen = os.environ.get("WANDB_MODE")
    if os.environ.get("WANDB_API_KEY"):
        return None if chosen else "online"
    if chosen in ("offline", "disabled", "dryrun") or (chosen and wandb.login(prompt=False, verify=False)):
        return None
    return "offline"


def flatten_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """A sample row with the parts of its scores as columns, without the lists that only the report reads."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{part}": number for part, number in value.items()}
        elif name not in NOT_COLUMNS:
            flat[name] = value
    return flat

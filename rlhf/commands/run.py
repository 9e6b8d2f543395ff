"""The commands from Python: `rlhf.Run`, with the settings of the command line, data as Python objects and functions as
they are.

    run = rlhf.Run("tuned", model="HuggingFaceTB/SmolLM2-135M-Instruct", demonstrations=rows, comparisons=rows)
    run.sft(epochs=2).reward().ppo(rewards=[my_function], kl_coef=0.05)

Stages run in this process, one after the other. They resume, are recorded and are refused exactly as on the command
line.
"""

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any

from rlhf.api import LoadedRun
from rlhf.commands.pipeline import check_settings, ensure_stage, stages_to_run
from rlhf.config import Config
from rlhf.config.checks import check_config
from rlhf.config.commands import CONFIG_GROUPS
from rlhf.config.compose import check_adopted, check_overrides, compose_config, nearest, unknown_setting
from rlhf.config.setting import listed, settings_in
from rlhf.data.rows import plain as json_values
from rlhf.errors import UserError
from rlhf.recipe import STAGES
from rlhf.runs.folders import is_complete, lend_parents, read_stage, stage_folder
from rlhf.runs.remembered import GIVEN, recall, text_of, trusted
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import beginnings_in, hash_sources
from rlhf.system.files import read_json, write_text
from rlhf.system.plugins import Named, call_plugins, named

KINDS = ("corpus", "demonstrations", "comparisons", "prompts")


class Run:
    """A run under `runs_dir`, new or existing; an existing one keeps the settings that it was given before.

    model: a hub id, a folder or a .gguf file; None: a GPT of our own. Data: as in data.<kind> (a file, a folder, a hub
    id, or a list of these), or rows: a list of dicts, a data set, a DataFrame. experiment: a preset of conf/experiment.
    settings: of every stage, by their full names with `_` in place of the dot (`kl_coef`), or as `**{"kl.coef": 0.05}`.

    Raises: UserError for an unknown setting or a wrong value, as the command line does.
    """

    def __init__(
        self,
        name: str,
        *,
        model: str | Path | None = None,
        experiment: str | None = None,
        runs_dir: str | Path = "runs",
        **settings: Any,
    ):
        self.folder = Path(runs_dir) / name
        if "overwrite" in settings:
            raise UserError("overwrite: is given to a stage: run.ppo(overwrite=True)")
        preset = [f"experiment={experiment}"] if experiment is not None else []
        check_overrides(preset, "pipeline")
        self._given, kept = preset, recall(self.folder)
        self._preset = [f"{key}={text}" for key, text in kept.items() if not (preset and key == "experiment")] + preset
        self._settings: dict[str, Any] = {"run": name, "runs_dir": str(runs_dir)}
        if model is not None:
            self._settings["model.pretrained"] = str(model)
        for kind in KINDS:
            if (given := settings.pop(kind, None)) is not None:
                self._settings[f"data.{kind}"] = self._stored(kind, given)
        self._settings = self._known("", settings)
        trusted(self.folder, {key: text for key, text in kept.items() if key not in self._settings})
        self.config()

    def __repr__(self) -> str:
        done = [stage for stage in STAGES if is_complete(self.folder / stage)]
        return f"<run {self.folder}: {', '.join(done) or 'nothing yet'}>"

    def config(self, command: str = "pipeline", **settings: Any) -> Config:
        """The settings of a command, checked. Raises: UserError."""
        values = self._known(command, settings)
        check_adopted(values | dict.fromkeys(("experiment",) if self._preset else ()))
        config = compose_config([*self._preset, *(f"{key}={text_of(value)}" for key, value in values.items())], command)
        for key, value in values.items():
            if has_function(value):  # the text has only its name
                group, _, field = key.rpartition(".")
                setattr(getattr(config, group) if group else config, field, value)
        check_config(config, command)
        return config

    def _known(self, command: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The run's settings with a command's, by their full names, as settings hold them."""
        return self._settings | {find_setting(key, command): plain(value) for key, value in settings.items()}

    def stage(self, name: str, overwrite: bool = False, **settings: Any) -> "Run":
        """Run a stage, and before it those that it needs and that are missing; returns the run.

        settings: the stage's own by their short names (`epochs`), others as in `Run`; later stages keep them. A
        complete stage with the same settings is skipped. overwrite: redo it if its settings differ.
        """
        if name not in STAGES:
            raise UserError(f"stage {name!r}{nearest(name, list(STAGES))}: want one of {', '.join(STAGES)}")
        with self._starting(name, overwrite, settings) as config:
            check_settings(config, [name])
            for stage in (stages := stages_to_run(config, [name])):
                hash_sources(config, stage)  # a missing file is reported before the first stage runs
            for stage in stages:
                if stage == name or not is_complete(stage_folder(config, stage)):
                    ensure_stage(config, stage, [], run_here)
        return self

    @contextlib.contextmanager
    def _starting(self, name: str, overwrite: bool, settings: dict[str, Any]) -> Iterator[Config]:
        """The settings of a stage, which later ones and the run's folder keep."""
        beginnings_in.cache_clear()  # the files may have changed since another call
        config = self.config(name, overwrite=overwrite, **settings)
        known = self._known(name, settings)
        texts = (f"{key}={text_of(value)}" for key, value in known.items() if not has_function(value))
        given = GIVEN.set((*self._given, *texts))
        try:
            call_plugins(listed(config.plugins))
            lend_parents(config)
            yield config
            self._settings = known  # what is refused is not kept
        finally:
            GIVEN.reset(given)

    tokenizer = partialmethod(stage, "tokenizer")
    pretrain = partialmethod(stage, "pretrain")
    sft = partialmethod(stage, "sft")
    reward = partialmethod(stage, "reward")
    ppo = partialmethod(stage, "ppo")
    dpo = partialmethod(stage, "dpo")

    @contextlib.contextmanager
    def open_ppo(self, overwrite: bool = False, **settings: Any) -> Iterator[Any]:
        """PPO for a loop of your own: yields the `rlhf.stages.ppo.Parts` of its updates, and writes the policy at the end; no resume."""
        from rlhf.runs.stage import open_stage
        from rlhf.stages import ppo

        with self._starting("ppo", overwrite, settings) as config, open_stage(config, "ppo") as stage:
            parts = ppo.load_parts(config, stage)
            ppo.limit_memory(stage, parts)
            yield parts
            ppo.write_models(stage, parts.state.engine, parts.prompts.tokenizer)
            stage.finish()

    def evaluate(self, **settings: Any) -> dict[str, Any]:
        """Run the evaluation; returns its figures."""
        self.stage("evaluate", **settings)
        return read_json(self.folder / "evaluate" / "results.json")

    def report(self) -> Path:
        """Write the HTML report; returns its path."""
        from rlhf.report.page import write_report

        return write_report(self.folder)

    def metrics(self, stage: str) -> Any:
        """A stage's lines of metrics as a DataFrame, indexed by step; empty if it logs none. Raises: UserError if it has not run."""
        import pandas

        folder = stage_folder(self.config(), stage)
        if read_stage(folder) is None:
            raise UserError(f"{folder}: this stage has not run: call run.stage({stage!r}) first")
        rows = list(read_jsonl(folder / "metrics.jsonl"))
        return pandas.DataFrame(rows).set_index("progress/step") if rows else pandas.DataFrame()

    def load(self) -> LoadedRun:
        """Its models, tokenizer, samples and scores, as `rlhf.load` gives them, on the run's device."""
        config = self.config()
        return LoadedRun(self.folder, config.device, config.precision)

    def sample(self, prompts: Any, stage: str = "ppo", **how: Any) -> list[str]:
        """`LoadedRun.sample`."""
        return self.load().sample(prompts, stage, **how)

    def _stored(self, kind: str, given: Any) -> Any:
        """Sources as the settings take them; rows are written to the run's folder, if they are not there already."""
        if isinstance(given, str | Path):
            return str(given)
        if isinstance(given, list | tuple) and all(isinstance(one, str | Path) for one in given):
            return [str(one) for one in given]
        rows: list[Any] = list(given.to_dict("records") if hasattr(given, "iloc") else given)
        if (wrong := next((i for i, row in enumerate(rows) if not isinstance(row, Mapping)), None)) is not None:
            raise UserError(f"{kind}, row {wrong}: got a {type(rows[wrong]).__name__}, want a dict")
        text = "".join(json.dumps(json_values(row), ensure_ascii=False) + "\n" for row in rows)
        path = self.folder / "data" / f"{kind}.jsonl"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
        return str(path)


def find_setting(key: str, command: str) -> str:
    """The full name of a setting: `kl.coef` as it is, `epochs` in the command's own group, `kl_coef` for kl.coef. Raises: UserError."""
    if key in CONFIG_GROUPS:  # tracking="jsonl", as on the command line
        return key
    known = settings_in(Config)
    for name in (f"{command}.{key}", key, *(name for name in known if name.replace(".", "_") == key)):
        if name in known:
            return name
    raise UserError(unknown_setting(key, command))


def plain(value: Any) -> Any:
    """A value as settings hold it: functions as `module:name`, paths as text."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else named(value) if callable(value) else value


def has_function(value: Any) -> bool:
    """Whether a setting is or contains a function that was given as it is, which only this process can call."""
    return any(isinstance(one, Named) for one in listed(value))


def run_here(config: Config, stage: str, overrides: list[str]) -> None:
    config.overwrite = "overwrite=true" in overrides
    importlib.import_module(STAGES[stage].module).run(config)

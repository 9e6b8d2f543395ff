"""A running stage: started or resumed under a lock, recorded in stage.json, finished with the hashes of its files."""

import contextlib
import functools
import importlib.metadata
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf import __version__
from rlhf.config import Config
from rlhf.config.setting import ROUNDING, flatten, settings_in, stored
from rlhf.errors import UserError
from rlhf.recipe import STAGES
from rlhf.runs import folders
from rlhf.runs.checkpoints import checkpoints, prune_checkpoints
from rlhf.runs.folders import identity_of, run_folder, stage_folder
from rlhf.runs.remembered import remember
from rlhf.runs.sources import hash_sources
from rlhf.system.files import beside, finish_swap, hash_files, locked, share, swap, write_json, writing
from rlhf.system.memory import peak_rss_mb
from rlhf.system.processes import barrier, is_first
from rlhf.system.terminal import say

# Files of a stage's folder that are not its output: they tell how it was run. An earlier version locked `.lock`.
RECORDS = ("stage.json", "config.yaml", "metrics.jsonl", "samples.jsonl", ".lock")
# Whose versions a record names.
PACKAGES = ("torch", "transformers", "trl", "accelerate", "tokenizers", "datasets", "numpy", "pyarrow", "pydantic")


@functools.cache
def package_versions() -> dict[str, str]:
    installed = {"rlhf": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


@functools.cache
def git_state() -> dict[str, Any]:
    """{"commit", "branch", "dirty"} of the git checkout that contains the code; empty if there is none."""
    texts = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    call = partial(subprocess.run, cwd=Path(__file__).parent, timeout=5, check=True, **texts)
    try:
        # An installed package may be inside another project's checkout, which does not contain this file.
        call(["git", "ls-files", "--error-unmatch", Path(__file__).name])
        status = call(["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--", "."]).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    state, changed = (re.findall(pattern, status, re.M) for pattern in (r"^# branch\.(?:oid|head) (.*)", r"^[^#]"))
    return {"commit": state[0], "branch": state[1], "dirty": bool(changed)}


@dataclass(slots=True)
class Stage:
    """A running stage: its folder, and the contents of its record."""

    config: Config
    name: str
    folder: Path
    parents: dict[str, str]
    data: dict[str, str]
    resumed: bool = False
    seconds_before: float = 0.0  # seconds of earlier, interrupted attempts
    started: float = field(default_factory=time.monotonic)
    steps: int | None = None  # total number of steps, once it is known
    memory: dict[str, float] = field(default_factory=dict)  # budget, tokens per forward: a resumed stage keeps them
    writes: bool = True  # only on rank 0, which prints and writes for all ranks
    counts: dict[str, int] = field(default_factory=dict)  # of data that were kept, cut and left out
    replaces: Path | None = None  # with overwrite=true the folder that this one replaces when it is complete

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def say(self, *lines: str) -> None:
        for line in lines if self.writes else ():
            say(f"{self.name}: {line}")

    def elapsed(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def record(self, status: str) -> dict[str, Any]:
        return {
            "stage": self.name,
            "status": status,
            "seed": self.config.seed,
            "run": self.config.run,
            "settings": identity_of(self.config, self.name),
            "parents": self.parents,
            "data": self.data,
            "versions": package_versions(),
            "git": git_state(),
            "seconds": round(self.elapsed(), 2),
            "peak_rss_mb": peak_rss_mb(),
            "steps": self.steps,
            "counts": self.counts,
            "memory": self.memory,
            "config": stored(asdict(self.config)),
        }

    def plan(self, steps: int) -> None:
        """Write the total number of optimizer steps (in PPO updates) to stage.json, for `rlhf watch`."""
        self.steps = steps
        self.note_progress()
        if self.writes and self.replaces is None:  # a replacement that fails leaves the old stage, with its settings
            remember(run_folder(self.config))

    def note_progress(self) -> None:
        """Store the seconds spent so far, so that a resumed stage reports its total time."""
        if self.writes:
            write_json(self.folder / "stage.json", self.record("running"))

    def finish(self, summary: dict[str, float] | None = None) -> None:
        """Hash the output, write the record as complete, and remove the checkpoints that are no longer needed."""
        if not self.writes:
            return
        remember(run_folder(self.config))
        share(self.folder)
        files = hash_files(self.folder, skip=(*RECORDS, "checkpoints", "audit.json", "wandb"))
        record = self.record("complete") | {"summary": summary or {}, "files": files}
        record["hash"] = folders.hash_of(record)
        write_json(self.folder / "stage.json", record)
        if self.replaces is not None:
            swap(self.replaces)
            self.folder, self.replaces = self.replaces, None
        else:
            shutil.rmtree(beside(self.folder), ignore_errors=True)
        prune_checkpoints(self.checkpoints, replace(self.config.checkpoints, keep=0))  # keep_best and keep_every stay
        if not checkpoints(self.checkpoints):
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        self.say(f"complete in {record['seconds']:.0f} s, {record['peak_rss_mb']:.0f} MB -> {self.folder}")


@contextlib.contextmanager
def open_stage(config: Config, name: str, data: dict[str, str] | None = None) -> Iterator[Stage]:
    """Start or resume a stage: check the parents, refuse to overwrite, hold a lock while it runs. With overwrite=true
    it is written next to the existing one, which stays until the new one is complete. data: hashes of its sources,
    unless those of `hash_sources`.
    Raises: UserError if the stage is complete (and overwrite is false), was started with other settings or is being run
    by another process, if the folder contains other files, if the disk is full, or if a parent does not match.
    """
    import yaml

    data = hash_sources(config, name) if data is None else data
    folder = run_folder(config) / name
    parents = folders.collect_parents(config, name)
    written_to, replaces = (beside(folder), folder) if config.overwrite else (folder, None)
    stage = Stage(config, name, written_to, parents, data, writes=is_first(), replaces=replaces)
    if not stage.writes:
        yield stage
        barrier()  # the next stage must find this one finished
        return
    with locked(folder, "working on it: wait for it, or choose another run=…"):
        finish_swap(folder)
        recorded = _begin_or_resume(stage)
        places = {p: stage_folder(config, p) if p in STAGES else Path(config.runs_dir) / p for p in parents}
        built_on = ", ".join(f"{places[p]} ({h[:8]})" for p, h in parents.items())
        stage.say(("resuming" if stage.resumed else "starting") + (f", built on {built_on}" if built_on else ""))
        if recorded is not None and (changed := changed_rounding(stage, recorded)):
            stage.say(f"resumes with {changed}: same computation, different rounding")
        stage.note_progress()
        try:
            with writing(folder, only_full=True):
                text = yaml.safe_dump(stored(asdict(config)), sort_keys=False, allow_unicode=True)
                (stage.folder / "config.yaml").write_text(text, encoding="utf-8")  # which `rlhf` can read back
                yield stage
        except Exception:
            written = {path.name for path in stage.folder.iterdir()} - set(RECORDS)
            if not written and not any(path.stat().st_size for path in stage.folder.glob("*.jsonl")):
                shutil.rmtree(stage.folder, ignore_errors=True)  # it failed before it did anything
            raise
    barrier()


def _begin_or_resume(stage: Stage) -> dict | None:
    """Keep the folder of an interrupted attempt, whose record is returned if it left work to resume, or start with an
    empty one. Raises: UserError.
    """
    replaces, recorded = stage.replaces is not None, None
    with contextlib.suppress(UserError) if replaces else contextlib.nullcontext():
        recorded = folders.read_stage(stage.folder)
    complete = recorded is not None and recorded["status"] == "complete"
    reason = recorded and misfit(stage.config, stage.name, recorded, stage.parents, stage.data)
    if complete and not replaces:
        done = f"run {stage.config.run!r} already has a complete {stage.name}"
        if reason:
            raise UserError(f"{stage.folder}: {done}, but {reason}: add overwrite=true to make it again")
        raise UserError(f"{stage.folder}: {done}: choose another run=…, or add overwrite=true to replace it")
    if reason and not replaces and has_begun(stage.folder, stage.name):
        cure = "restore them to resume, choose another run=…, or add overwrite=true to start again"
        raise UserError(f"{stage.folder}: {reason}: {cure}")
    if recorded is None or complete or reason:
        present = [*stage.folder.glob("*")]
        strangers = sorted(path.name for path in present if not path.name.startswith("."))
        if strangers and recorded is None and not replaces:
            others = f"has no readable stage.json but other files ({', '.join(strangers[:3])})"
            raise UserError(f"{stage.folder}: {others}: choose another run=…, or add overwrite=true to replace them")
        with writing(stage.folder):
            stage.folder.mkdir(exist_ok=True)
            # the record last, so that an interrupted removal is detected
            for path in sorted(present, key=lambda p: p.name == "stage.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return None
    for path in [*stage.folder.glob(".*.tmp"), *stage.folder.glob("*.jsonl.kept")]:  # a killed attempt left them
        path.unlink(missing_ok=True)
    stage.resumed = has_begun(stage.folder, stage.name)
    stage.seconds_before = float(recorded.get("seconds", 0.0))
    stage.memory = recorded.get("memory", {})
    return recorded if stage.resumed else None


def misfit(config: Config, name: str, recorded: dict, parents: dict[str, str], data: dict[str, str]) -> str | None:
    """Why a recorded stage, complete or not, is not the requested one, or None."""
    if changed := folders.changed_settings(recorded["settings"], identity_of(config, name)):
        return f"{name} was run with other settings ({changed})"
    if others := [parent for parent in parents if recorded["parents"].get(parent) != parents[parent]]:
        return f"{name} was built on another {' and '.join(others)} than the present one"
    return None if recorded["data"] == data else f"{name} was run on other data than the present"


def has_begun(folder: Path, name: str) -> bool:
    """Whether a stage has work to resume from: a whole checkpoint, or a file of its row's `kept_work`."""
    kept = STAGES[name].kept_work if name in STAGES else ()
    return any(folder.glob("checkpoints/*/manifest.json")) or any((folder / path).exists() for path in kept)


def changed_rounding(stage: Stage, recorded: dict) -> str:
    """The settings that a resumed stage reads and that change its rounding, with their values before."""
    before, now = flatten(recorded.get("config")), flatten(stored(asdict(stage.config)))
    groups = (*STAGES[stage.name].groups, "", "sharding", "memory", "launcher")
    rounding = (
        k for k, one in settings_in(Config).items() if one.changes == ROUNDING and k.rpartition(".")[0] in groups
    )
    return "; ".join(f"{k}={now[k]}, was {before[k]}" for k in rounding if before.get(k, now[k]) != now[k])

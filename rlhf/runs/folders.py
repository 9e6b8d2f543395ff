"""Run folders: the output and parents of a stage, and whether it can be resumed. Imports neither torch nor hydra.

    runs/<run>/<stage>/  stage.json    written as "running" when the stage begins and as "complete" when it ends
                         checkpoints/  step-N folders, each trusted only with its manifest, which is written last
                         model/ …      the stage's output, hashed into stage.json

A stage's hash covers its settings, its parents' hashes and its output files, so a parent that is changed or replaced
later is detected.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import platform
import re
import resource
import shutil
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf import __version__
from rlhf.config import Config, ParentsConfig, shape_settings
from rlhf.config.setting import RESULT, ROUNDING, get, settings_in, stored
from rlhf.errors import UserError
from rlhf.files import DISK_ERRORS, disk_error, hash_files, sha256_file, share, write_json
from rlhf.precision import precision_of
from rlhf.processes import is_first
from rlhf.recipe import GOLD_STAGES, ROUND_STAGES, STAGES, ancestors
from rlhf.runs.checkpoints import checkpoint_error, checkpoint_step, checkpoints, prune_checkpoints
from rlhf.runs.lineage import git_state
from rlhf.runs.records import read_record
from rlhf.runs.replacing import beside, settle, swap
from rlhf.terminal import say

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
PAID_STAGES = ("ppo", "rejection")  # they need the reward stage only as a reward source
ROUND = re.compile(r"-round-\d+$")  # the suffix of the runs of earlier labelling rounds


def settings_of(config: Config, stage: str) -> dict[str, Any]:
    """The settings a stage's result depends on, flat: {"sft.lr": 5e-4, …}."""
    flat: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                add(f"{key}.{name}", inner)
        else:
            flat[key] = value

    named = STAGES[stage].settings
    unread = shape_settings() if config.model.pretrained is not None else ()
    for key, stated in settings_in(Config).items():
        if (key in named or key.partition(".")[0] in named) and stated.changes == RESULT and key not in unread:
            add(key, precision_of(config) if key == "precision" else stored(get(config, key)))
    return json.loads(json.dumps(flat, default=str))


def run_folder(config: Config) -> Path:
    """runs_dir/run. Raises: UserError for a run name that is no plain folder name."""
    if not NAME.fullmatch(config.run):
        raise UserError(f"run={config.run!r}: want letters, digits, '.', '_' and '-', at most 100: choose another name")
    return Path(config.runs_dir) / config.run


def stage_folder(config: Config, stage: str) -> Path:
    """The folder of a stage of this run; or of parents.<stage>: another run's name, a run or stage folder."""
    given = getattr(config.parents, stage, None)
    if given is None:
        return run_folder(config) / stage
    if NAME.fullmatch(given) and (Path(config.runs_dir) / given).is_dir():
        return Path(config.runs_dir) / given / stage
    for candidate in (Path(given) / stage, Path(given)):
        if (candidate / "stage.json").exists():
            return candidate
    if (Path(given) / "config.json").is_file() or given.endswith(".gguf"):
        raise UserError(f"parents.{stage}={given}: a pretrained model, and no run: adopt it with `rlhf tokenizer "
                        f"model.pretrained={given}` and `rlhf pretrain model.pretrained={given}`, or in `rlhf pipeline`")  # fmt: skip
    raise UserError(
        f"parents.{stage}={given}: neither a run under {config.runs_dir}/ nor a stage folder: check the name"
    )


def earlier_run(config: Config) -> Config | None:
    """The run of the previous labelling round, with its own label, reward and ppo; None in the first round.

    Raises: UserError if a run has the name of one of its own rounds.
    """
    gold = config.gold
    if not gold.enabled or gold.rounds < 2:
        return None
    base = ROUND.sub("", config.run)
    if base != config.run and int(config.run.rpartition("-")[2]) < gold.rounds:
        raise UserError(f"run={config.run}: {base} has a labelling round of that name: choose another name, or label once, "
                        "with gold.rounds=1")  # fmt: skip
    found = deepcopy(config)
    found.run = f"{base}-round-{gold.rounds - 1}"
    found.gold.comparison_prompts = gold.comparison_prompts // gold.rounds * (gold.rounds - 1)
    found.gold.rounds = gold.rounds - 1
    if gold.early_episodes is not None:
        found.ppo.episodes = min(gold.early_episodes, config.ppo.episodes)
    shared = {stage: getattr(config.parents, stage) or config.run for stage in ancestors("label")}
    found.parents = ParentsConfig(**shared)
    return found


def rounds_before(run: Path) -> list[Path]:
    """The runs of the earlier labelling rounds that a run was built on, the latest first."""
    names = {
        parent.partition("/")[0] for parent in (read_stage(run / "label") or {}).get("parents", {}) if "/" in parent
    }
    found = [run.parent / name for name in names]
    return found + [earlier for folder in found for earlier in rounds_before(folder)]


def refuse_inside_stage(path: Path, key: str) -> None:
    """Raises: UserError if an output path is inside a stage's folder, or contains stages."""
    whole = path.absolute()
    inside = next((p for p in (whole, *whole.parents) if (p / "stage.json").exists()), None)
    if inside is not None:
        raise UserError(f"{key}={path}: is inside the folder of a stage, {inside}: choose another place")
    below = next(whole.glob("*/stage.json"), None) if whole.is_dir() else None
    if below is not None:
        raise UserError(f"{key}={path}: contains stages ({below.parent.name}): choose another place")


def is_needed(config: Config, stage: str) -> bool:
    return config.gold.enabled or stage not in GOLD_STAGES


def pays_itself(config: Config) -> bool:
    """Whether the run's own reward model is a reward source: ppo.rewards is null or contains null."""
    given = config.ppo.rewards
    return given is None or (not isinstance(given, str) and None in list(given))


def hash_of(record: dict) -> str:
    """The hash that children store: settings, parents and output files of a complete stage."""
    basis = {key: record[key] for key in ("stage", "settings", "parents", "data", "files")}
    return hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()


def read_stage(folder: Path) -> dict | None:
    """A stage's record, or None if there is none. Raises: UserError if it is damaged."""
    return read_record(folder / "stage.json", "stage")


def is_complete(folder: Path) -> bool:
    record = read_stage(folder)
    return record is not None and record.get("status") == "complete"


def check_output(folder: Path, stage: str | None = None) -> dict:
    """The record of a complete stage, after checking that its files have the recorded hashes. Raises: UserError otherwise."""
    record = read_stage(folder)
    stage = stage or folder.name
    if record is not None and record.get("stage") != stage:
        raise UserError(f"{folder}: was written by {record.get('stage')}, want a {stage}: point parents.{stage} at one")
    if record is None:
        raise UserError(
            f"{folder}: no finished {stage} there: run `rlhf {stage}` first, or name one with parents.{stage}=…"
        )
    if record.get("status") != "complete":
        raise UserError(f"{folder}: {stage} is not finished: run `rlhf {stage}` again, it resumes")
    if hash_of(record) != record["hash"]:
        raise UserError(f"{folder / 'stage.json'}: changed since {stage} wrote it (its hash is not that of its settings, "
                        f"parents and files): restore it, or run `rlhf {stage} overwrite=true` again")  # fmt: skip
    for name, digest in record["files"].items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing, {stage} wrote it: run `rlhf {stage} overwrite=true` again")
        if sha256_file(path) != digest:
            raise UserError(
                f"{path}: cut short or changed since {stage} wrote it (its sha256 differs from stage.json's): "
                f"restore it, or run `rlhf {stage} overwrite=true` again"
            )
    return record


def collect_parents(config: Config, stage: str) -> dict[str, str]:
    """{parent: hash}. Raises: UserError if a parent is missing, damaged, or was built on other grandparents."""
    records = {}
    for parent in STAGES[stage].parents:
        if is_needed(config, parent) and not (parent == "reward" and stage in PAID_STAGES and not pays_itself(config)):
            folder = stage_folder(config, parent)
            records[parent] = check_output(folder, parent) | {"folder": folder}
    earlier = earlier_run(config) if stage == "label" else None
    if earlier is not None:
        records |= {f"{earlier.run}/{record['stage']}": record for record in check_round(earlier)}
    for parent, record in records.items():
        for grandparent, digest in record["parents"].items():
            if grandparent in records and records[grandparent]["hash"] != digest:
                raise UserError(
                    f"{record['folder']}: built on another {grandparent} ({digest[:8]}) than "
                    f"{records[grandparent]['folder']} ({records[grandparent]['hash'][:8]}): run "
                    f"`rlhf {parent} overwrite=true` again, or point parents.{grandparent} at the one it was built on"
                )
    return {parent: record["hash"] for parent, record in records.items()}


def check_round(earlier: Config) -> list[dict]:
    """The records of the label and PPO stages of the previous labelling round. Raises: UserError if they do not fit."""
    records: dict[str, dict] = {}
    for name in ROUND_STAGES:
        folder = run_folder(earlier) / name
        if not is_complete(folder):
            raise UserError(f"{folder}: no finished {name} of the previous labelling round: `rlhf pipeline` makes it; or "
                            "label once, with gold.rounds=1")  # fmt: skip
        records[name] = check_output(folder, name) | {"folder": folder}
        for parent, digest in records[name]["parents"].items():
            if parent in records and records[parent]["hash"] != digest:
                raise UserError(f"{folder}: built on another {parent} than {records[parent]['folder']}: `rlhf pipeline "
                                "overwrite=true` makes the labelling round again")  # fmt: skip
    wanted, recorded = settings_of(earlier, "label"), records["label"]["settings"]
    if recorded != wanted:
        raise UserError(f"{records['label']['folder']}: the previous labelling round had other settings "
                        f"({differences(recorded, wanted)}): restore them, or choose another run=…")  # fmt: skip
    return [records["label"], records["ppo"]]


def differences(recorded: dict[str, Any], wanted: dict[str, Any]) -> str:
    keys = [k for k in sorted(recorded.keys() | wanted.keys()) if recorded.get(k) != wanted.get(k)]
    shown = ", ".join(f"{k} {recorded.get(k)!r} -> {wanted.get(k)!r}" for k in keys[:4])
    return shown + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


def peak_rss_mb() -> float:
    """Peak resident memory of this process so far, in MB (10^6 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak * (1 if platform.system() == "Darwin" else 1024) / 1e6, 1)


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "trl", "accelerate", "tokenizers", "datasets", "numpy")
    found = {"rlhf": __version__, "python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@dataclass(slots=True)
class Stage:
    """A running stage: its folder, and the contents of its record."""

    config: Config
    name: str
    folder: Path
    parents: dict[str, str]
    data: dict[str, str]
    resumed: bool = False
    seconds_before: float = 0.0  # spent by earlier, interrupted attempts
    started: float = field(default_factory=time.monotonic)
    steps: int | None = None  # total number of steps, once it is known
    writes: bool = True  # only on rank 0, which prints and writes for all ranks
    replaces: Path | None = None  # with overwrite=true the folder that this one replaces when it is complete

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def say(self, text: str) -> None:
        if not self.writes:
            return
        say(f"{self.name}: {text}")

    def elapsed(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def record(self, status: str) -> dict[str, Any]:
        return {
            "stage": self.name, "status": status, "seed": self.config.seed, "run": self.config.run,
            "settings": settings_of(self.config, self.name), "parents": self.parents, "data": self.data,
            "versions": versions(), "git": git_state(), "seconds": round(self.elapsed(), 2), "peak_rss_mb": peak_rss_mb(),
            "steps": self.steps, "config": stored(asdict(self.config)),
        }  # fmt: skip

    def plan(self, steps: int) -> None:
        """Write the total number of optimizer steps (in PPO updates) to stage.json, for `rlhf watch`."""
        self.steps = steps
        self.note_progress()

    def note_progress(self) -> None:
        """Store the seconds spent so far, so that a resumed stage reports its total time."""
        if not self.writes:
            return
        write_json(self.folder / "stage.json", self.record("running"))

    def finish(self, summary: dict[str, float] | None = None) -> None:
        """Hash the output, write the record as complete, and remove the checkpoints that are no longer needed."""
        if not self.writes:
            return
        skip = ("checkpoints", "stage.json", "metrics.jsonl", "samples.jsonl", "config.yaml", "wandb", "tensorboard",
                ".lock")  # fmt: skip
        share(self.folder)
        record = self.record("complete") | {"summary": summary or {}, "files": hash_files(self.folder, skip)}
        record["hash"] = hash_of(record)
        write_json(self.folder / "stage.json", record)
        if self.replaces is not None:
            swap(self.replaces)
            self.folder, self.replaces = self.replaces, None
        else:
            shutil.rmtree(beside(self.folder), ignore_errors=True)
        if self.config.tracking.artifacts and self.config.tracking.kind == "wandb":
            from rlhf.tracking.artifacts import publish

            publish(self.folder, record, self.config.tracking.project)
        self._drop_checkpoints()
        took = f"{record['seconds']:.0f} s, {record['peak_rss_mb']:.0f} MB"
        self.say(f"complete in {took} -> {self.folder}")

    def _drop_checkpoints(self) -> None:
        """Remove the checkpoints of a complete stage, except those of checkpoints.keep_best and keep_every."""
        settings = self.config.checkpoints
        found = checkpoints(self.checkpoints)
        if found and (settings.keep_best or settings.keep_every):
            prune_checkpoints(self.checkpoints, checkpoint_step(found[-1]), replace(settings, keep=0))
            if checkpoints(self.checkpoints):
                return
        shutil.rmtree(self.checkpoints, ignore_errors=True)


@contextlib.contextmanager
def open_stage(config: Config, name: str, data: dict[str, str] | None = None) -> Iterator[Stage]:
    """Start or resume a stage: check the parents, refuse to overwrite, hold a lock while it runs.

    With overwrite=true the stage is written to a folder next to the existing one, which stays until the new one is
    complete.

    Raises: UserError if the stage is complete (and overwrite is false), was started with other settings or is being run
    by another process, if the folder contains other files, if the disk is full, or if a parent does not fit.
    """
    folder = run_folder(config) / name
    parents = collect_parents(config, name)
    place, replaces = (beside(folder), folder) if config.overwrite else (folder, None)
    stage = Stage(config, name, place, parents, data or {}, writes=is_first(), replaces=replaces)
    if not stage.writes:
        yield stage
        return
    with _lock(folder), _lock(stage.folder) if config.overwrite else contextlib.nullcontext():
        settle(folder)
        recorded = _begin_or_resume(stage)
        folders = {p: stage_folder(config, p) if p in STAGES else Path(config.runs_dir) / p for p in parents}
        built_on = ", ".join(f"{folders[p]} ({h[:8]})" for p, h in parents.items())
        stage.say(("resuming" if stage.resumed else "starting") + (f", built on {built_on}" if built_on else ""))
        if recorded is not None:
            _tell_other_rounding(stage, recorded)
        stage.note_progress()
        try:
            _write_config(config, stage.folder)
            yield stage
        except OSError as error:
            _discard_beginning(stage)
            if error.errno in DISK_ERRORS:
                raise disk_error(error, Path(error.filename or folder)) from error
            raise
        except Exception as error:  # libraries report a full disk by other errors than OSError
            _discard_beginning(stage)
            told = checkpoint_error(error, folder)
            if told is error:
                raise
            raise told from error


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder; creates it if necessary. Raises: UserError if another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise disk_error(error, folder) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another process is working on it: wait for it, or choose another run=…"
            ) from None
        yield


def _begin_or_resume(stage: Stage) -> dict | None:
    """Prepare the stage's folder: keep it to resume an interrupted attempt, whose record is returned, or empty it.

    Raises: UserError if the folder may not be replaced.
    """
    recorded = _replacement(stage) if stage.replaces is not None else read_stage(stage.folder)
    misfit = None if recorded is None else _misfit(stage, recorded)
    if recorded is not None and recorded["status"] == "complete":
        raise UserError(
            f"{stage.folder}: run {stage.config.run!r} already has a complete {stage.name}: "
            "choose another run=…, or add overwrite=true to replace it"
        )
    if misfit is not None and has_begun(stage.folder, stage.name):
        raise UserError(f"{stage.folder}: {misfit}, choose another run=…, or add overwrite=true to start again")
    if recorded is None or misfit is not None:
        _empty(stage, replace_others=recorded is not None or stage.replaces is not None)
        return None
    _sweep(stage.folder)
    stage.resumed = True
    stage.seconds_before = float(recorded.get("seconds", 0.0))
    return recorded


def _replacement(stage: Stage) -> dict | None:
    """The record of an interrupted replacement that can be resumed, or None."""
    try:
        recorded = read_stage(stage.folder)
    except UserError:
        return None
    fits = recorded is not None and recorded["status"] == "running" and _misfit(stage, recorded) is None
    return recorded if fits else None


def _misfit(stage: Stage, recorded: dict) -> str | None:
    """Why an interrupted attempt cannot be resumed, and what to do; or None."""
    wanted = settings_of(stage.config, stage.name)
    if recorded["settings"] != wanted:
        return f"was started with other settings ({differences(recorded['settings'], wanted)}): restore them to resume"
    if recorded["parents"] != stage.parents or recorded["data"] != stage.data:
        return "was started with other parents or data: restore them to resume"
    return None


def has_begun(folder: Path, name: str) -> bool:
    """Whether a stage has work to resume from: a whole checkpoint, or a file of its row's `kept_work`."""
    kept = STAGES[name].kept_work if name in STAGES else ()
    return any(folder.glob("checkpoints/*/manifest.json")) or any((folder / path).exists() for path in kept)


def _discard_beginning(stage: Stage) -> None:
    """Remove the folder of a stage that failed before it did anything."""
    left = {path.name for path in stage.folder.iterdir()}
    empty = all(not path.stat().st_size for path in stage.folder.glob("*.jsonl"))
    if not empty or not left <= {"stage.json", "config.yaml", ".lock", "metrics.jsonl", "samples.jsonl"}:
        return
    for folder in (stage.folder, *([] if stage.replaces is None else [stage.replaces])):
        if folder == stage.folder or {path.name for path in folder.iterdir()} <= {".lock"}:
            shutil.rmtree(folder, ignore_errors=True)


def _tell_other_rounding(stage: Stage, recorded: dict) -> None:
    """Print the changed settings that affect only speed, memory and rounding."""
    before, own = flat_settings(recorded.get("config")), STAGES[stage.name].groups
    changed = []
    for key, stated in settings_in(Config).items():
        group, value = key.rpartition(".")[0], stored(get(stage.config, key))
        if (
            stated.changes == ROUNDING
            and (group in (*own, "", "sharding", "launcher"))
            and before.get(key, value) != value
        ):
            changed.append(f"{key}={value}, was {before[key]}")
    if changed:
        stage.say(f"resumes with {'; '.join(changed)}: same computation, different rounding")


def flat_settings(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"sft.lr": …} of nested settings."""
    flat: dict[str, Any] = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        flat |= flat_settings(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _sweep(folder: Path) -> None:
    """Remove temporary files that a killed attempt left."""
    for path in [*folder.glob(".*.tmp"), *folder.glob("*.jsonl.kept")]:
        with contextlib.suppress(OSError):
            path.unlink()


def _empty(stage: Stage, replace_others: bool) -> None:
    """Remove the contents of a stage's folder; the record is removed last, so that an interrupted removal is detected."""
    found = [path for path in stage.folder.iterdir() if path.name != ".lock"]
    strangers = sorted(path.name for path in found if not path.name.startswith("."))
    if strangers and not replace_others:
        raise UserError(
            f"{stage.folder}: has no readable stage.json but other files ({', '.join(strangers[:3])}): choose another "
            f"run=…, or run `rlhf {stage.name} overwrite=true` to replace them"
        )
    try:
        for path in sorted(found, key=lambda p: p.name == "stage.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise disk_error(error, stage.folder) from error


def _write_config(config: Config, folder: Path) -> None:
    """config.yaml: the whole configuration, which `rlhf` can read back."""
    import yaml

    (folder / "config.yaml").write_text(yaml.safe_dump(stored(asdict(config)), sort_keys=False, allow_unicode=True))

"""Run folders: the record, the output and the parents of a stage. Imports neither torch nor hydra, and pydantic only to
read a record.

    runs/<run>/<stage>/  stage.json    written as "running" when the stage begins and as "complete" when it ends
                         checkpoints/  step-N folders, each trusted only with its manifest, which is written last
                         model/ …      the stage's output, hashed into stage.json
    runs/<run>/.<stage>.new/  its unfinished replacement (overwrite=true); the old one stays until this is complete
    runs/<run>/.<stage>.old/  exists only between the two renames of the swap

A stage's hash covers its settings, its parents' hashes and its output files, so that a parent that has changed is
detected.
"""

import hashlib
import json
import re
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf.config import Config, ParentsConfig
from rlhf.config.model import shape_settings
from rlhf.config.precision import precision_of
from rlhf.config.removed import replacement
from rlhf.config.setting import RESULT, flatten, get, listed, settings_in, stored
from rlhf.errors import UserError
from rlhf.recipe import GOLD_STAGES, PARENTS, POLICY_STAGES, RATED_BY, ROUND_STAGES, STAGES, ancestors
from rlhf.system.files import beside, sha256_file

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SCORED_STAGES = ("ppo", "rejection", "evaluate")  # they need the reward stage only as a reward source
ROUND = re.compile(r"-round-\d+$")  # the suffix of the runs of earlier labelling rounds


def identity_of(config: Config, stage: str) -> dict[str, Any]:
    """The settings a stage's result depends on, flat: {"sft.lr": 5e-4, …}."""
    of_stage = STAGES[stage].settings
    unread = shape_settings() if config.model.pretrained is not None else ()
    unread = (*unread, *(() if rates(config, stage) else RATED_BY))
    flat: dict[str, Any] = {}
    for key, setting in settings_in(Config).items():
        if (key in of_stage or key.partition(".")[0] in of_stage) and setting.changes == RESULT and key not in unread:
            flat |= flatten({key: precision_of(config) if key == "precision" else stored(get(config, key))})
    return json.loads(json.dumps(flat, default=str))


def rates(config: Config, stage: str) -> bool:
    """Whether a stage reads the settings of ratings: PPO and rejection sampling only with a rater among their reward sources."""
    rater = any(Path(name or "").name == "rate" for name in reward_sources(config)[0])
    return stage in ("rate", "evaluate") or (rater and stage in SCORED_STAGES)


def run_folder(config: Config) -> Path:
    """runs_dir/run. Raises: UserError for a run name that is not a plain folder name."""
    if not NAME.fullmatch(config.run):
        raise UserError(f"run={config.run!r}: want letters, digits, '.', '_' and '-', at most 100: choose another name")
    return Path(config.runs_dir) / config.run


def existing_run(config: Config) -> Path:
    """As `run_folder`. Raises: UserError also if there is no such run."""
    folder = run_folder(config)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run: check run=… and runs_dir=…")
    return folder


def stage_folder(config: Config, stage: str) -> Path:
    """The folder of a stage of this run; or of parents.<stage>: another run's name, a run or stage folder."""
    given = getattr(config.parents, stage, None)
    if given is None or (NAME.fullmatch(given) and (Path(config.runs_dir) / given).is_dir()):
        return (run_folder(config) if given is None else Path(config.runs_dir) / given) / stage
    for candidate in (Path(given) / stage, Path(given)):
        if (candidate / "stage.json").exists():
            return candidate
    remedy = "a pretrained model is named with model.pretrained"
    if (Path(given) / "config.json").is_file() or given.endswith(".gguf"):
        remedy = f"give model.pretrained={given} instead"
    raise UserError(f"parents.{stage}={given}: neither a run nor a stage folder: {remedy}")


def stages_of(run: Path) -> dict[str, Path]:
    """The folders of a run's stages by name, complete or not; unfinished replacements are left out."""
    folders = (path.parent for path in sorted(run.glob("*/stage.json")))
    return {folder.name: folder for folder in folders if not folder.name.startswith(".")}


def config_of(run: Path) -> Config:
    """A configuration that finds the stages of a run, also those that it took from other runs (`parents.<stage>`).
    Raises: UserError for a damaged record.
    """
    config = Config(run=run.name, runs_dir=str(run.parent))
    for folder in stages_of(run).values():
        parents = ((read_stage(folder) or {}).get("config") or {}).get("parents") or {}
        for stage in parents.keys() & set(PARENTS):
            if parents[stage] is not None and not (run / stage / "stage.json").exists():
                setattr(config.parents, stage, parents[stage])
    return config


def under_way(folder: Path) -> Path:
    """The folder in which the stage is written: that of its replacement, if there is one, else its own."""
    return beside(folder) if (beside(folder) / "stage.json").is_file() else folder


def refuse_inside_stage(path: Path, key: str) -> None:
    """Raises: UserError if an output path is inside a stage's folder, or contains stages."""
    whole = path.absolute()
    for place in (whole, *whole.parents, *(record.parent for record in whole.glob("*/stage.json"))):
        if (place / "stage.json").exists():
            raise UserError(
                f"{key}={path}: is inside the folder of a stage or contains it, {place}: choose another place"
            )


def is_needed(config: Config, stage: str) -> bool:
    """People's labels of a later round come in by the label stage too."""
    return config.gold.enabled or stage not in GOLD_STAGES or (stage == "label" and config.rounds > 1)


def needs_parent(config: Config, stage: str, parent: str) -> bool:
    """Whether a stage reads a parent of its row. `evaluate` measures PPO and the reward model if the run has them."""
    if parent in STAGES[stage].if_there and read_stage(stage_folder(config, parent)) is not None:
        return True
    if stage == "evaluate" and parent == "ppo":
        return False
    if parent == "reward" and stage in SCORED_STAGES:
        return scores_by_own(config) and (stage != "evaluate" or needs_parent(config, stage, "ppo"))
    if parent == "judge":
        return config.judge.model is not None or config.parents.judge is not None
    return is_needed(config, parent)


def scores_by_own(config: Config) -> bool:
    """Whether the run's own reward model is a reward source."""
    return None in reward_sources(config)[0]


def reward_sources(config: Config) -> tuple[list[str | None], list[float]]:
    """ppo.rewards as a list, in which None is the run's own reward model, and one weight for each."""
    names: list[str | None] = listed(config.ppo.rewards) or [None]
    return names, [float(weight) for weight in listed(config.ppo.reward_weights)] or [1.0] * len(names)


def parents_of(config: Config, stage: str) -> list[str]:
    """The stages that a stage reads, in the order of the pipeline, with the policies that it starts from."""
    row = STAGES[stage]
    settings = getattr(config, stage, None)
    named = {getattr(settings, key, None) for key in ("policy", "reference", "teacher")} & set(row.starts_from)
    among = {parent for parent in (*row.parents, *row.if_there) if needs_parent(config, stage, parent)}
    return [parent for parent in STAGES if parent in among | named]


def policy_folder(config: Config, name: str, setting: str = "ppo.policy") -> Path:
    """The stage that ppo.policy or ppo.reference names: of this run, PPO's of the round before, or another run's last one."""
    if name in STAGES["ppo"].starts_from:
        return stage_folder(config, name)
    earlier = earlier_run(config)
    if name == "ppo" and (earlier is not None or config.parents.ppo is not None):
        return stage_folder(config, name) if earlier is None else run_folder(earlier) / name
    for place in (Path(config.runs_dir) / name, Path(name)):
        for folder in (place, *(place / stage for stage in ("ppo", *reversed(STAGES["ppo"].starts_from), "pretrain"))):
            if (read_stage(folder) or {}).get("stage") in POLICY_STAGES:
                return folder
    wanted = f"want {', '.join(STAGES['ppo'].starts_from)}, or another run (or run/stage) with a finished policy"
    raise UserError(f"{setting}={name}: {wanted}: check the name")


def lend_parents(config: Config) -> None:
    """If PPO starts from another run, that run also lends what this one lacks of the stages before PPO."""
    if config.ppo.policy in POLICY_STAGES:
        return
    lender = config_of(policy_folder(config, config.ppo.policy).parent)
    for stage in ancestors("ppo"):
        missing = getattr(config.parents, stage) is None and not (run_folder(config) / stage / "stage.json").exists()
        if missing and ((place := stage_folder(lender, stage)) / "stage.json").exists():
            named = place.parent.parent == Path(config.runs_dir)  # by its run's name it is found from every folder
            setattr(config.parents, stage, place.parent.name if named else str(place))


# --- records ------------------------------------------------------------------------------------------------


def read_record(path: Path, kind: str) -> dict[str, Any] | None:
    """The contents of a run file of one of RECORD_KINDS, or None if there is none. Raises: UserError if it is damaged or cannot be read."""
    from rlhf.runs.run_schemas import RECORD_KINDS
    from rlhf.system.schemas import read_checked

    return read_checked(path, *RECORD_KINDS[kind])


def hash_of(record: dict) -> str:
    """The hash that children store: settings, parents and output files of a complete stage."""
    basis = {key: record[key] for key in ("stage", "settings", "parents", "data", "files")}
    return hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()


def read_stage(folder: Path) -> dict | None:
    """A stage's record, or None if there is none. Raises: UserError if it is damaged."""
    return read_record(folder / "stage.json", "stage")


def is_complete(folder: Path) -> bool:
    return (read_stage(folder) or {}).get("status") == "complete"


def check_output(folder: Path, stage: str | None = None) -> dict:
    """The record of a complete stage whose files have the recorded hashes, and its folder. Raises: UserError otherwise."""
    record = read_stage(folder)
    stage = stage or folder.name
    again = f"run `rlhf {stage} overwrite=true` again"
    if record is not None and record.get("stage") != stage:
        raise UserError(f"{folder}: was written by {record.get('stage')}, want a {stage}: point parents.{stage} at one")
    if record is None:
        make = f"run `rlhf {stage} run={folder.parent.name}` (`rlhf pipeline` runs all that is missing)"
        other = ", or give ppo.rewards=…" if stage == "reward" else ""
        raise UserError(f"{folder}: no finished {stage} there: {make}, or name one with parents.{stage}=…{other}")
    if record.get("status") != "complete":
        raise UserError(f"{folder}: {stage} is not finished: run `rlhf {stage}` again, it resumes")
    if hash_of(record) != record["hash"]:
        raise UserError(f"{folder / 'stage.json'}: changed since {stage} wrote it: restore it, or {again}")
    for name, digest in record["files"].items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing, {stage} wrote it: {again}")
        if sha256_file(path) != digest:
            raise UserError(f"{path}: cut short or changed since {stage} wrote it: restore it, or {again}")
    return record | {"folder": folder}


def collect_parents(config: Config, stage: str) -> dict[str, str]:
    """{parent: hash}. Raises: UserError if a parent is missing, damaged, or was built on other grandparents."""
    records = {parent: check_output(stage_folder(config, parent), parent) for parent in parents_of(config, stage)}
    earlier = earlier_run(config) if stage == "label" else None
    if earlier is not None:
        records |= {f"{earlier.run}/{name}": record for name, record in check_round(earlier).items()}
    check_fit(records)
    hashes = {parent: record["hash"] for parent, record in records.items()}
    for key in ("policy", "reference") if stage == "ppo" else ():
        if (name := getattr(config.ppo, key)) not in STAGES[stage].starts_from:  # of another run or round
            folder = policy_folder(config, name, f"ppo.{key}")
            hashes[f"{folder.parent.name}/{folder.name}"] = check_output(folder, folder.name)["hash"]
    reward = earlier_reward(config) if stage == "reward" else None
    if reward is not None:
        folders = {"reward": reward, "ppo": reward.parent / "ppo"}  # PPO's responses were ranked
        of_round = {name: check_output(folder, name) for name, folder in folders.items()}
        again = "`rlhf pipeline overwrite=true` makes the round again, or set round.later_reward_epochs=null"
        check_fit(of_round, again)
        hashes[f"{reward.parent.name}/reward"] = of_round["reward"]["hash"]
    return hashes


def check_fit(records: dict[str, dict], remedy: str | None = None) -> None:
    """Raises: UserError if one of these stages was built on another one than that among them."""
    for name, record in records.items():
        for parent, digest in record["parents"].items():
            if parent in records and records[parent]["hash"] != digest:
                folder, here = records[parent]["folder"], records[parent]["hash"]
                again = f"run `rlhf {name} overwrite=true` again, or point parents.{parent} at the one it was built on"
                built = f"built on another {parent} ({digest[:8]}) than {folder} ({here[:8]})"
                raise UserError(f"{record['folder']}: {built}: {remedy or again}")


def changed_settings(recorded: dict[str, Any], wanted: dict[str, Any]) -> str:
    """How recorded settings differ from the requested ones, as text; those that are not recorded count as their defaults."""
    defaults = flatten(stored(asdict(Config())))
    recorded = {key: value for key, value in recorded.items() if replacement(key) is None}
    recorded = {key: defaults[key] for key in wanted if key in defaults} | recorded
    keys = [k for k in sorted(recorded.keys() | wanted.keys()) if recorded.get(k) != wanted.get(k)]
    shown = ", ".join(f"{k} {recorded.get(k)!r} -> {wanted.get(k)!r}" for k in keys[:4])
    return shown + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


# --- labelling rounds ---------------------------------------------------------------------------------------


def earlier_run(config: Config) -> Config | None:
    """The run of the previous round, with its own label, reward and ppo; None in the first. Raises: UserError for a round's name."""
    if config.rounds < 2:
        return None
    base = ROUND.sub("", config.run)
    if base != config.run and int(config.run.rpartition("-")[2]) < config.rounds:
        raise UserError(f"run={config.run}: {base} has a round of that name: choose another, or give rounds=1")
    earlier = deepcopy(config)
    earlier.run = f"{base}-round-{config.rounds - 1}"
    earlier.gold.comparison_prompts = config.gold.comparison_prompts // config.rounds * (config.rounds - 1)
    earlier.rounds = config.rounds - 1
    earlier.reward.audit = 0  # its reward model is not audited
    if earlier.rounds == 1:  # no policy and no rankings before it
        earlier.round.keep_rankings = True
        earlier.ppo.policy = "sft" if config.ppo.policy == "ppo" else config.ppo.policy
        earlier.ppo.reference = "sft" if config.ppo.reference == "ppo" else config.ppo.reference
    if config.round.early_episodes is not None:
        earlier.ppo.episodes = min(config.round.early_episodes, config.ppo.episodes)
    parents = {stage: getattr(config.parents, stage) or config.run for stage in ancestors("label")}
    for name in {earlier.ppo.policy, earlier.ppo.reference} & {"rejection", "dpo", "rate"}:
        parents[name] = getattr(config.parents, name)  # the round makes none of its own
    earlier.parents = ParentsConfig(**parents)
    return earlier


def rounds_before(run: Path) -> list[Path]:
    """The runs of the earlier labelling rounds that a run was built on, the latest first."""
    parents = (read_stage(run / "label") or {}).get("parents", {})
    previous = [run.parent / name for name in {parent.partition("/")[0] for parent in parents if "/" in parent}]
    return previous + [earlier for folder in previous for earlier in rounds_before(folder)]


def earlier_reward(config: Config) -> Path | None:
    """The previous labelling round's reward stage, if round.later_reward_epochs is set and training continues from it; else None."""
    anew = config.round.later_reward_epochs is None or config.reward.model is not None or config.lora.rank
    if anew or not is_needed(config, "label"):
        return None
    rounds = rounds_before(stage_folder(config, "label").parent)
    return rounds[0] / "reward" if rounds else None


def check_round(earlier: Config) -> dict[str, dict]:
    """The records of the label and PPO stages of the previous labelling round. Raises: UserError if they do not fit."""
    records: dict[str, dict] = {}
    for name in (stage for stage in ROUND_STAGES if is_needed(earlier, stage)):
        folder = run_folder(earlier) / name
        if not is_complete(folder):
            missing = f"{folder}: no finished {name} of the previous labelling round"
            raise UserError(f"{missing}: `rlhf pipeline` makes it; or give rounds=1")
        records[name] = check_output(folder, name)
    check_fit(records, "`rlhf pipeline overwrite=true` makes the labelling round again")
    labelled = records.get("label")
    if labelled and (changed := changed_settings(labelled["settings"], identity_of(earlier, "label"))):
        came = f"{labelled['folder']}: the previous round had other settings ({changed})"
        raise UserError(f"{came}: restore them, or choose another run")
    return {name: records[name] for name in ("label", "ppo") if name in records}

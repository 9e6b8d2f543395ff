"""`rlhf study`: compares choices, mostly PPO's on the gold world, over several seeds.

    frontier    learned and true reward against sqrt(KL) for a sweep of kl.coef, next to best-of-n (Gao et al. 2022)
    details     one choice changed at a time: critic, whitening, epochs, clipping, ptx, KL control, calibration, averaging, baselines
    prompts     PPO on prompts whose answers the reward model has seen ranked, and on others
    sizes       base, few-shot, SFT, PPO and PPO-ptx at three widths, by InstructGPT's measures (study_sizes.py)
    audit       reward models from more or fewer labels with more or less noise: does their audit predict what PPO gains?
    transfer    what pretraining gives `rlhf classify`: blocks transferred, auxiliary objective, an LSTM instead (study_transfer.py)
    scaling     pretraining at several widths and budgets: the best size by compute (study_scaling.py)

A cell is one PPO run on the parents' finished stages, under runs/<run>/study/<name>/<cell>-seed<n>. In an audit study it also labels,
trains its reward model and is evaluated; in a study of sizes it also pretrains and fine-tunes; in a transfer study it is one fine-tuning by
`rlhf classify`, in a scaling study one pretraining. Complete cells are not run again. The result is runs/<run>/study/<name>.json.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.commands.pipeline import forwarded_overrides, misfit
from rlhf.commands.study_cells import EVAL_PROMPTS, Cell, cell_config, run_cell
from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.errors import UserError
from rlhf.gold.truth import need_truth
from rlhf.recipe import ancestors
from rlhf.runs.folders import collect_parents, is_complete, read_stage, run_folder
from rlhf.runs.sources import reward_folder, reward_sources
from rlhf.system.files import write_json
from rlhf.system.plugins import is_function
from rlhf.system.terminal import say

PARENTS = ancestors("ppo")
LABELLED = ancestors("label")  # the stages that the cells of an audit study share
WITHOUT_TRUTH = ("transfer", "scaling")
FRONTIER_COEFFICIENTS = (0.0, 0.03, 0.1, 0.3)
WITHOUT_CRITIC = ("ppo.responses_per_prompt=4", "ppo.critic_warmup_updates=0", "ppo.shared_critic=false")
# The settings that each cell of `details` changes.
DETAILS: dict[str, list[str]] = {
    "default": [],
    "critic_sft": ["ppo.critic=sft"],
    "critic_random": ["ppo.critic=random"],
    "no_whitening": ["ppo.whiten_advantages=false"],
    "epochs_1": ["ppo.epochs=1"],
    "epochs_4": ["ppo.epochs=4"],
    "no_clip": ["ppo.clip_range=null"],
    "no_clip_epochs_4": ["ppo.clip_range=null", "ppo.epochs=4"],
    "ptx": ["ppo.ptx_coef=1.0", "ppo.ptx_blocks_per_episode=0.25"],
    "adaptive_kl": ["kl.target=1.5", "kl.horizon=512"],
    "no_calibration": ["ppo.calibrated=false"],
    "no_average": ["ppo.ema_decay=null"],
    "reinforce": ["ppo.advantages=reinforce", "ppo.epochs=1", "ppo.clip_range=null", *WITHOUT_CRITIC[1:]],
    "rloo": ["ppo.advantages=rloo", *WITHOUT_CRITIC],
    "grpo": ["ppo.advantages=grpo", *WITHOUT_CRITIC, "kl.penalty=loss"],
}
# The cells of `prompts`: the same, for parents with more prompts than rankings.
PROMPTS = {"default": ["ppo.prompts=ranked"], "unranked": ["ppo.prompts=unranked"]}
# The cells of `audit`, and their common settings: few labels, and a KL coefficient at which a poor reward model does harm.
AUDIT_CELLS = {
    f"labels_{prompts}_noise_{noise}": (f"gold.comparison_prompts={prompts}", f"gold.labeler_noise={noise}")
    for prompts in (100, 300, 1000)
    for noise in (1.0, 2.8)
}
AUDIT_LABELS = ("gold.rounds=1", "gold.comparison_test_prompts=50")
AUDIT_PPO = ("kl.coef=0.03", "kl.target=null", "ppo.eval_every=0")
AUDIT_EVALUATION = ("evaluate.prompts=256", "evaluate.samples=1", "evaluate.best_of=0")
AUDIT_FIXED = (*AUDIT_LABELS, *AUDIT_PPO, *AUDIT_EVALUATION)


@dataclass(frozen=True, slots=True)
class Kind:
    """The needs of a kind of study, and the stages of its cells."""

    needed: str = "reward"  # the last stage that its parents must have
    taken: tuple[str, ...] = PARENTS  # the stages that cells take from them, unless a cell runs one itself
    commands: tuple[str, ...] = ("ppo",)  # the stages that a cell runs itself, or the pipeline
    last: str = "ppo"  # the stage that is complete when the cell is


KINDS = {
    "frontier": Kind(),
    "details": Kind(),
    "prompts": Kind(),
    "sizes": Kind(commands=("pretrain", "sft", "ppo")),
    "audit": Kind("sft", LABELLED, ("pipeline",), "evaluate"),
    "transfer": Kind("pretrain", (*ancestors("pretrain"), "pretrain"), ("classify",), "classify"),
    "scaling": Kind("tokenizer", ancestors("pretrain"), ("pretrain",), "pretrain"),
}


def run(config: Config) -> None:
    """Run the cells that are missing, evaluate them, and write the study's JSON."""
    if config.study.kind is None:
        raise UserError(f"study.kind is not set: want one of {', '.join(KINDS)}")
    if config.study.kind not in WITHOUT_TRUTH:
        need_truth(config, "study")
    cells = make_cells(config, forwarded_overrides())
    from rlhf.commands.study_transfer import LSTM, pretrain_lstm

    for cell in cells:
        if cell.name == LSTM:
            pretrain_lstm(cell)
    missing = cells_to_run(config, cells)
    say_cost(config, cells, missing)
    run_cells(config, cells, missing)
    for name, results in make_results(config, cells).items():
        path = run_folder(config) / "study" / f"{name}.json"
        write_json(path, results)
        say(f"study: {path}")


def make_results(config: Config, cells: list[Cell]) -> dict[str, Any]:
    """{file name: the figures of the finished cells}."""
    from rlhf.commands.study_audit import audit_results
    from rlhf.commands.study_results import details_results, frontier_results
    from rlhf.commands.study_scaling import scaling_results
    from rlhf.commands.study_sizes import size_results
    from rlhf.commands.study_transfer import transfer_results

    kind = str(config.study.kind)
    if kind == "transfer":
        return transfer_results(config, cells)
    makers = {"frontier": frontier_results, "audit": audit_results, "sizes": size_results, "scaling": scaling_results}
    return {kind: makers.get(kind, details_results)(config, cells)}


def run_cells(config: Config, cells: list[Cell], missing: list[Cell]) -> None:
    """Run the missing cells, those that build on another cell after all others. Raises: UserError if one fails."""
    if config.study.kind == "scaling":
        from rlhf.commands.study_scaling import pretrain_cells

        pretrain_cells(cells, missing)
        return
    for builds_on_cell in (False, True):
        batch = [cell for cell in missing if cell.builds_on_cell == builds_on_cell]
        with ThreadPoolExecutor(max_workers=config.study.processes) as pool:
            for code, cell in zip(pool.map(run_cell, batch), batch, strict=True):
                if code:
                    raise UserError(
                        f"{cell.home}: the cell failed with exit code {code}: see {cell.home}.log, "
                        "then run the same command again: finished cells are kept"
                    )


# Overrides that a cell does not inherit: it has its own run, seed and parents.
NOT_FORWARDED = ("study.", "evaluate.", "run=", "runs_dir=", "seed=", "overwrite=", "threads=", "tracking", "parents.")


def make_cells(config: Config, given: list[str]) -> list[Cell]:
    """Every cell of the study: choices x seeds. Raises: UserError for unusable parents or an unknown choice."""
    settings = config.study
    seeds = listed(settings.seeds) or [0, 1, 2]
    names = listed(settings.parents) or [config.run] * len(seeds)
    if len(names) != len(seeds):
        raise UserError(f"study.parents={names}: want one run for each of study.seeds={seeds}")
    parents = [Path(config.runs_dir).absolute() / name for name in names]
    kind = KINDS[str(settings.kind)]
    for parent in parents:
        if not is_complete(parent / kind.needed):
            raise UserError(f"{parent}: has no finished {kind.needed} to build a study on: run `rlhf pipeline` first")
    folder = (run_folder(config) / "study" / str(config.study.kind)).absolute()
    choices = make_choices(config, parents[0])
    shared = [o for o in given if not o.startswith((*NOT_FORWARDED, "ppo.rewards="))] + rewards_by_folder(config)
    threads = config.threads or (1 if settings.processes > 1 else 0)
    cells = []
    for name, changed in choices.items():
        for seed, parent in zip(seeds, parents, strict=True):
            taken = {stage: parent_stage(config, parent, stage) for stage in kind.taken}
            stages = built_on(config, name, seed, folder, taken)
            elsewhere = "reward" in taken and "reward" not in stages and config.ppo.rewards is None
            overrides = [
                *shared,
                *changed,
                *([f"ppo.rewards='{taken['reward']}'"] if elsewhere else []),
                "tracking=jsonl",
                f"runs_dir='{folder}'",
                f"run={name}-seed{seed}",
                f"seed={seed}",
                f"threads={threads}",
                *(f"parents.{stage}='{path}'" for stage, path in stages.items()),
            ]
            commands = tuple(command for command in kind.commands if command not in stages)
            cells.append(Cell(name, seed, parent, folder, tuple(overrides), stages, commands, kind.last))
    return cells


def built_on(config: Config, name: str, seed: int, folder: Path, taken: dict[str, Path]) -> dict[str, Path]:
    """The stages that a cell does not run itself: its parent's; for an LSTM's fine-tuning, the LSTM that the study pretrains."""
    from rlhf.commands.study_sizes import size_stages
    from rlhf.commands.study_transfer import LSTM, lstm_run

    if config.study.kind == "sizes":
        return size_stages(name, seed, folder, taken)
    return taken | {"pretrain": folder / lstm_run(seed) / "pretrain"} if name == LSTM else taken


def make_choices(config: Config, parent: Path) -> dict[str, Sequence[str]]:
    """{name: the overrides} of the choices that the study compares. Raises: UserError for an unknown one."""
    from rlhf.commands.study_scaling import scaling_choices
    from rlhf.commands.study_sizes import size_choices
    from rlhf.commands.study_transfer import transfer_choices

    settings = config.study
    episodes = f"ppo.episodes={settings.updates * config.ppo.episodes_per_update}"
    if settings.kind == "frontier":
        if settings.cells is not None:
            raise UserError(
                "study.cells: study.kind=frontier has no choices: leave it out, or set study.kind=details or audit"
            )
        looks = (f"ppo.eval_prompts={EVAL_PROMPTS}", "ppo.eval_every=2")
        fixed = (episodes, *looks, "kl.target=null", "ppo.ema_decay=null")
        return {f"kl_coef_{coef}": (f"kl.coef={coef}", *fixed) for coef in FRONTIER_COEFFICIENTS}
    offered: Mapping[str, Sequence[str]]
    if settings.kind == "audit":
        offered = {name: (*AUDIT_FIXED, episodes, *changed) for name, changed in AUDIT_CELLS.items()}
    elif settings.kind == "transfer":
        offered = transfer_choices(parent)
    elif settings.kind == "sizes":
        offered = size_choices(parent)
    elif settings.kind == "scaling":
        offered = scaling_choices(config, parent)
    else:
        offered = PROMPTS if settings.kind == "prompts" else DETAILS
    wanted = listed(settings.cells) or list(offered)
    unknown = [name for name in wanted if name not in offered]
    if unknown:
        raise UserError(f"study.cells: {unknown[0]!r}: want some of {', '.join(offered)}")
    return {name: offered[name] for name in wanted}


def rewards_by_folder(config: Config) -> list[str]:
    """The override ppo.rewards with folders in place of run names, because a cell has its own runs_dir."""
    given = config.ppo.rewards
    if given is None:
        return []
    sources = [
        "null" if name is None else f"'{name if is_function(name) else reward_folder(config, name).absolute()}'"
        for name in reward_sources(config)[0]
    ]
    return [f"ppo.rewards={sources[0] if isinstance(given, str) else '[' + ','.join(sources) + ']'}"]


def parent_stage(config: Config, parent: Path, stage: str) -> Path:
    """The folder of a parent's stage: in the parent, or as `parents.<stage>` in the record of its reward model.

    A run's name there is one under runs_dir, and a relative path is from the working directory, as in `stage_folder`.
    """
    inside = parent / stage
    recorded = (read_stage(parent / "reward") or {}).get("config", {}).get("parents", {}).get(stage)
    if recorded is not None and not (inside / "stage.json").exists():
        for candidate in (Path(config.runs_dir) / recorded / stage, Path(recorded) / stage, Path(recorded)):
            if (candidate / "stage.json").exists():
                return candidate.absolute()
    return inside


def cells_to_run(config: Config, cells: list[Cell]) -> list[Cell]:
    """The cells that are missing or incomplete; with overwrite=true also those with other settings, parents or data, which are
    replaced when their new run is complete.

    Raises: UserError for such a cell without overwrite=true.
    """
    missing = []
    for cell in cells:
        folder = cell.home / cell.compared
        recorded, settings = read_stage(folder), cell_config(cell)
        reason = recorded and misfit(settings, cell.compared, recorded, collect_parents(settings, cell.compared))
        if reason and not config.overwrite:
            raise UserError(f"{folder}: {reason}: add overwrite=true to run such cells again, or choose another run=…")
        if reason:
            missing.append(replace(cell, overrides=(*cell.overrides, "overwrite=true")))
        elif not is_complete(cell.home / cell.last):
            missing.append(cell)
    return missing


def say_cost(config: Config, cells: list[Cell], missing: list[Cell]) -> None:
    """Print an estimate of the time of the missing cells, from the time of PPO on the parent."""
    if config.study.kind in WITHOUT_TRUTH:
        what = "fine-tunings" if config.study.kind == "transfer" else "trainings"
        say(f"study: {len(cells)} {what}, {len(cells) - len(missing)} done")
        return
    own_length = config.study.kind not in ("frontier", "audit")
    episodes = config.ppo.episodes if own_length else config.study.updates * config.ppo.episodes_per_update
    record = read_stage(cells[0].parent / "ppo") or {}
    cost = "; the time is unknown, since the parent has no finished PPO" if missing else ""
    if record.get("seconds") and missing:
        per_episode = record["seconds"] / record["settings"]["ppo.episodes"]
        minutes = len(missing) * per_episode * episodes / 60 / config.study.processes
        cost = f"; about {minutes:.0f} minutes of PPO, {config.study.processes} at a time, and the evaluations"
    say(f"study: {len(cells)} runs of PPO with {episodes:,} episodes, {len(cells) - len(missing)} done{cost}")

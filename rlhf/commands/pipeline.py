"""`rlhf pipeline`: all stages in order, each in its own processes. Complete stages are skipped, interrupted ones
resumed.

Imports no torch, so a complete run is recognised in a second.
"""

import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlhf.commands.launch import import_once, run_processes
from rlhf.config import Config
from rlhf.config.commands import SHARED_FLAG
from rlhf.config.setting import get, listed, settings_in, stored
from rlhf.errors import UserError
from rlhf.evaluation.statistics import show as figure_text
from rlhf.recipe import ENDS, ROUND_STAGES, STAGES
from rlhf.report.page import write_report
from rlhf.report.sections import titled
from rlhf.runs import folders, sources
from rlhf.runs.folders import ROUND, is_complete, read_stage, run_folder, stage_folder
from rlhf.runs.remembered import remember, text_of
from rlhf.runs.stage import has_begun, misfit
from rlhf.system.exits import INTERRUPTED, report
from rlhf.system.files import write_json
from rlhf.system.terminal import say

Start = Callable[[Config, str, list[str]], None]
OTHERWISE = "choose another run=…, or add overwrite=true to redo this stage and those that build on it"
LEAST_FREE_BYTES = 200 * 2**20  # with less free space a run would fail later


def run(config: Config, overrides: Sequence[str] = ()) -> None:
    """Run what is missing, then write the report and print a table of all stages. overrides: of the command line, for the stages."""
    folder, started, done = run_folder(config), time.monotonic(), dict[str, str]()
    overrides = [o for o in overrides if not o.startswith("overwrite=")]  # which is decided stage by stage
    overrides += fit_to_data(config)
    check_before(config)
    import_once(["hydra", *(STAGES[stage].module for stage in stages_to_run(config))])
    for stage in stages_to_run(config):
        if stage == "label":
            done |= ensure_rounds(config, overrides)
        done[stage] = ensure_stage(config, stage, overrides)
    if any(state != "complete before" for state in done.values()) or not (folder / "report.html").exists():
        write_report(folder)
    stages = {}
    for stage, state in done.items():
        record = read_stage(folder.parent / stage if "/" in stage else stage_folder(config, stage)) or {}
        stages[stage] = {k: record.get(k) for k in ("seconds", "peak_rss_mb", "hash", "summary")} | {"state": state}
    table = {"run": config.run, "seed": config.seed, "stages": stages, "report": str(folder / "report.html")}
    write_json(folder / "pipeline.json", table)
    show(config, table, time.monotonic() - started)


def stages_to_run(config: Config, last: Sequence[str] = ()) -> list[str]:
    """The stages that a run needs for its `last` ones, if none are given the settings' or the pipeline's; `parents.<stage>` need none."""
    wanted: set[str] = set()

    def want(stage: str) -> None:
        if stage not in wanted and getattr(config.parents, stage, None) is None:
            wanted.add(stage)
            for parent in folders.parents_of(config, stage):
                want(parent)

    for stage in last or listed(config.stages) or [*listed(config.evaluate.baselines), *ENDS]:
        want(stage)
    return [stage for stage in STAGES if stage in wanted]


def fit_to_data(config: Config) -> list[str]:
    """Leave out what the data do not allow, in the configuration; returns the overrides that tell the stages, and says what and why."""
    fitted = []
    adopts = config.model.pretrained is not None and "sft" in stages_to_run(config)
    if adopts and config.sft.epochs and sources.data_source(config, "demonstrations") is None:
        config.sft.epochs, fitted = 0, ["++sft.epochs=0"]  # `++`: no run remembers it, since data may come later
        say("pipeline: no data.demonstrations: the pretrained model is taken as the SFT model")
    learns = folders.scores_by_own(config) and "reward" in stages_to_run(config)
    if config.stages is None and learns and not fitted and sources.data_source(config, "comparisons") is None:
        config.stages = ["sft"]
        say("pipeline: no data.comparisons, and no ppo.rewards: reward model, PPO and evaluation are left out")
    return fitted


def check_before(config: Config) -> None:
    """Check for errors that would otherwise appear minutes later: missing data, a full disk. Raises: UserError."""
    stages = stages_to_run(config)
    needed = {kind for stage in stages for kind in sources.kinds_read(config, stage)}
    measured = "evaluate" in stages and folders.needs_parent(config, "evaluate", "reward")
    if not {"reward", "judge"} & set(stages) and not measured:
        needed.discard("comparisons")  # they are used at most for prompts
    kinds = ("corpus", "demonstrations", "comparisons")
    missing = [kind for kind in kinds if kind in needed and sources.data_source(config, kind) is None]
    if missing:
        names = " and ".join(f"data.{kind}" for kind in missing)
        raise UserError(f"{names} not set: give a file, a folder or a hub id, or use experiment=gold")
    check_settings(config, stages)
    for stage in stages:
        sources.hash_sources(config, stage)  # raises if a file is missing
    for stage, base in (("reward", config.reward.model), ("judge", config.judge.model)):
        if stage not in stages or base is None or is_complete(stage_folder(config, stage)):
            continue
        is_folder = (Path(base) / "config.json").is_file()
        if not is_folder and (Path(base).exists() or sources.hub_folder(base, stage + ".model") is None):
            no = "no folder of a model (with config.json), and no hub id"
            raise UserError(f"{stage}.model: {base}: {no}: check the name")
    folder, data = run_folder(config), config.data
    if not is_complete(folder / "reward"):  # a bad line of the user's data is reported now and not after pretraining
        from rlhf.data.encoding import check_labelers, names_of

        if data.demonstrations is not None:
            sources.read_demonstrations(config)
        if data.comparisons is not None:
            first = replace(config, rounds=1)  # later rounds' comparisons are not there yet
            check_labelers("data.held_out_labelers", names_of(data.held_out_labelers), sources.read_comparisons(first))
        if data.prompts is not None:
            sources.read_prompts(config)
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if (free := shutil.disk_usage(existing).free) < LEAST_FREE_BYTES:
        came = f"{free / 1e6:.0f} MB free, want at least {LEAST_FREE_BYTES / 1e6:.0f}"
        raise UserError(f"{existing}: {came}: free space, or choose another disk with runs_dir=…")


def check_settings(config: Config, stages: Sequence[str]) -> None:
    """Raises: UserError if one of these stages was run with other settings: before another one starts, and the run remembers them."""
    for stage in [] if config.overwrite else stages:
        record = read_stage(folder := stage_folder(config, stage))
        changed = record and folders.changed_settings(record["settings"], folders.identity_of(config, stage))
        if changed and (is_complete(folder) or has_begun(folder, stage)):  # else it starts again
            raise UserError(f"{folder}: {stage} was run with other settings ({changed}): {OTHERWISE}")


def ensure_stage(config: Config, stage: str, overrides: list[str], start: Start | None = None) -> str:
    """Run a stage unless it is complete and matches; returns what was done. start: runs it with these overrides; None: as processes."""
    folder, parents = stage_folder(config, stage), folders.collect_parents(config, stage)
    recorded, reason = read_stage(folder), None
    if recorded is not None and (is_complete(folder) or has_begun(folder, stage)):
        reason = misfit(config, stage, recorded, parents, sources.hash_sources(config, stage))
        if reason is None and recorded["status"] == "complete":
            folders.check_output(folder)
            say(f"{stage}: complete, skipped")
            return "complete before"
        if reason is not None and not config.overwrite:
            raise UserError(f"{folder}: {reason}: {OTHERWISE}")
    if stage == "label":
        ensure_tasks(config, overrides)
    (start or run_stage)(config, stage, [*overrides, *(["overwrite=true"] if reason else [])])
    return "redone" if reason else "resumed" if recorded is not None else "done"


def ensure_rounds(config: Config, overrides: list[str]) -> dict[str, str]:
    """The earlier labelling rounds: label, reward model and PPO, each in a separate run."""
    earlier = folders.earlier_run(config)
    if earlier is None:
        return {}
    values = {key: (get(earlier, key), get(config, key)) for key in settings_in(Config)}
    changed = {
        key: text_of(stored(now))
        for key, (now, before) in values.items()
        if now != before or (key.startswith("parents.") and now is not None)  # parents are found, not only given
    }
    overrides = with_changes(overrides, changed)
    done = ensure_rounds(earlier, overrides)
    say(f"labelling round {earlier.rounds} and its policy: {run_folder(earlier)}")
    stages = [stage for stage in ROUND_STAGES if folders.is_needed(earlier, stage)]
    return done | {f"{earlier.run}/{stage}": ensure_stage(earlier, stage, overrides) for stage in stages}


def with_changes(overrides: list[str], changed: dict[str, str]) -> list[str]:
    kept = [text for text in overrides if text.partition("=")[0] not in changed]
    return [*kept, *(f"{key}={text}" for key, text in changed.items())]


def ensure_tasks(config: Config, overrides: list[str]) -> None:
    """The tasks of a round of people's labels, in the run's folder `sample`: answers of the policy of the round before."""
    earlier = folders.earlier_run(config)
    if earlier is None or config.gold.enabled or (out := run_folder(config) / "sample").exists():
        return
    settings = {
        "run": config.run,
        "rounds": str(earlier.rounds),  # whose comparisons say which prompts are labelled
        **dict.fromkeys(("parents.label", "parents.ppo", "parents.reward"), earlier.run),
        "sample.stage": "ppo",
        "sample.out": f"'{out}'",
    }
    whole = run_folder(replace(config, run=ROUND.sub("", config.run)))
    whole.mkdir(parents=True, exist_ok=True)  # with stages of other runs it has none of its own yet
    remember(whole)  # the same command goes on after the labels
    run_stage(config, "sample", with_changes(overrides, settings))


def run_stage(config: Config, stage: str, overrides: list[str]) -> None:
    """Run the stage as child processes. Exits with the code of the one that fails."""
    code = run_processes([stage, SHARED_FLAG, *overrides], config.processes_of(stage), config.threads)
    why, number = f"stopped in {stage}: correct the error above and run the same command again", code - 128
    if number == signal.SIGKILL:
        memory = (read_stage(stage_folder(config, stage)) or {}).get("memory") or {}
        needed = f" (it counted on {memory['needs_gb']:.1f} of {memory['budget_gb']:.1f} GB)" if memory else ""
        why = f"{stage} was killed, as the system does with the largest process if memory runs out{needed}: end other programs, "
        why += "or set memory.budget_gb to less, data.max_tokens or lora.rank=16, and run the same command again to resume it"
    elif number > 0:  # it could not print an error itself
        why = f"{stage} was ended by signal {number} ({signal.strsignal(number)}): run the same command again to resume it"
    if code not in (0, INTERRUPTED):
        report(why)
    if code:
        sys.exit(code)


def show(config: Config, table: dict, seconds: float) -> None:
    width = max(map(len, table["stages"])) + 2
    say()
    say(f"{'stage':<{width}}{'seconds':>9}{'peak MB':>9}  {'state':<16}result")
    for name, row in table["stages"].items():
        summary = list((row["summary"] or {}).items())
        figures = ", ".join(f"{key.split('/')[-1]} {value:,.4g}" for key, value in summary[:3])
        say(f"{name:<{width}}{row['seconds'] or 0:>9.0f}{row['peak_rss_mb'] or 0:>9.0f}  {row['state']:<16}{figures}")
    total = sum(row["seconds"] or 0 for row in table["stages"].values())
    say(f"{'total':<{width}}{total:>9.0f}{'':>9}  this call {seconds:.0f} s")
    results = folders.read_record(run_folder(config) / "evaluate" / "results.json", "results") or {}
    if gold := results.get("gold"):
        wins, greedy = figure_text(gold["win_rate_vs_sft"]), gold["win_rate_greedy"]["value"]
        what = f"win rate of {titled(results.get('policy', 'ppo'))} over SFT by the {gold['truth']}"
        say()
        say(f"{what} {wins} at temperature 1, {greedy:.3f} greedy; KL {results['kl_to_sft_nats']:.2f} nats")
    say(f"report: {table['report']}")

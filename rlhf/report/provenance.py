"""The report's last part: differing settings, each stage's versions, data and final numbers, and what is missing."""

from dataclasses import asdict
from typing import Any

from rlhf.config import Config
from rlhf.config.setting import NOTHING, flatten, settings_in
from rlhf.recipe import GOLD_STAGES, PIPELINE
from rlhf.report.drawing import MAX_POINTS, format_value
from rlhf.report.samples import MORE_SAMPLES, SHOWN_SAMPLES
from rlhf.runs.run_files import RunFiles, entries, entry_at, is_figure, visible


def settings_of_run(run: RunFiles) -> dict[str, Any]:
    """Every setting of a run. If stages were run with different ones, those in a stage's own identity count."""
    settings: dict[str, Any] = {}
    for stage in run.stages.values():
        settings |= flatten(stage.record.get("config"))
    for stage in run.stages.values():
        identity = flatten(stage.record.get("settings"))
        settings |= {key: value for key, value in identity.items() if key.partition(".")[0] == stage.name}
    # Paths, display and the like affect no result.
    unimportant = {key for key, stated in settings_in(Config).items() if stated.changes == NOTHING}
    return {key: value for key, value in settings.items() if key not in unimportant}


def make_differences(runs: list[RunFiles]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each column): for several runs those that differ among them, for one those that differ from the schema."""
    columns = [settings_of_run(run) for run in runs]
    keys = {key for column in columns for key in column}
    if len(runs) == 1:
        columns.insert(0, flatten(asdict(Config())))
        keys &= columns[0].keys()  # a setting that is newer or older than the run is not compared
    rows = []
    for key in sorted(keys):
        values = [column.get(key, "–") for column in columns]
        if any(value != values[0] for value in values[1:]):
            rows.append((visible(key, 100), [show_value(value) for value in values]))
    return rows


def show_value(value: Any, limit: int = 120) -> str:
    return format_value(value) if isinstance(value, float) and is_figure(value) else visible(value, limit)


def make_skipped(run: RunFiles) -> list[str]:
    """The parts that this page does not show, and why."""
    notes = []
    missing = [name for name in GOLD_STAGES if name in PIPELINE and name not in run.stages]
    if missing:
        notes.append(f"{' and '.join(missing)}: not in this run, which reads its data from files.")
    for name, stage in run.stages.items():
        if stage.status != "complete":
            notes.append(f"{name}: {stage.status}" + (f", at step {stage.last_step:,.0f}." if stage.last_step else "."))
        if stage.unreadable:
            notes.append(
                f"{name}: {stage.unreadable:,} lines of metrics.jsonl cannot be read and are missing from its curves."
            )
        if stage.gaps:
            notes.append(f"{name}: {stage.gaps:,} values that were not finite are gaps in its curves.")
    notes += [visible(text, 300) for text in run.damage]
    if not run.results:
        notes.append("No evaluation: win rates, calibration, histograms and rank agreement are missing.")
    elif entry_at(run.results, "gold") is None:
        notes.append("No true score: win rates and parts by it are missing; the reward model's are shown.")
    before = [name for name, row in entries(run.pipeline, "stages") if entry_at(row, "state") == "complete before"]
    if before:
        names = ", ".join(visible(name, 60) for name in before)
        notes.append(f"The last call of the pipeline skipped what was complete: {names}.")
    if len(run.samples) > SHOWN_SAMPLES + MORE_SAMPLES:
        notes.append(f"{SHOWN_SAMPLES + MORE_SAMPLES} of {len(run.samples):,} held-out prompts are shown.")
    if any(len(xs) > MAX_POINTS for stage in run.stages.values() for xs, _ in stage.points.values()):
        notes.append(f"Curves of more than {MAX_POINTS} points are thinned; every peak is kept.")
    return notes


def make_provenance(run: RunFiles) -> dict[str, Any]:
    """What is needed to reproduce the run: settings, versions, data, code."""

    def shown(record: dict[str, Any], key: str) -> list[tuple[str, str]]:
        return [(visible(name), show_value(value, 300)) for name, value in entries(record, key)]

    versions: dict[str, dict[str, list[str]]] = {}
    data: dict[tuple[str, str], list[str]] = {}
    configs: dict[str, list[str]] = {}
    for name, stage in run.stages.items():
        for package, version in shown(stage.record, "versions"):
            versions.setdefault(package, {}).setdefault(version, []).append(name)
        git = stage.record.get("git")
        if isinstance(git, dict) and isinstance(git.get("commit"), str):
            commit = visible(git["commit"][:12]) + (" and changes that are not committed" if git.get("dirty") else "")
            versions.setdefault("code (git)", {}).setdefault(commit, []).append(name)
        for entry in shown(stage.record, "data"):
            data.setdefault(entry, []).append(name)
        if stage.config:
            configs.setdefault(stage.config, []).append(name)
    stages = [(name, shown(s.record, "settings"), shown(s.record, "summary")) for name, s in run.stages.items()]
    return {
        "run": run.name,
        "versions": sorted(versions.items()),
        "data": sorted(data.items()),
        "configs": [(", ".join(names), visible(text, 50_000)) for text, names in configs.items()],
        "stages": [(name, settings, summary) for name, settings, summary in stages if settings or summary],
    }

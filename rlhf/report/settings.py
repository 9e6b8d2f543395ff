"""The report's last part: differing settings, each stage's cost, what is missing, and the provenance."""

from dataclasses import asdict
from typing import Any

from rlhf.config import Config
from rlhf.config.setting import NOTHING, flatten, settings_in
from rlhf.recipe import GOLD_STAGES, PIPELINE
from rlhf.report.figures import MAX_POINTS, format_value
from rlhf.report.samples import MORE_SAMPLES, SHOWN_SAMPLES
from rlhf.runs.run_files import RunFiles, entries, get, is_number, number, visible


def settings_of(run: RunFiles) -> dict[str, Any]:
    """Every setting of a run. If stages were run with different ones, those in a stage's own identity count."""
    settings: dict[str, Any] = {}
    for stage in run.stages.values():
        settings |= flatten(stage.record.get("config"))
    for stage in run.stages.values():
        identity = flatten(stage.record.get("settings"))
        settings |= {key: value for key, value in identity.items() if key.partition(".")[0] == stage.name}
    return only_settings(settings)


def only_settings(flat: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that do not affect a result, such as paths and display."""
    unimportant = {key for key, stated in settings_in(Config).items() if stated.changes == NOTHING}
    return {key: value for key, value in flat.items() if key not in unimportant}


def make_differences(runs: list[RunFiles]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each column): for several runs those that differ among them, for one those that differ from the schema."""
    columns = [settings_of(run) for run in runs]
    if len(runs) == 1:
        # A setting that is newer than the run is not shown.
        ours = {key: value for key, value in only_settings(flatten(asdict(Config()))).items() if key in columns[0]}
        columns = [ours, *columns]
    keys = sorted({key for column in columns for key in column})
    rows = []
    for key in keys:
        values = [column.get(key, "–") for column in columns]
        if any(value != values[0] for value in values[1:]):
            rows.append((visible(key, 100), [show_value(value) for value in values]))
    return rows


def show_value(value: Any, limit: int = 120) -> str:
    return format_value(value) if isinstance(value, float) and is_number(value) else visible(value, limit)


def make_skipped(run: RunFiles) -> list[str]:
    """The parts that this page does not show, and why."""
    notes = []
    missing = [name for name in GOLD_STAGES if name in PIPELINE and name not in run.stages]
    if missing:
        notes.append(f"{' and '.join(missing)}: not in this run, which reads its data from files.")
    for name, stage in run.stages.items():
        if stage.status == "not started":
            notes.append(f"{name}: not started.")
        elif stage.status == "unfinished":
            steps = [xs[-1] for xs, _ in stage.points.values()]
            notes.append(f"{name}: unfinished" + (f", at step {max(steps):,.0f}." if steps else "."))
        if stage.unreadable:
            notes.append(
                f"{name}: {stage.unreadable:,} lines of metrics.jsonl cannot be read and are missing from its curves."
            )
        if stage.gaps:
            notes.append(f"{name}: {stage.gaps:,} values that were not finite are gaps in its curves.")
    notes += [visible(text, 300) for text in run.damage]
    if not run.results:
        notes.append("No evaluation: win rates, calibration, histograms and rank agreement are missing.")
    elif get(run.results, "gold") is None:
        notes.append("No true score: win rates and parts by it are missing; the reward model's are shown.")
    before = [name for name, row in entries(run.pipeline, "stages") if get(row, "state") == "complete before"]
    if before:
        notes.append(
            f"The last call of the pipeline skipped what was complete: {', '.join(visible(n, 60) for n in before)}."
        )
    if len(run.samples) > SHOWN_SAMPLES + MORE_SAMPLES:
        notes.append(f"{SHOWN_SAMPLES + MORE_SAMPLES} of {len(run.samples):,} held-out prompts are shown.")
    longest = max((len(xs) for stage in run.stages.values() for xs, _ in stage.points.values()), default=0)
    if longest > MAX_POINTS:
        notes.append(f"Curves of more than {MAX_POINTS} points are thinned; every peak is kept.")
    return notes


def make_provenance(run: RunFiles) -> dict[str, Any]:
    """What is needed to reproduce the run: settings, versions, data, code."""
    versions: dict[str, dict[str, list[str]]] = {}
    data: dict[tuple[str, str], list[str]] = {}
    configs: dict[str, list[str]] = {}
    for name, stage in run.stages.items():
        for package, version in shown_entries(stage.record, "versions"):
            versions.setdefault(package, {}).setdefault(version, []).append(name)
        git = stage.record.get("git")
        if isinstance(git, dict) and isinstance(git.get("commit"), str):
            commit = visible(git["commit"][:12]) + (" and changes that are not committed" if git.get("dirty") else "")
            versions.setdefault("code (git)", {}).setdefault(commit, []).append(name)
        for file, digest in shown_entries(stage.record, "data"):
            data.setdefault((file, digest), []).append(name)
        if stage.config:
            configs.setdefault(stage.config, []).append(name)
    figures = [
        (name, shown_entries(stage.record, "settings"), shown_entries(stage.record, "summary"))
        for name, stage in run.stages.items()
    ]
    return {
        "run": run.name,
        "versions": sorted(versions.items()),
        "data": sorted(data.items()),
        "configs": [(", ".join(names), visible(text, 50_000)) for text, names in configs.items()],
        "stages": [(name, settings, summary) for name, settings, summary in figures if settings or summary],
    }


def shown_entries(record: dict[str, Any], key: str) -> list[tuple[str, str]]:
    return [(visible(name), show_value(value, 300)) for name, value in entries(record, key)]


def total_seconds(run: RunFiles) -> float:
    return sum(number(stage.record, "seconds") or 0.0 for stage in run.stages.values())

"""The report's sections below the curves: tables of the evaluation, answers side by side and during PPO, settings,
versions, data.

The texts of models are untrusted: the template escapes them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rlhf.config import Config
from rlhf.config.setting import NOTHING, flatten, settings_in
from rlhf.recipe import BASELINES
from rlhf.report.pictures import spread
from rlhf.runs.progress import format_figure
from rlhf.runs.run_files import (
    RunFiles,
    decimal,
    entries,
    entry_at,
    is_figure,
    number_at,
    rows_of,
    visible,
    with_interval,
)

MODELS = ("base", "sft", "ppo", *BASELINES)
TITLES = {"sft": "SFT", "ppo": "PPO", "dpo": "DPO", "ci95": "95% interval"}
EVALUATIONS = {  # the settings evaluate.<name>
    "pairs": "The reward model on preference files",
    "judge": "Judged by an endpoint",
    "shots": "In-context learning",
    "labels": "People",
}
NAMES = ("pair", "name", "gap", "shots", "n", "text")  # the key that names a row of a list, the first that it has
ELSEWHERE = ("verdict", "calibration", "seconds", "peak_rss_mb")  # figures with a place of their own on the page
MOST_COLUMNS = 6
MOST_SAMPLES = 24  # prompts with the responses of the models side by side
ROLLOUT_PROMPTS, ROLLOUT_STEPS = 6, 6


class Table(NamedTuple):
    """A table of text, whose first column names the rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    code: bool = False  # whether the cells are set as code


class Section(NamedTuple):
    title: str
    lines: Sequence[tuple[str, str]]  # (in bold, text)
    tables: Sequence[Table]


def titled(key: str) -> str:
    return TITLES.get(key, visible(key.replace("_", " "), 100))


def is_cell(value: Any) -> bool:
    """Whether a value of a results file is one figure or word."""
    return value is None or isinstance(value, str | int | float) or "value" in dict(entries(value))


def cell(value: Any) -> str:
    """A figure with its interval, a count, a word, or a dash."""
    if isinstance(value, str | bool):
        return visible(value, 100)
    number, low, high = with_interval(value)
    shown = f"{number:,}" if isinstance(number, int) else decimal(number)
    return shown if low is None else f"{shown} ({decimal(low)} – {decimal(high)})"


def tables_of(title: str, tree: Any) -> Iterator[Table]:
    """All figures of a part of a results file: single ones below each other, mappings of like figures as the rows of one table."""
    if isinstance(tree, list):
        named = []
        for row in rows_of({"rows": tree}, "rows"):
            key = next((name for name in NAMES if name in row), "")
            name = " over ".join(row[key]) if key == "pair" else titled(str(row.get(key, "")))
            named.append((name, {other: value for other, value in row.items() if other != key}))
    else:
        named = [(titled(key), value) for key, value in entries(tree) if key not in ELSEWHERE]
    if single := [[name, cell(value)] for name, value in named if value is not None and is_cell(value)]:
        yield Table(title, (), single)
    groups: list[list[tuple[str, Any]]] = []  # rows that share a column; others stand alone
    for name, value in named:
        if is_row(value) and (found := [group for group in groups if value.keys() & columns_of(group)]):
            found[0].append((name, value))
        elif not is_cell(value):
            groups.append([(name, value)])
    for group in groups:
        name, value = group[0]
        if len(group) == 1 and not isinstance(tree, list):
            yield from tables_of(f"{title}: {name}", value)
            continue
        columns = columns_of(group)
        cells = [["", *map(titled, columns)]]
        cells += [[name, *(cell(row.get(key)) for key in columns)] for name, row in group]
        if len(columns) > max(MOST_COLUMNS, len(group)):
            cells = [[*column] for column in zip(*cells, strict=True)]
        yield Table(title, cells[0], cells[1:])


def is_row(value: Any) -> bool:
    return isinstance(value, dict) and not is_cell(value) and all(map(is_cell, value.values()))


def columns_of(group: Sequence[tuple[str, Any]]) -> dict[str, None]:
    return dict.fromkeys(key for _, row in group if is_row(row) for key in row)


def make_evaluation(run: RunFiles) -> list[Section]:
    """The sections of tables: the audit, the labelled task, the evaluation and the others."""
    task = [*tables_of("Held-out examples", run.labelled)]
    names = [visible(name, 40) for name, _ in entries(run.labelled, "classes")]
    if isinstance(confusion := entry_at(run.labelled, "confusion"), list) and len(confusion) == len(names):
        matrix = [[name, *map(str, row)] for name, row in zip(names, confusion, strict=True) if isinstance(row, list)]
        task.append(Table("Label (down) against prediction (across)", ["", *names], matrix))
    others = [table for name, title in EVALUATIONS.items() for table in tables_of(title, run.evaluations.get(name))]
    return [
        Section("Can this reward model be trusted?", audit_lines(run.audit), [*tables_of("Audit", run.audit)]),
        Section("Labelled task", [], task),
        Section("", [], [policies_table(run.results), *tables_of("Evaluation", run.results)]),
        Section("Benchmarks, judges, people and preference files", [], others),
    ]


def judge_name(results: dict[str, Any]) -> str:
    return visible(entry_at(results, "gold", "truth") or "gold judge", 60)


def main_policy(results: dict[str, Any]) -> str:
    """The policy whose figures results.json gives without a name: PPO's, if there is one."""
    return str(results.get("policy") or "ppo")


def policies_table(results: dict[str, Any]) -> Table:
    """PPO beside its baselines; empty without baselines."""
    columns = {"reward": "reward", "KL to SFT, nats": "kl", "win rate over SFT, reward model": "rm_win_rate_vs_sft",
               "true win rate": "win_rate_vs_sft", "true score": "true"}  # fmt: skip
    rows: list[tuple[str, dict[str, Any]]] = []
    if baselines := entries(results, "baselines"):
        ppo = results | {"win_rate_vs_sft": entry_at(results, "gold", "win_rate_vs_sft")}
        for name, tree in [("sft", {}), (main_policy(results), ppo), *baselines]:
            true = entry_at(results, "gold", "score", name) or entry_at(results, "gold", "mean_score", name)
            found = {"kl": entry_at(tree, "kl_to_sft_nats"), "reward": entry_at(results, "reward", name), "true": true}
            rows.append((titled(name), dict(entries(tree)) | found))
        picked = entries(results, "generate_and_rate", "picked")
        for title, best in [("best of", entry_at(results, "best_of_n")), *picked]:
            if n := number_at(best, "n"):
                true = entry_at(best, "score") or entry_at(best, "gold")
                of_sft, by_reward = title in ("best of", "sft_rated"), title in ("best of", "ppo_best_of_n")
                kl = best.get("kl_bound_nats") if of_sft else None  # the bound is to the policy that was sampled
                reward = best.get("reward") if by_reward else None  # a rater's score has another unit
                rows.append((f"{titled(title)} {n:g}", best | {"kl": kl, "reward": reward, "true": true}))
    cells = [[name, *(cell(row.get(key)) for key in columns.values())] for name, row in rows]
    return Table("PPO and its baselines, held-out prompts", ("policy", *columns), cells)


def audit_lines(audit: dict[str, Any]) -> list[tuple[str, str]]:
    """The verdict with the labels to collect, then its reasons."""
    decision = entry_at(audit, "verdict", "decision")
    if not isinstance(decision, str):
        return []
    ceiling, labels, reasons = (entry_at(audit, "verdict", key) for key in ("ceiling", "labels", "reasons"))
    limit = f" of {ceiling:g} nats" if is_figure(ceiling) else ""
    collect = visible("; ".join(map(str, labels)), 1000) if isinstance(labels, list) else ""
    said = [("", visible(str(reason), 300)) for reason in reasons] if isinstance(reasons, list) else []
    return [(visible(decision, 100) + limit, collect), *said]


def make_rollouts(run: RunFiles) -> list[list[dict[str, Any]]]:
    """Answers to the first few fixed prompts during PPO, each at a few steps: rows of ppo/samples.jsonl, by prompt."""
    prompts: dict[str, list[dict[str, Any]]] = {}
    for row in run.stages["ppo"].samples:
        if is_figure(row.get("step")):
            prompts.setdefault(str(row.get("id")), []).append(row)
    # Prompts with many answers come first: those of rollouts seldom have two.
    often = sorted(prompts.values(), key=lambda rows: -len(rows))[:ROLLOUT_PROMPTS]
    return [spread(rows, ROLLOUT_STEPS) for rows in often]


def total(gold: Any) -> float | None:
    """The judge's score of a response, which may be given in parts."""
    return number_at(gold, "total") if isinstance(gold, dict) else number_at(gold)


def make_differences(run: RunFiles) -> Table:
    """The settings that differ from the schema's defaults; one that is newer or older than the run is not compared. If
    stages were run with different ones, those in a stage's own identity count.
    """
    ours: dict[str, Any] = {}
    for stage in run.stages.values():
        ours |= flatten(stage.record.get("config"))
    for name, stage in run.stages.items():
        identity = flatten(stage.record.get("settings"))
        ours |= {key: value for key, value in identity.items() if key.partition(".")[0] == name}
    usual, stated = flatten(asdict(Config())), settings_in(Config)  # paths, display and the like change nothing
    compared = (key for key in sorted(usual.keys() & ours.keys()) if stated[key].changes != NOTHING)
    rows = [[key, show_value(usual[key]), show_value(ours[key])] for key in compared if usual[key] != ours[key]]
    return Table("", ["setting", "papers", "this run"], rows, code=True)


def show_value(value: Any) -> str:
    return format_figure(value) if isinstance(value, float) and is_figure(value) else visible(value, 120)


def make_provenance(run: RunFiles) -> dict[str, Any]:
    """What is needed to reproduce the run: versions and data, each with the stages that used it; configs."""
    versions: dict[tuple[str, str], list[str]] = {}
    data: dict[tuple[str, str], list[str]] = {}
    configs: dict[str, list[str]] = {}
    for name, stage in run.stages.items():
        found = entries(stage.record, "versions")
        if isinstance(commit := entry_at(stage.record, "git", "commit"), str):
            changed = " and changes that are not committed" if entry_at(stage.record, "git", "dirty") else ""
            found.append(("code (git)", commit[:12] + changed))
        for used, shown in ((versions, found), (data, entries(stage.record, "data"))):
            for key, value in shown:
                used.setdefault((visible(key), visible(value, 300)), []).append(name)
        if stage.config:
            configs.setdefault(stage.config, []).append(name)
    parts = [
        (title, Table("", (*about, "used by"), [[*entry, ", ".join(names)] for entry, names in sorted(used.items())]))
        for title, *about, used in (("Versions", "package", "version", versions), ("Data", "file", "sha256", data))
        if used
    ]
    shown_configs = [(", ".join(names), visible(text, 50_000)) for text, names in configs.items()]
    return {"parts": parts, "configs": shown_configs}

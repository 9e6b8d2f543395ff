"""The report's sections below the curves: tables of the evaluation, answers side by side and during PPO, settings, versions, data.

The texts of models are untrusted: the template escapes them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rlhf.config import Config
from rlhf.config.setting import NOTHING, flatten, settings_in
from rlhf.recipe import BASELINES, GOLD_STAGES, PIPELINE
from rlhf.report.pictures import format_value, spread
from rlhf.runs.run_files import (
    RunFiles,
    decimal,
    entries,
    entry_at,
    is_figure,
    number_at,
    prompt_text,
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
    "benchmarks": "Benchmarks (lm-eval)",
    "labels": "People",
}
NAMES = ("pair", "name", "gap", "shots", "n", "text")  # the key that names a row of a list, the first that it has
ELSEWHERE = ("verdict", "calibration", "seconds", "peak_rss_mb")  # figures with a place of their own on the page
MOST_COLUMNS = 6
SHOWN_SAMPLES, MORE_SAMPLES = 4, 20
ROLLOUT_PROMPTS, ROLLOUT_STEPS = 6, 6
MAX_TOKENS = 400
# The nats of a token from which each of the five shades begins.
SHADES = (0.05, 0.2, 0.5, 1.0, 2.0)


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


# --- figures of JSON files as tables ------------------------------------------------------------------------


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
        cells = [
            ["", *map(titled, columns)],
            *([name, *(cell(row.get(key)) for key in columns)] for name, row in group),
        ]
        if len(columns) > max(MOST_COLUMNS, len(group)):
            cells = [[*column] for column in zip(*cells, strict=True)]
        yield Table(title, cells[0], cells[1:])


def is_row(value: Any) -> bool:
    return isinstance(value, dict) and not is_cell(value) and all(map(is_cell, value.values()))


def columns_of(group: Sequence[tuple[str, Any]]) -> dict[str, None]:
    return dict.fromkeys(key for _, row in group if is_row(row) for key in row)


def make_evaluation(run: RunFiles) -> dict[str, Any]:
    """One run's sections of tables: its audit, its labelled task, its evaluation and the others."""
    external = [tables_of(title, run.evaluations.get(name)) for name, title in EVALUATIONS.items()]
    evaluated = [table for table in (policies_table(run.results),) if table.rows]
    return {
        "run": run.name,
        "sections": [
            Section("Can this reward model be trusted?", audit_lines(run.audit), [*tables_of("Audit", run.audit)]),
            Section(
                "Labelled task", [], [*tables_of("Held-out examples", run.labelled), *confusion_table(run.labelled)]
            ),
            Section("", [], [*evaluated, *tables_of("Evaluation", run.results)]),
            Section(
                "Benchmarks, judges, people and preference files",
                [],
                [table for tables in external for table in tables],
            ),
        ],
        "evaluated": bool(run.results),
    }


def judge_name(results: dict[str, Any]) -> str:
    return visible(entry_at(results, "gold", "truth") or "gold judge", 60)


def policies_table(results: dict[str, Any]) -> Table:
    """PPO beside its baselines; empty without baselines."""
    columns = {"reward": "reward", "KL to SFT, nats": "kl", "win rate over SFT, reward model": "rm_win_rate_vs_sft",
               "true win rate": "win_rate_vs_sft", "true score": "true"}  # fmt: skip
    rows: list[tuple[str, dict[str, Any]]] = []
    if baselines := entries(results, "baselines"):
        ppo = results | {"win_rate_vs_sft": entry_at(results, "gold", "win_rate_vs_sft")}
        for name, tree in [("sft", {}), ("ppo", ppo), *baselines]:
            true = entry_at(results, "gold", "score", name) or entry_at(results, "gold", "mean_score", name)
            found = {"kl": entry_at(tree, "kl_to_sft_nats"), "reward": entry_at(results, "reward", name), "true": true}
            rows.append((titled(name), dict(entries(tree)) | found))
        picked = entries(results, "generate_and_rate", "picked")
        for title, best in [("best of", entry_at(results, "best_of_n")), *picked]:
            if n := number_at(best, "n"):
                true = entry_at(best, "score") or entry_at(best, "gold")
                rows.append((f"{titled(title)} {n:g}", best | {"kl": best.get("kl_bound_nats"), "true": true}))
    cells = [[name, *(cell(row.get(key)) for key in columns.values())] for name, row in rows]
    return Table("PPO and its baselines, held-out prompts", ("policy", *columns), cells)


def confusion_table(results: dict[str, Any]) -> Iterator[Table]:
    names = [visible(name, 40) for name, _ in entries(results, "classes")]
    if isinstance(confusion := entry_at(results, "confusion"), list) and len(confusion) == len(names):
        matrix = [[name, *map(str, row)] for name, row in zip(names, confusion, strict=True) if isinstance(row, list)]
        yield Table("Label (down) against prediction (across)", ["", *names], matrix)


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


# --- answers ------------------------------------------------------------------------------------------------


def make_samples(runs: list[RunFiles]) -> list[dict[str, Any]]:
    """Responses of the models to the same prompts, side by side; of several runs each run's own policy."""
    several = len(runs) > 1
    policies = [str(run.results.get("policy") or "ppo") for run in runs]
    by_id = [{str(row.get("id")): row for row in run.samples} for run in runs]
    answered = [row for row in runs[0].samples if isinstance(row.get("responses"), dict)]
    samples = []
    for number, row in enumerate(answered[: SHOWN_SAMPLES + MORE_SAMPLES]):
        shown = [(row, model, model) for model in (("sft",) if several else MODELS)]
        if several:
            own = [rows.get(str(row.get("id")), {}) for rows in by_id]
            named = zip(own, policies, runs, strict=True)
            shown += [(one, policy, f"{policy} of {run.name}") for one, policy, run in named]
        samples.append(
            {
                "id": visible(row.get("id", ""), 100),
                "prompt": prompt_text(row.get("prompt", "")),
                "first": number < SHOWN_SAMPLES,
                "responses": [
                    {
                        "title": title,
                        "look": model,
                        "text": visible(responses[model]),
                        "gold": _total(entry_at(its_row, "gold", model)),
                        "score": number_at(its_row, "scores", model),
                    }
                    for its_row, model, title in shown
                    if model in (responses := dict(entries(its_row, "responses")))
                ],
            }
        )
    return samples


def _total(gold: Any) -> float | None:
    return number_at(gold, "total") if isinstance(gold, dict) else number_at(gold)


def make_rollouts(runs: list[RunFiles]) -> list[dict[str, Any]]:
    """Answers to the first few fixed prompts during PPO, each at a few steps; for several runs at the first and last."""
    prompts: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for run in runs:
        for row in run.stages["ppo"].samples:
            if is_figure(row.get("step")):
                prompts.setdefault(str(row.get("id")), []).append((run.name, row))
    # Prompts with many answers come first: those of rollouts seldom have two.
    often = sorted(prompts.items(), key=lambda item: -len(item[1]))[:ROLLOUT_PROMPTS]
    return [
        {
            "prompt": prompt_text(rows[0][1].get("prompt", "")),
            "answers": [
                {
                    "run": run if len(runs) > 1 else "",
                    "step": row["step"],
                    "text": visible(row.get("response", "")),
                    "tokens": shade_tokens(row.get("tokens"), row.get("kl_tokens")),
                    "score": number_at(row, "score"),
                    "kl": number_at(row, "kl"),
                    "gold": _total(row.get("gold")),
                }
                for run in dict.fromkeys(name for name, _ in rows)
                for row in spread([row for name, row in rows if name == run], ROLLOUT_STEPS if len(runs) == 1 else 2)
            ],
        }
        for _, rows in often
    ]


def shade_tokens(tokens: Any, kl_tokens: Any) -> list[tuple[str, str, str]]:
    """(text, class, nats) of each token: "u1"…"u5" if the policy gives it more probability than SFT does, "d1"…"d5" if less.

    Empty if the row has no such lists.
    """
    if not isinstance(tokens, list) or not isinstance(kl_tokens, list) or len(tokens) != len(kl_tokens):
        return []
    shaded = [
        (visible(token, 60), shade(kl), f"{kl:+.2f} nats" if is_figure(kl) else "")
        for token, kl in zip(tokens[:MAX_TOKENS], kl_tokens, strict=False)
    ]
    return shaded + ([(f" … {len(tokens) - MAX_TOKENS:,} more tokens", "", "")] if len(tokens) > MAX_TOKENS else [])


def shade(kl: Any) -> str:
    deep = sum(abs(kl) >= least for least in SHADES) if is_figure(kl) else 0
    return f"{'u' if kl > 0 else 'd'}{deep}" if deep else ""


# --- settings, versions, data -------------------------------------------------------------------------------


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


def make_differences(runs: list[RunFiles]) -> Table:
    """The settings that differ among several runs; those of one run that differ from the schema."""
    titles, columns = [run.name for run in runs], [settings_of_run(run) for run in runs]
    keys = {key for column in columns for key in column}
    if len(runs) == 1:
        titles, columns = ["papers", "this run"], [flatten(asdict(Config())), *columns]
        keys &= columns[0].keys()  # a setting that is newer or older than the run is not compared
    rows = []
    for key in sorted(keys):
        values = [column.get(key, "–") for column in columns]
        if any(value != values[0] for value in values[1:]):
            rows.append([visible(key, 100), *map(show_value, values)])
    return Table("", ["setting", *titles], rows, code=True)


def show_value(value: Any, limit: int = 120) -> str:
    return format_value(value) if isinstance(value, float) and is_figure(value) else visible(value, limit)


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
        (title, Table("", columns, [[*entry, ", ".join(names)] for entry, names in sorted(used.items())]))
        for title, columns, used in (
            ("Versions", ("package", "version", "used by"), versions),
            ("Data", ("file", "sha256", "used by"), data),
        )
        if used
    ]
    shown_configs = [(", ".join(names), visible(text, 50_000)) for text, names in configs.items()]
    return {"run": run.name, "parts": parts, "configs": shown_configs}


def make_skipped(run: RunFiles) -> list[str]:
    """The parts that this page does not show, and why."""
    notes = []
    missing = [name for name in GOLD_STAGES if name in PIPELINE and name not in run.stages]
    if missing:
        notes.append(f"{' and '.join(missing)}: not in this run, which reads its data from files.")
    for name, stage in run.stages.items():
        if stage.status != "complete":
            notes.append(f"{name}: {stage.status}" + (f", at step {stage.last_step:,.0f}." if stage.last_step else "."))
        for count, what in (
            (stage.unreadable, "lines of metrics.jsonl cannot be read and are missing from its curves"),
            (stage.misplaced, "lines of metrics.jsonl were added to it: its curves are not the stage's alone"),
            (stage.gaps, "values that were not finite are gaps in its curves"),
        ):
            notes += [f"{name}: {count:,} {what}."] * (count > 0)
    notes += [visible(text, 300) for text in run.damage]
    if not run.results:
        notes.append("No evaluation: win rates, calibration and histograms are missing.")
    elif entry_at(run.results, "gold") is None:
        notes.append("No true score: win rates and parts by it are missing; the reward model's are shown.")
    if len(run.samples) > SHOWN_SAMPLES + MORE_SAMPLES:
        notes.append(f"{SHOWN_SAMPLES + MORE_SAMPLES} of {len(run.samples):,} held-out prompts are shown.")
    return notes

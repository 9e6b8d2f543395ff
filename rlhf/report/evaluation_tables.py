"""The report's tables of text: a list of specifications, each with the place of its rows in the run's JSON files, and the few
tables that are computed.

The files are `results` (evaluate/results.json), `audit` (reward/audit.json), `labelled` (classify/results.json) and, by its
name, each of evaluations/.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from rlhf.recipe import BASELINES
from rlhf.report.pictures import shot_rows
from rlhf.runs.run_files import (
    RunFiles,
    decimal,
    entries,
    entry_at,
    number_at,
    percent,
    rows_of,
    visible,
    with_interval,
)

MODELS = ("base", "sft", "ppo", *BASELINES)
TITLES = {"sft": "SFT", "ppo": "PPO", "dpo": "DPO"}
MOST_LABELERS = 20  # in a table
MOST_CLASSES = 20  # most classes of a confusion matrix that is shown


class Table(NamedTuple):
    """A table of text, whose first column names the rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    code: bool = False  # whether the cells are set as code


class Spec(NamedTuple):
    """A table whose rows are in a file: all rows at one place, a mapping or a list, or single figures by their labels.

    columns: {title: "key format"}, the format one of FORMATS; without a key, the row itself is the figure.
    """

    caption: str
    first: str  # the title of the column with the rows' names
    rows: str | Mapping[str, str]  # "file key key", or {label: "file key key"}
    columns: Mapping[str, str]


class Section(NamedTuple):
    title: str
    lines: Sequence[tuple[str, str]]  # (in bold, text)
    tables: Sequence[Table]


def figure_cell(figure: Any, show: Callable[[float], str] = lambda value: decimal(value, 2)) -> str:
    value, low, high = with_interval(figure)
    if value is None:
        return "–"
    return show(value) + ("" if low is None or high is None else f" ({show(low)} – {show(high)})")


# How a table shows a figure: two decimals, three, per cent, or a count.
FORMATS: dict[str, Callable[[Any], str]] = {
    "": figure_cell,
    "3": lambda figure: figure_cell(figure, decimal),
    "%": lambda figure: figure_cell(figure, percent),
    "#": lambda figure: "–" if (count := number_at(figure)) is None else f"{count:,.0f}",
}

VALUE = {"value": " %"}
WITH_PAIRS = {"value": " %", "pairs": "n #"}
EVALUATION = (
    Spec("The responses as text, with 95% intervals", "policy", "results text", {
        "perplexity under SFT": "perplexity 3", "different words": "distinct_1 3", "different word pairs": "distinct_2 3",
        "same for two prompts": "repeated 3", "3-grams said twice": "repetition 3", "tokens": "tokens 3"}),
    Spec("Reward model", "share of pairs", {
        "Accuracy on held-out pairs": "results reward_model accuracy",
        "Ceiling that the labels' noise allows": "results reward_model noise_ceiling",
        "Length alone": "results reward_model length_baseline",
        "Accuracy above length alone": "results reward_model above_length",
        "Accuracy on the gold order": "results reward_model gold_order_accuracy",
        "Labelers' agreement with each other": "results reward_model labeler_agreement",
        "Accuracy on held-out labelers": "results reward_model held_out_labelers accuracy"}, WITH_PAIRS),
    Spec("Agreement with labelers by how far apart they ranked two answers", "ranks apart", "results reward_model by_rank_gap",
         WITH_PAIRS),
    Spec("Weight of each part in the reward model's scores, and in the labelers' judgements", "part",
         "results reward_model gold_regression parts", {"reward model": "weight", "labelers": "true"}),
)  # fmt: skip
LABELS = (
    Spec("Agreement of labelers on the same pairs, held-out comparisons", "labelers", {
        "Of the training": "results reward_model agreement training", "Held out": "results reward_model agreement held_out",
        "Between the two": "results reward_model agreement between"}, WITH_PAIRS),
)  # fmt: skip
AUDIT = (
    Spec("Held-out comparisons", "share of pairs", {
        "Accuracy": "audit comparisons accuracy", "Accuracy above length alone": "audit comparisons above_length",
        "Labelers' agreement": "audit comparisons agreement training",
        "Accuracy on held-out labelers": "audit comparisons held_out_labelers accuracy",
        "Length alone": "audit comparisons length_baseline", "Calibration error": "audit comparisons calibration_error"}, VALUE),
    Spec("Accuracy by labeler", "labeler", "audit comparisons by_labeler", VALUE),
    Spec("Accuracy by how far apart labelers ranked two answers", "ranks apart", "audit comparisons by_rank_gap", VALUE),
    Spec("Attacks on held-out answers, in standard deviations of SFT samples' scores", "attack", "audit attacks", {
        "order flipped": "flips %", "score bought": "gain", "by the better": "gain_better", "by the worse": "gain_worse",
        "KL, nats": "nats"}),
    Spec("Best of n samples of the SFT model", "n", "audit best_of",
         {"KL at most, nats": "kl", "score": "score", "true reward": "truth"}),
)  # fmt: skip
LABELLED = (
    Spec("Held-out examples", "", {"Accuracy": "labelled accuracy", "The most frequent label alone": "labelled majority"}, VALUE),
    Spec("", "", {"Macro F1": "labelled macro_f1"}, {"value": " 3"}),
    Spec("By class", "class", "labelled classes",
         {"precision": "precision %", "recall": "recall %", "F1": "f1 %", "examples": "n #"}),
)  # fmt: skip
IN_ORDER = {"pairs in order": "pairs %", "rows all in order": "all_right %", "length alone": "length %"}
EXTERNAL = (
    Spec("Judged by a reward model that none of them was trained with", "policies", "results judge pairs",
         {"wins": "win_rate %", "wins at equal length": "length_controlled %", "words more": "words"}),
    Spec("Accuracy of that judge on held-out pairs", "", {"Accuracy": "results judge held_out accuracy"}, VALUE),
    Spec("The reward model on preference files", "", {"all": "pairs overall"}, IN_ORDER),
    Spec("The reward model by subset", "subset", "pairs subsets", IN_ORDER),
    Spec("Overlap with the pretraining text", "prompts", "overlap",
         {"number": "prompts #", "too short to check": "too_short #", "words of an n-gram": "n #",
          "share an n-gram": "contaminated %", "near-duplicates": "near_duplicates %"}),
    Spec("Judged by an endpoint", "share of prompts", {
        "win rate": "judge win_rate", "at equal length": "judge length_controlled",
        "both orders agree": "judge both_orders_agree", "for the first place": "judge first_place"}, VALUE),
    Spec("Other judges on the same answers", "judge", "judge others",
         {"win rate": "win_rate %", "same preference": "agreement %"}),
)  # fmt: skip


def titled(policy: str) -> str:
    return TITLES.get(policy, visible(policy.replace("_", " "), 60))


def judge_name(results: dict[str, Any]) -> str:
    return visible(entry_at(results, "gold", "truth") or "gold judge", 60)


def name_of(row: dict[str, Any]) -> str:
    if isinstance(row.get("pair"), list):
        return visible(" over ".join(map(str, row["pair"])), 100)
    if row.get("name") is not None:
        return titled(str(row["name"]))
    number = number_at(row, "n") if "n" in row and "gap" not in row else number_at(row, "gap")
    return f"{number or 0:g}"


def fill(named: Sequence[tuple[str, Any]], columns: Mapping[str, str]) -> list[list[str]]:
    """The cells of named rows; columns as of `Spec`."""
    places = [column.partition(" ") for column in columns.values()]
    return [
        [name, *(FORMATS[how](entry_at(row, *([key] if key else []))) for key, _, how in places)] for name, row in named
    ]


def make_table(spec: Spec, files: dict[str, Any]) -> Table:
    if isinstance(spec.rows, str):
        found = entry_at(files, *spec.rows.split())
        named = [(name_of(row), row) for row in rows_of(found)] or [(titled(key), row) for key, row in entries(found)]
    else:
        figures = ((label, entry_at(files, *place.split())) for label, place in spec.rows.items())
        named = [(label, one) for label, one in figures if with_interval(one)[0] is not None or entry_at(one, "pairs")]
    return Table(spec.caption, [spec.first, *spec.columns], fill(named, spec.columns))


def make_evaluation(run: RunFiles) -> dict[str, Any]:
    """One run's sections of tables: its audit, its labelled task, its evaluation and the others."""
    files = run.evaluations | {"results": run.results, "audit": run.audit, "labelled": run.labelled}

    def tables(specs: Sequence[Spec], *computed: Table) -> list[Table]:
        return [table for table in (*(make_table(spec, files) for spec in specs), *computed) if table.rows]

    evaluated = tables(EVALUATION, rank_table(run))
    external = tables(EXTERNAL, shots_table(run), benchmarks_table(run))
    return {
        "run": run.name,
        "sections": [
            Section("Can this reward model be trusted?", audit_lines(run.audit), tables(AUDIT) if run.audit else []),
            Section("Labelled task", [], tables(LABELLED, *confusion_table(run.labelled))),
            Section("", [], [*tables((), parts_table(run.results), policies_table(run.results)), *evaluated]),
            Section("Benchmarks, judges and preference files", judge_lines(run.evaluations.get("judge")), external),
        ],
        "json": visible(json.dumps(run.results, indent=1, ensure_ascii=False), 20_000) if run.results else "",
    }


def labels_section(run: RunFiles) -> Section:
    """What labelers gave: the run's rankings by labeler, their agreement, and what people judged of its policies."""
    made = [labelers_table(run), *(make_table(spec, {"results": run.results}) for spec in LABELS)]
    made += people_tables(run.evaluations.get("labels"))
    return Section("", [], [table for table in made if table.rows])


# --- the tables that are computed ---------------------------------------------------------------------------


def parts_table(results: dict[str, Any]) -> Table:
    """The true score and its parts for each model; empty without a true score."""
    means, parts = entry_at(results, "gold", "mean_score"), entry_at(results, "gold", "parts")
    models = [model for model in MODELS if model in ("sft", "ppo") or number_at(means, model) is not None]
    rows = [("all parts", means)] if means else []
    for name in dict.fromkeys(part for model in models for part, _ in entries(parts, model)):
        rows.append((visible(name, 100), {model: entry_at(parts, model, name) for model in models}))
    texts = []
    for name, tree in rows:
        sft, ppo = number_at(tree, "sft"), number_at(tree, "ppo")
        gain = None if sft is None or ppo is None else ppo - sft
        texts.append([name, *(decimal(number_at(tree, model)) for model in models), decimal(gain, 3, sign=True)])
    columns = ["part", *(TITLES.get(model, model) for model in models), "PPO − SFT"]
    return Table(f"True score by part ({judge_name(results)}), held-out prompts", columns, texts)


def policies_table(results: dict[str, Any]) -> Table:
    """PPO beside its baselines; empty without baselines."""
    columns = {"reward": "reward 3", "KL to SFT": "kl 3", "win rate over SFT, reward model": "rm_win_rate_vs_sft %",
               "true win rate": "win_rate_vs_sft %", "true score": "true 3"}  # fmt: skip
    named: list[tuple[str, Any]] = []
    if baselines := entries(results, "baselines"):
        ppo = results | {"win_rate_vs_sft": entry_at(results, "gold", "win_rate_vs_sft")}
        for name, tree in [("sft", {}), ("ppo", ppo), *baselines]:
            true = entry_at(results, "gold", "score", name) or entry_at(results, "gold", "mean_score", name)
            row = {"kl": entry_at(tree, "kl_to_sft_nats"), "reward": entry_at(results, "reward", name), "true": true}
            named.append((titled(name), dict(entries(tree)) | row))
        picked = entries(results, "generate_and_rate", "picked")
        for title, best in [("best of", entry_at(results, "best_of_n")), *picked]:
            if n := number_at(best, "n"):
                true = entry_at(best, "score") or entry_at(best, "gold")
                named.append((f"{titled(title)} {n:g}", best | {"kl": entry_at(best, "kl_bound_nats"), "true": true}))
    return Table("PPO and its baselines, held-out prompts", ("policy", *columns), fill(named, columns))


def rank_table(run: RunFiles) -> Table:
    """Kendall's tau-b: whether the reward model and the gold judge order the same responses in the same way."""
    rows = []
    for model in ("sft", "ppo"):
        both = [(number_at(row, "scores", model), number_at(row, "gold", model)) for row in run.samples]
        pairs = [(score, gold) for score, gold in both if score is not None and gold is not None]
        if len(pairs) >= 10:
            from scipy.stats import kendalltau

            tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
            if math.isfinite(tau):
                rows.append([model, decimal(tau, 2), f"{len(pairs):,}"])
    caption = f"Agreement of ranks: the reward model against the {judge_name(run.results)}, over the same answers"
    return Table(caption, ("answers of", "Kendall's τ-b", "answers"), rows)


def confusion_table(results: dict[str, Any]) -> Iterator[Table]:
    names = [visible(name, 40) for name, _ in entries(results, "classes")]
    confusion = entry_at(results, "confusion")
    rows = [row for row in confusion if isinstance(row, list)] if isinstance(confusion, list) else []
    if len(rows) == len(names) <= MOST_CLASSES:
        matrix = [[name, *map(str, row)] for name, row in zip(names, rows, strict=True)]
        yield Table("Label (down) against prediction (across)", ["", *names], matrix)


def shots_table(run: RunFiles) -> Table:
    shots = run.evaluations.get("shots")
    task, majority = visible(str(entry_at(shots, "task")), 60), percent(number_at(shots, "majority"))
    columns = {"examples": "shots #", "that fit": "shown #", "accuracy": "accuracy %"}
    named = [(name, row) for name, of_model in shot_rows(shots) for row, _ in of_model]
    caption = f"In-context learning on {task}; the most frequent label alone: {majority}"
    return Table(caption, ("model", *columns), fill(named, columns))


def benchmarks_table(run: RunFiles) -> Table:
    models = [(titled(name), model) for name, model in entries(run.evaluations, "benchmarks", "models")]
    tasks = dict.fromkeys(key for _, model in models for key, _ in entries(model))
    rows = [[visible(task, 60), *(figure_cell(entry_at(model, task)) for _, model in models)] for task in tasks]
    return Table("Benchmarks (lm-eval)", ("task", *(name for name, _ in models)), rows)


def labelers_table(run: RunFiles) -> Table:
    """The rankings that the label stage and the labelling page of this run have, by labeler."""
    by_labeler: dict[str, list[dict[str, Any]]] = {}
    for row in run.rankings:
        by_labeler.setdefault(visible(row.get("labeler") or "no name", 60), []).append(row)
    rows = []
    for name, given in sorted(by_labeler.items(), key=lambda item: -len(item[1]))[:MOST_LABELERS]:
        sizes = [len(listed) for row in given if isinstance(listed := row.get("responses"), list)]
        orders = [order for row in given if isinstance(order := row.get("ranking"), list)]
        tied = sum(any(isinstance(place, list) and len(place) > 1 for place in order) for order in orders)
        times = [seconds for row in given if (seconds := number_at(row, "seconds")) is not None]
        rows.append([name, f"{len(given):,}", decimal(fmean(sizes or [0]), 1), percent(tied / max(1, len(orders))),
                     f"{median(times):.0f}" if times else "–"])  # fmt: skip
    left = len(by_labeler) - len(rows)
    caption = "Rankings by labeler" + (f"; {left} labelers with fewer are left out" if left else "")
    return Table(caption, ("labeler", "rankings", "responses each", "with ties", "seconds, median"), rows)


def people_tables(labels: Any) -> Iterator[Table]:
    """What people judged (evaluate.labels): win rates, ratings and flags, by group of labelers; win rates corrected by a judge."""
    for name, group in entries(labels):
        if not isinstance(group, dict):
            continue
        agreed, title = FORMATS["%"](entry_at(group, "agreement")), visible(name, 60)
        caption = f"People, {title}: {number_at(group, 'judgements') or 0:,.0f} judgements, agreement {agreed}"
        wins = [(name_of(row), entry_at(row, "win_rate")) for row in rows_of(group, "win_rates")]
        yield Table(caption, ("policies", "wins"), fill(wins, {"wins": " %"}))
        rated = [(titled(policy), row) for policy, row in entries(group, "policies")]
        flags = dict.fromkeys(key for _, row in rated for key, _ in entries(row) if key != "rating")
        columns = {"rating, 1 to 7": "rating"} | {visible(flag.replace("_", " "), 60): f"{flag} %" for flag in flags}
        yield Table(f"Ratings and flags, {title}", ("policy", *columns), fill(rated, columns))
    corrected = [(name_of(row), row) for row in rows_of(labels, "corrected")]
    columns = {
        "people alone": "people %",
        "corrected": "corrected %",
        "correlation": "rho 3",
        "tasks without labels": "judged #",
    }
    caption = "Win rates of people, corrected by a judge on more tasks"
    yield Table(caption, ("policies", *columns), fill(corrected, columns))


# --- the lines above them -----------------------------------------------------------------------------------


def audit_lines(audit: dict[str, Any]) -> list[tuple[str, str]]:
    """The verdict with the labels to collect, then its reasons."""
    decision = entry_at(audit, "verdict", "decision")
    if not isinstance(decision, str):
        return []
    ceiling, labels, reasons = (entry_at(audit, "verdict", key) for key in ("ceiling", "labels", "reasons"))
    limit = f" of {ceiling:g} nats" if number_at(audit, "verdict", "ceiling") is not None else ""
    collect = visible("; ".join(map(str, labels)), 1000) if isinstance(labels, list) else ""
    said = [("", visible(str(reason), 300)) for reason in reasons] if isinstance(reasons, list) else []
    return [(visible(decision, 100) + limit, collect), *said]


def judge_lines(judged: Any) -> list[tuple[str, str]]:
    """Who judged, with how many requests, and which judges contradict each other."""
    pair = entry_at(judged, "pair")
    if not isinstance(pair, list):
        return []
    counts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in entries(judged, "counts"))
    lines = [("", visible(f"{' over '.join(map(str, pair))}, judged by {judged.get('judge')} ({counts})", 300))]
    judge, ours = visible(str(judged.get("judge")), 60), FORMATS["%"](entry_at(judged, "win_rate"))
    for name, other in entries(judged, "others"):
        if entry_at(other, "disagrees") is True:
            theirs = FORMATS["%"](entry_at(other, "win_rate"))
            said = f"{judge} gives a win rate of {ours}, the {titled(name)} {theirs}, on the same answers."
            lines.append(("Judges disagree.", said))
    return lines

"""The report's tables of text: evaluate/results.json, reward/audit.json, classify/results.json, evaluations/<name>.json."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.recipe import BASELINES
from rlhf.report.pictures import calibration_rows, shot_rows
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
MOST_CLASSES = 20  # most classes of a confusion matrix that is shown
# The figures of the responses' text, by column.
TEXT_FIGURES = {
    "perplexity under SFT": "perplexity 3",
    "different words": "distinct_1 3",
    "different word pairs": "distinct_2 3",
    "same for two prompts": "repeated 3",
    "3-grams said twice": "repetition 3",
    "tokens": "tokens 3",
}
REWARD_FIGURES = (
    ("Accuracy on held-out pairs", "accuracy"),
    ("Ceiling that the labels' noise allows", "noise_ceiling"),
    ("Length alone", "length_baseline"),
    ("Accuracy above length alone", "above_length"),
    ("Accuracy on the gold order", "gold_order_accuracy"),
    ("Labelers' agreement with each other", "labeler_agreement"),
    ("Accuracy on held-out labelers", "held_out_labelers", "accuracy"),
    ("Held-out labelers' agreement", "agreement", "held_out"),
)

NamedRows = Iterable[tuple[str, Any]]  # (name, figures) of each


class Table(NamedTuple):
    """A table of text, whose first column names the rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    code: bool = False  # whether the cells are set as code


def figure_cell(figure: Any, show: Callable[[float], str] = lambda value: decimal(value, 2)) -> str:
    """A figure with its 95% interval, or a dash."""
    value, low, high = with_interval(figure)
    if value is None:
        return "–"
    return show(value) + ("" if low is None or high is None else f" ({show(low)} – {show(high)})")


# How a table shows a figure: two decimals, three, per cent, or a count.
FORMATS: dict[str, Callable[[Any], str]] = {
    "": figure_cell,
    "3": lambda figure: figure_cell(figure, decimal),
    "%": lambda figure: figure_cell(figure, percent),
    "#": lambda figure: f"{number_at(figure) or 0:,.0f}",
}


def fill(named: NamedRows, *columns: str) -> list[list[str]]:
    """Rows: a column is "key" or "key format", of FORMATS; without a key, the row is the figure."""
    places = [column.partition(" ") for column in columns]
    return [
        [name, *(FORMATS[how](entry_at(row, *([key] if key else []))) for key, _, how in places)] for name, row in named
    ]


def table_of(caption: str, first: str, named: NamedRows, columns: Mapping[str, str]) -> Table:
    """A table of `named`, whose column `first` has the names. columns: {title: column of `fill`}."""
    return Table(caption, [first, *columns], fill(named, *columns.values()))


def items_of(tree: Any, *path: str) -> list[tuple[str, Any]]:
    """(name, row) of a mapping."""
    return [(visible(str(key), 60), value) for key, value in entries(tree, *path)]


def items_by_n(tree: Any, *path: str) -> list[tuple[str, Any]]:
    """(its n, row) of a list."""
    return [(f"{number_at(row, 'n') or 0:g}", row) for row in rows_of(tree, *path)]


def titled(policy: str) -> str:
    return TITLES.get(policy, visible(policy.replace("_", " "), 60))


def judge_name(results: dict[str, Any]) -> str:
    return visible(entry_at(results, "gold", "truth") or "gold judge", 60)


def make_evaluation(run: RunFiles) -> dict[str, Any]:
    """The tables of one run's evaluation, of its audit and of other evaluations."""
    return {
        "run": run.name,
        "audit": make_audit(run.audit),
        "external": make_external(run.evaluations, entry_at(run.results, "judge")),
        "labelled": make_labelled(run.labelled),
        "tables": [make_parts(run.results), *make_tables(run), make_calibration_table(run)],
        "json": visible(json.dumps(run.results, indent=1, ensure_ascii=False), 20_000) if run.results else "",
    }


def make_parts(results: dict[str, Any]) -> Table:
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


def make_tables(run: RunFiles) -> list[Table]:
    """The policies, their texts and the reward model, from evaluate/results.json."""
    results, tree = run.results, entry_at(run.results, "reward_model")
    texts = [(titled(name), figures) for name, figures in entries(results, "text")]
    if best := entry_at(results, "best_of_n", "text"):
        texts.append((f"best of {number_at(results, 'best_of_n', 'n') or 0:g}", best))
    gaps = [(number_at(row, "gap"), row) for row in rows_of(tree, "by_rank_gap")]
    policies = ("policy", "reward", "KL to SFT", "win rate over SFT, reward model", "true win rate", "true score")
    shares = ("value", "95% interval", "pairs")
    ranks = [[model, decimal(tau, 2), f"{n:,.0f}"] for model, tau, n in rank_agreement(run)]
    return [
        Table("PPO and its baselines, held-out prompts", policies, list(policy_rows(results))),
        table_of("The responses as text, with 95% intervals", "policy", texts, TEXT_FIGURES),
        Table(
            "Reward model",
            ("share of pairs", *shares),
            pair_rows([(label, entry_at(tree, *place)) for label, *place in REWARD_FIGURES]),
        ),
        Table(
            "Agreement with labelers by how far apart they ranked two answers",
            ("ranks", "accuracy", *shares[1:]),
            pair_rows([(f"{gap:g} apart", row) for gap, row in gaps if gap is not None]),
        ),
        Table(
            f"Agreement of ranks: the reward model against the {judge_name(results)}, over the same answers",
            ("answers of", "Kendall's τ-b", "answers"),
            ranks,
        ),
        table_of(
            "Weight of each part in the reward model's scores, and in the labelers' judgements",
            "part",
            items_of(tree, "gold_regression", "parts"),
            {"reward model": "weight", "labelers": "true"},
        ),
    ]


def policy_rows(results: dict[str, Any]) -> Iterator[list[str]]:
    """Policy, reward, KL to SFT, win rates over SFT by the reward model and by the true score, mean true score; with baselines only."""
    baselines = entry_at(results, "baselines")
    if not isinstance(baselines, dict):
        return

    def row(name: str, tree: Any, kl: str, reward: float | None, score: Any) -> list[str]:
        ((_, *figures),) = fill([("", tree)], f"{kl} 3", "rm_win_rate_vs_sft %", "win_rate_vs_sft %")
        return [name, decimal(reward), *figures, figure_cell(score, decimal)]

    ppo = results | {"win_rate_vs_sft": entry_at(results, "gold", "win_rate_vs_sft")}
    for name, tree in [("sft", {}), ("ppo", ppo), *baselines.items()]:
        score = entry_at(results, "gold", "score", name) or entry_at(results, "gold", "mean_score", name)
        yield row(titled(name), tree, "kl_to_sft_nats", number_at(results, "reward", name), score)
    for title, best in [("best of", entry_at(results, "best_of_n")), *entries(results, "generate_and_rate", "picked")]:
        if best:
            score = entry_at(best, "score") or entry_at(best, "gold")
            name = f"{titled(title)} {number_at(best, 'n') or 0:g}"
            yield row(name, best, "kl_estimate_nats", number_at(best, "reward"), score)


def pair_rows(figures: list[tuple[str, Any]]) -> list[list[str]]:
    """Label, share, interval and number of pairs of the figures that have a value."""
    rows = []
    for label, figure in figures:
        (value, low, high), n = with_interval(figure), number_at(figure, "n")
        if value is not None:
            span = "" if low is None else f"{percent(low)} – {percent(high)}"
            rows.append([label, percent(value), span, "" if n is None else f"{n:,.0f}"])
    return rows


def make_calibration_table(run: RunFiles) -> Table:
    rows = [
        (decimal(gap, 2), percent(predicted), percent(observed), decimal(100 * (observed - predicted), 1, True), f"{n:,.0f}")
        for gap, predicted, observed, n in calibration_rows(run)
    ]  # fmt: skip
    return Table("Calibration in numbers", ("score gap", "predicted", "observed", "difference", "pairs"), rows)


def rank_agreement(run: RunFiles) -> Iterator[tuple[str, float, int]]:
    """(model, Kendall's tau-b, n): whether the reward model and the gold judge order the same responses in the same way."""
    for model in ("sft", "ppo"):
        both = [(number_at(row, "scores", model), number_at(row, "gold", model)) for row in run.samples]
        pairs = [(score, gold) for score, gold in both if score is not None and gold is not None]
        if len(pairs) >= 10:
            from scipy.stats import kendalltau

            tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
            if math.isfinite(tau):
                yield model, tau, len(pairs)


# --- audit, labelled tasks, other evaluations ---------------------------------------------------------------


def make_audit(audit: dict[str, Any]) -> dict[str, Any] | None:
    """{"verdict", "labels", "reasons", "tables"}, or None without an audit."""
    decision = entry_at(audit, "verdict", "decision")
    if not isinstance(decision, str):
        return None
    ceiling, labels, reasons = (entry_at(audit, "verdict", key) for key in ("ceiling", "labels", "reasons"))
    limit = f" of {ceiling:g} nats" if number_at(audit, "verdict", "ceiling") is not None else ""
    attacks = [(visible(str(row.get("name")).replace("_", " "), 40), row) for row in rows_of(audit, "attacks")]
    return {
        "verdict": visible(decision, 100) + limit,
        "labels": visible("; ".join(map(str, labels)), 1000) if isinstance(labels, list) else "",
        "reasons": [visible(str(reason), 300) for reason in reasons] if isinstance(reasons, list) else [],
        "tables": [
            Table("Held-out comparisons", ("share of pairs", "value"), compared(entry_at(audit, "comparisons"))),
            table_of(
                "Attacks on held-out answers, in standard deviations of SFT samples' scores", "attack", attacks,
                {"order flipped": "flips %", "score bought": "gain", "by the better": "gain_better",
                 "by the worse": "gain_worse", "KL, nats": "nats"},
            ),
            table_of(
                "The reward model's pick among labelled answers, against a random one", "answers",
                items_by_n(audit, "picked"), {"more of the others beaten": "gain %"},
            ),
            table_of(
                "Best of n samples of the SFT model", "n", items_by_n(audit, "best_of"),
                {"KL, nats": "kl", "score": "score", "by the check": "check", "true reward": "truth"},
            ),
        ],
    }  # fmt: skip


def compared(figures: Any) -> list[list[str]]:
    """Accuracy with its bounds, by labeler and by gap in rank."""
    rows = [
        ("Accuracy", entry_at(figures, "accuracy")),
        ("Accuracy above length alone", entry_at(figures, "above_length")),
        ("Labelers' agreement", entry_at(figures, "agreement", "training")),
        ("Accuracy on held-out labelers", entry_at(figures, "held_out_labelers", "accuracy")),
        *((f"On {name}", figure) for name, figure in entries(figures, "by_labeler")),
        *((f"On answers {number_at(row, 'gap') or 0:g} ranks apart", row) for row in rows_of(figures, "by_rank_gap")),
        ("Length alone", {"value": entry_at(figures, "length_baseline")}),
        ("Calibration error", {"value": entry_at(figures, "calibration_error")}),
    ]
    return fill([(visible(name, 60), figure) for name, figure in rows if number_at(figure, "value") is not None], " %")


def make_labelled(results: dict[str, Any]) -> list[Table]:
    """Accuracy and that of the most frequent label, figures of each class, and the confusion matrix; empty without results."""
    named = entry_at(results, "classes")
    if not isinstance(named, dict) or number_at(results, "accuracy", "value") is None:
        return []
    whole = [
        ("Accuracy", "%", entry_at(results, "accuracy")),
        ("The most frequent label alone", "%", entry_at(results, "majority")),
        ("Macro F1", "3", entry_at(results, "macro_f1")),
        ("Examples", "#", entry_at(results, "accuracy", "n")),
    ]
    classes = [(visible(name, 40), row) for name, row in named.items()]
    names = [name for name, _ in classes]
    confusion = entry_at(results, "confusion")
    rows = [row for row in confusion if isinstance(row, list)] if isinstance(confusion, list) else []
    square = len(rows) == len(names) <= MOST_CLASSES
    matrix = [[name, *map(str, row)] for name, row in zip(names, rows, strict=True)] if square else []
    columns = {"precision": "precision %", "recall": "recall %", "F1": "f1 %", "examples": "n #"}
    return [
        Table("Held-out examples", ["", "value"], [[name, FORMATS[how](figure)] for name, how, figure in whole]),
        table_of("By class", "class", classes, columns),
        Table("Label (down) against prediction (across)", ["", *names], matrix),
    ]


def make_external(found: dict[str, dict[str, Any]], trained_judge: Any = None) -> dict[str, Any]:
    """{"tables", "disagreements"}: a table per evaluation, and a sentence for each judge that contradicts another.

    trained_judge: the entry `judge` of evaluate/results.json.
    """
    pairs, shots, judged = (found.get(name) for name in ("pairs", "shots", "judge"))
    by_subset = [("all", entry_at(pairs, "overall")), *items_of(pairs, "subsets")]
    by_subset.append(("mean of subsets", entry_at(pairs, "mean_of_subsets")))
    benchmarks = items_of(found, "benchmarks", "models")
    tasks = dict.fromkeys(key for _, model in benchmarks for key, _ in items_of(model))
    accuracy = FORMATS["%"](entry_at(trained_judge, "held_out", "accuracy"))
    task, majority = visible(str(entry_at(shots, "task")), 60), percent(number_at(shots, "majority"))
    judged_pairs = [(over(row), row) for row in rows_of(trained_judge, "pairs") if over(row)]
    by_shots = [
        [name, *cells]
        for name, of_model in shot_rows(shots)
        for cells in fill([(f"{k:g}", row) for row, (k, *_) in of_model], "shown #", "accuracy %")
    ]
    tables = [
        table_of(
            f"Judged by a reward model that none of them was trained with (accuracy {accuracy})", "policies", judged_pairs,
            {"wins": "win_rate %", "wins at equal length": "length_controlled %", "words more": "words"},
        ),
        table_of(
            "The reward model on preference files", "subset", [pair for pair in by_subset if isinstance(pair[1], dict)],
            {"pairs in order": "pairs %", "rows all in order": "all_right %", "length alone": "length %"},
        ),
        *people_tables(found.get("labels")),
        table_of("By style", "pairs", items_of(pairs, "styles"), {"in order": " %"}),
        table_of(
            "Instructions that a program checks", "model", items_of(found, "instructions"),
            {"prompts, all followed": "prompts %", "instructions followed": "instructions %"},
        ),
        Table(
            f"In-context learning on {task}; the most frequent label alone: {majority}",
            ("model", "examples", "that fit", "accuracy"), by_shots,
        ),
        table_of(
            "Overlap with the pretraining text", "prompts", items_of(found, "overlap"),
            {"number": "prompts #", "too short to check": "too_short #", "words of an n-gram": "n #",
             "share an n-gram": "contaminated %", "near-duplicates": "near_duplicates %"},
        ),
        *judge_tables(judged),
        Table(
            "Benchmarks (lm-eval)", ("task", *(name for name, _ in benchmarks)),
            [[task, *(figure_cell(entry_at(model, task)) for _, model in benchmarks)] for task in tasks],
        ),
    ]  # fmt: skip
    judge, ours = visible(str(entry_at(judged, "judge")), 60), FORMATS["%"](entry_at(judged, "win_rate"))
    disagreements = [
        f"{judge} gives a win rate of {ours}, the {name} {FORMATS['%'](entry_at(other, 'win_rate'))}, on the same answers."
        for name, other in items_of(judged, "others")
        if entry_at(other, "disagrees") is True
    ]
    return {"tables": [table for table in tables if table.rows], "disagreements": disagreements}


def people_tables(labels: Any) -> list[Table]:
    """What people judged (evaluate.labels): win rates, ratings and flags, by group of labelers; win rates corrected by a judge."""
    groups = [(name, group) for name, group in items_of(labels) if isinstance(group, dict)]
    tables = []
    for name, group in groups:
        of, agreed = [row for _, row in items_of(group, "policies")], FORMATS["%"](entry_at(group, "agreement"))
        flags = dict.fromkeys(key for row in of for key, _ in items_of(row) if key != "rating")
        wins = [(over(row), entry_at(row, "win_rate")) for row in rows_of(group, "win_rates")]
        caption = f"People, {name}: {number_at(group, 'judgements') or 0:,.0f} judgements, agreement {agreed}"
        columns = {"rating, 1 to 7": "rating"} | {flag.replace("_", " "): f"{flag} %" for flag in flags}
        tables.append(table_of(caption, "policies", wins, {"wins": " %"}))
        tables.append(table_of(f"Ratings and flags, {name}", "policy", items_of(group, "policies"), columns))
    corrected = [(over(row), row) for row in rows_of(labels, "corrected")]
    columns = {
        "people alone": "people %",
        "corrected": "corrected %",
        "correlation": "rho 3",
        "tasks without labels": "judged #",
    }
    return [
        *tables,
        table_of("Win rates of people, corrected by a judge on more tasks", "policies", corrected, columns),
    ]


def over(row: Any) -> str:
    """The two policies of a row with a `pair`."""
    return visible(" over ".join(map(str, row["pair"])), 100) if isinstance(row.get("pair"), list) else ""


def judge_tables(judged: Any) -> list[Table]:
    if not isinstance(entry_at(judged, "pair"), list):
        return []
    labels = {"win_rate": "win rate", "length_controlled": "at equal length", "both_orders_agree": "both orders agree",
              "first_place": "for the first place"}  # fmt: skip
    rows = [(label, entry_at(judged, key)) for key, label in labels.items()]
    for name, other in items_of(judged, "others"):
        rows.append((f"by the {name}", entry_at(other, "win_rate")))
        rows.append((f"same preference as the {name}", entry_at(other, "agreement")))
    counts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in items_of(judged, "counts"))
    cost = "" if (paid := number_at(judged, "cost")) is None else f", cost {paid:g}"
    caption = f"{' over '.join(map(str, judged['pair']))}, judged by {judged.get('judge')} ({counts}){cost}"
    return [Table(visible(caption, 300), ("share of prompts", "value"), fill(rows, " %"))]

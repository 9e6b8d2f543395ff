"""The report's tables of text: reward/audit.json, classify/results.json, evaluations/<name>.json."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rlhf.report.figures import Point
from rlhf.runs.run_files import decimal, entries, estimate, get, interval, number, percent, rows_of, visible

MOST_CLASSES = 20  # most classes of a confusion matrix that is shown


class Table(NamedTuple):
    """A table of text, whose first column names the rows."""

    caption: str
    columns: Sequence[str]
    rows: list[list[str]]


def cell(figure: Any, show: Callable[[float], str] = lambda value: decimal(value, 2)) -> str:
    """A figure with its 95% interval, or a dash."""
    value, low, high = interval(figure)
    if value is None:
        return "–"
    return show(value) + ("" if low is None or high is None else f" ({show(low)} – {show(high)})")


def share(figure: Any) -> str:
    return cell(figure, percent)


def shares(tree: Any, *keys: str) -> list[str]:
    return [share(get(tree, key)) for key in keys]


def count(tree: Any, key: str) -> str:
    return f"{number(tree, key) or 0:,.0f}"


def items_of(tree: Any, *path: str) -> list[tuple[str, Any]]:
    return [(visible(str(key), 60), value) for key, value in entries(tree, *path)]


def make_audit(audit: dict[str, Any]) -> dict[str, Any] | None:
    """{"verdict", "labels", "reasons", "tables"}, or None without an audit."""
    decision = get(audit, "verdict", "decision")
    if not isinstance(decision, str):
        return None
    ceiling, labels, reasons = (get(audit, "verdict", key) for key in ("ceiling", "labels", "reasons"))
    bought = ("gain", "gain_better", "gain_worse", "nats")
    attacks = [
        [
            visible(str(row.get("name")).replace("_", " "), 40),
            *shares(row, "flips"),
            *(cell(row.get(k)) for k in bought),
        ]
        for row in rows_of(audit, "attacks")
    ]
    picked = [[f"{number(row, 'n') or 0:g}", *shares(row, "gain")] for row in rows_of(audit, "picked")]
    best_of = [
        [
            f"{number(row, 'n') or 0:g}",
            decimal(number(row, "kl"), 2),
            *(cell(row.get(key)) for key in ("score", "check", "truth")),
        ]
        for row in rows_of(audit, "best_of")
    ]
    return {
        "verdict": visible(decision, 100)
        + ("" if number(audit, "verdict", "ceiling") is None else f" of {ceiling:g} nats"),
        "labels": visible("; ".join(map(str, labels)), 1000) if isinstance(labels, list) else "",
        "reasons": [visible(str(reason), 300) for reason in reasons] if isinstance(reasons, list) else [],
        "tables": [
            Table("Held-out comparisons", ("share of pairs", "value"), compared(get(audit, "comparisons"))),
            Table(
                "Attacks on held-out answers, in standard deviations of SFT samples' scores",
                ("attack", "order flipped", "score bought", "by the better", "by the worse", "KL, nats"),
                attacks,
            ),
            Table(
                "The reward model's pick among labelled answers, against a random one",
                ("answers", "more of the others beaten"),
                picked,
            ),
            Table(
                "Best of n samples of the SFT model", ("n", "KL, nats", "score", "by the check", "true reward"), best_of
            ),
        ],
    }


def compared(figures: Any) -> list[list[str]]:
    """Accuracy with its bounds, by labeler and by gap in rank."""
    rows = [
        ("Accuracy", get(figures, "accuracy")),
        ("Accuracy above length alone", get(figures, "above_length")),
        ("Labelers' agreement", get(figures, "agreement", "training")),
        ("Accuracy on held-out labelers", get(figures, "held_out_labelers", "accuracy")),
        *((f"On {name}", figure) for name, figure in entries(figures, "by_labeler")),
        *((f"On answers {number(row, 'gap') or 0:g} ranks apart", row) for row in rows_of(figures, "by_rank_gap")),
    ]
    shown = [[visible(label, 60), share(figure)] for label, figure in rows if number(figure, "value") is not None]
    for label, key in (("Length alone", "length_baseline"), ("Calibration error", "calibration_error")):
        if (value := number(figures, key)) is not None:
            shown.append([label, percent(value)])
    return shown


def make_labelled(results: dict[str, Any]) -> list[Table]:
    """Accuracy and that of the most frequent label, figures of each class, and the confusion matrix; empty without results."""
    named = get(results, "classes")
    if not isinstance(named, dict) or number(results, "accuracy", "value") is None:
        return []
    names = [visible(name, 40) for name in named]
    whole = [
        ["Accuracy", *shares(results, "accuracy")],
        ["The most frequent label alone", percent(number(results, "majority"))],
        ["Macro F1", decimal(number(results, "macro_f1"))],
        ["Examples", count(results["accuracy"], "n")],
    ]
    classes = [
        [name, *(percent(number(row, key)) for key in ("precision", "recall", "f1")), count(row, "n")]
        for name, row in zip(names, named.values(), strict=True)
    ]
    tables = [
        Table("Held-out examples", ["", "value"], whole),
        Table("By class", ["class", "precision", "recall", "F1", "examples"], classes),
    ]
    confusion = get(results, "confusion")
    square = (
        isinstance(confusion, list) and len(confusion) == len(names) and all(isinstance(r, list) for r in confusion)
    )
    if square and len(names) <= MOST_CLASSES:
        rows = [[name, *map(str, row)] for name, row in zip(names, confusion, strict=True)]
        tables.append(Table("Label (down) against prediction (across)", ["", *names], rows))
    return tables


def make_external(found: dict[str, dict[str, Any]], trained_judge: Any = None) -> dict[str, Any]:
    """{"tables", "disagreements"}: a table per evaluation, and a sentence for each judge that contradicts another.

    trained_judge: the entry `judge` of evaluate/results.json.
    """
    pairs, shots, judged = (found.get(name) for name in ("pairs", "shots", "judge"))
    by_subset = [("all", get(pairs, "overall")), *items_of(pairs, "subsets")]
    by_subset.append(("mean of subsets", get(pairs, "mean_of_subsets")))
    benchmarks = items_of(found, "benchmarks", "models")
    tasks = dict.fromkeys(key for _, model in benchmarks for key, _ in items_of(model))
    majority = percent(number(shots, "majority"))
    tables = [
        Table(
            f"Judged by a reward model that none of them was trained with (accuracy {share(get(trained_judge, 'held_out', 'accuracy'))})",
            ("policies", "wins", "wins at equal length", "words more"),
            [
                [
                    visible(" over ".join(map(str, row["pair"])), 100),
                    *shares(row, "win_rate", "length_controlled"),
                    cell(row.get("words")),
                ]
                for row in rows_of(trained_judge, "pairs")
                if isinstance(row.get("pair"), list)
            ],
        ),
        Table(
            "The reward model on preference files",
            ("subset", "pairs in order", "rows all in order", "length alone"),
            [[name, *shares(row, "pairs", "all_right", "length")] for name, row in by_subset if isinstance(row, dict)],
        ),
        Table("By style", ("pairs", "in order"), [[name, share(row)] for name, row in items_of(pairs, "styles")]),
        Table(
            "Instructions that a program checks",
            ("model", "prompts, all followed", "instructions followed"),
            [[name, *shares(row, "prompts", "instructions")] for name, row in items_of(found, "instructions")],
        ),
        Table(
            f"In-context learning on {visible(str(get(shots, 'task')), 60)}; the most frequent label alone: {majority}",
            ("model", "examples", "that fit", "accuracy"),
            [
                [name, f"{k:g}", f"{number(row, 'shown') or 0:g}", *shares(row, "accuracy")]
                for name, of_model in shot_rows(shots)
                for row, (k, *_) in of_model
            ],
        ),
        Table(
            "Overlap with the pretraining text",
            ("prompts", "number", "too short to check", "words of an n-gram", "share an n-gram", "near-duplicates"),
            [
                [
                    name,
                    *(count(row, k) for k in ("prompts", "too_short", "n")),
                    *shares(row, "contaminated", "near_duplicates"),
                ]
                for name, row in items_of(found, "overlap")
            ],
        ),
        *judge_tables(judged),
        Table(
            "Benchmarks (lm-eval)",
            ("task", *(name for name, _ in benchmarks)),
            [[task, *(cell(get(model, task)) for _, model in benchmarks)] for task in tasks],
        ),
    ]
    return {"tables": [table for table in tables if table.rows], "disagreements": disagreements(judged)}


def judge_tables(judged: Any) -> list[Table]:
    if not isinstance(get(judged, "pair"), list):
        return []
    rows = [
        ("win rate", get(judged, "win_rate")),
        ("at equal length", get(judged, "length_controlled")),
        ("both orders agree", get(judged, "both_orders_agree")),
        ("for the first place", get(judged, "first_place")),
    ]
    for name, other in items_of(judged, "others"):
        rows += [
            (f"by the {name}", get(other, "win_rate")),
            (f"same preference as the {name}", get(other, "agreement")),
        ]
    counts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in items_of(judged, "counts"))
    cost = "" if (paid := number(judged, "cost")) is None else f", cost {paid:g}"
    caption = f"{' over '.join(map(str, judged['pair']))}, judged by {judged.get('judge')} ({counts}){cost}"
    shown = [[label, share(figure)] for label, figure in rows]
    return [Table(visible(caption, 300), ("share of prompts", "value"), shown)]


def disagreements(judged: Any) -> list[str]:
    judge, ours = visible(str(get(judged, "judge")), 60), share(get(judged, "win_rate"))
    return [
        f"{judge} gives a win rate of {ours}, the {name} {share(get(other, 'win_rate'))}, on the same answers."
        for name, other in items_of(judged, "others")
        if get(other, "disagrees") is True
    ]


def shot_rows(results: Any) -> Iterator[tuple[str, list[tuple[dict[str, Any], Point]]]]:
    """(model, (row, (K, accuracy and its interval)) of each K) from evaluate.shots."""
    for name, of_model in entries(results, "models"):
        rows = [
            (row, (k, *accuracy))
            for row in rows_of(of_model)
            if (k := number(row, "shots")) is not None and (accuracy := estimate(get(row, "accuracy")))
        ]
        if rows:
            yield visible(str(name), 60), rows

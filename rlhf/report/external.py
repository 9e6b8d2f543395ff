"""The report's tables of evaluations/<name>.json: preference files, checked instructions, in-context learning,
overlap with the pretraining text, a judge, benchmarks."""

from collections.abc import Iterator
from typing import Any

from rlhf.report.audit import cell
from rlhf.report.shots import shot_rows
from rlhf.tracking.run_files import entries, get, number, percent, rows_of, visible

Table = tuple[str, tuple[str, ...], list[list[str]]]


def make_external(found: dict[str, dict[str, Any]], trained_judge: Any = None) -> dict[str, Any]:
    """{"tables", "disagreements"}: a table per evaluation, and a sentence for each judge that contradicts another.

    trained_judge: the entry `judge` of evaluate/results.json.
    """
    tables = [
        *trained_judge_tables(trained_judge),
        *pair_tables(found.get("pairs")),
        *instruction_tables(found.get("instructions")),
        *shot_tables(found.get("shots")),
        *overlap_tables(found.get("overlap")),
        *judge_tables(found.get("judge")),
        *benchmark_tables(found.get("benchmarks")),
    ]
    return {
        "tables": [{"caption": caption, "columns": columns, "rows": rows} for caption, columns, rows in tables if rows],
        "disagreements": list(disagreements(found.get("judge"))),
    }


def items_of(tree: Any, *path: str) -> list[tuple[str, Any]]:
    return [(visible(str(key), 60), value) for key, value in entries(tree, *path)]


def pair_tables(pairs: Any) -> Iterator[Table]:
    rows = [
        ("all", get(pairs, "overall")),
        *items_of(pairs, "subsets"),
        ("mean of subsets", get(pairs, "mean_of_subsets")),
    ]
    yield (
        "The reward model on preference files",
        ("subset", "pairs in order", "rows all in order", "length alone"),
        [
            [name, *(cell(get(row, key), share=True) for key in ("pairs", "all_right", "length"))]
            for name, row in rows
            if isinstance(row, dict)
        ],
    )
    yield (
        "By style",
        ("pairs", "in order"),
        [[name, cell(row, share=True)] for name, row in items_of(pairs, "styles")],
    )


def instruction_tables(models: Any) -> Iterator[Table]:
    rows = [
        [name, *(cell(get(row, key), share=True) for key in ("prompts", "instructions"))]
        for name, row in items_of(models)
    ]
    yield "Instructions that a program checks", ("model", "prompts, all followed", "instructions followed"), rows


def trained_judge_tables(judged: Any) -> Iterator[Table]:
    accuracy = cell(get(judged, "held_out", "accuracy"), share=True)
    rows = []
    for row in rows_of(judged, "pairs"):
        if isinstance(row.get("pair"), list):
            wins = [cell(row.get(key), share=True) for key in ("win_rate", "length_controlled")]
            rows.append([visible(" over ".join(map(str, row["pair"])), 100), *wins, cell(row.get("words"))])
    yield (
        f"Judged by a reward model that none of them was trained with (accuracy {accuracy})",
        ("policies", "wins", "wins at equal length", "words more"),
        rows,
    )


def shot_tables(found: Any) -> Iterator[Table]:
    rows = [
        [name, f"{count:g}", f"{number(row, 'shown') or 0:g}", cell(get(row, "accuracy"), share=True)]
        for name, of_model in shot_rows(found)
        for row, (count, *_) in of_model
    ]
    task, majority = visible(str(get(found, "task")), 60), percent(number(found, "majority"))
    caption = f"In-context learning on {task}; the most frequent label alone: {majority}"
    yield caption, ("model", "examples", "that fit", "accuracy"), rows


def overlap_tables(found: Any) -> Iterator[Table]:
    rows = []
    for name, row in items_of(found):
        counts = [f"{number(row, key) or 0:,.0f}" for key in ("prompts", "too_short", "n")]
        rows.append([name, *counts, *(cell(get(row, key), share=True) for key in ("contaminated", "near_duplicates"))])
    yield (
        "Overlap with the pretraining text",
        ("prompts", "number", "too short to check", "words of an n-gram", "share an n-gram", "near-duplicates"),
        rows,
    )


def judge_tables(judged: Any) -> Iterator[Table]:
    if not isinstance(get(judged, "pair"), list):
        return
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
    counts = [f"{key.replace('_', ' ')} {value}" for key, value in items_of(judged, "counts")]
    cost = number(judged, "cost")
    caption = f"{' over '.join(map(str, judged['pair']))}, judged by {judged.get('judge')} ({', '.join(counts)})"
    caption += "" if cost is None else f", cost {cost:g}"
    yield (
        visible(caption, 300),
        ("share of prompts", "value"),
        [[label, cell(figure, share=True)] for label, figure in rows],
    )


def disagreements(judged: Any) -> Iterator[str]:
    for name, other in items_of(judged, "others"):
        if get(other, "disagrees") is True:
            yield (
                f"{visible(str(get(judged, 'judge')), 60)} gives a win rate of {cell(get(judged, 'win_rate'), share=True)}, the {name} "
                f"{cell(get(other, 'win_rate'), share=True)}, on the same answers."
            )


def benchmark_tables(benchmarks: Any) -> Iterator[Table]:
    models = items_of(benchmarks, "models")
    tasks = dict.fromkeys(key for _, model in models for key, _ in items_of(model))
    rows = [[task, *(cell(get(model, task)) for _, model in models)] for task in tasks]
    yield "Benchmarks (lm-eval)", ("task", *(name for name, _ in models)), rows

"""The report's evaluation: gold parts, the reward model, its calibration and histograms, agreement of ranks, studies."""

import json
import math
from collections.abc import Iterator
from typing import Any

from rlhf.recipe import BASELINES
from rlhf.report.audit import make_audit
from rlhf.report.charts import (
    Picture,
    make_by_size,
    make_calibration,
    make_choices,
    make_histogram,
    make_paths,
    make_study,
)
from rlhf.report.external import make_external
from rlhf.report.labelled import make_labelled
from rlhf.report.overview import interval, judge_name
from rlhf.report.scaling import make_isoflops
from rlhf.report.shots import make_shots
from rlhf.tracking.jsonl import is_number
from rlhf.tracking.results import histogram
from rlhf.tracking.run_files import RunFiles, get, number, visible

MODELS = ("base", "sft", "ppo", *BASELINES)
# The figures that are drawn of a study with one row per choice.
CHOICE_FIGURES = (
    ("win_rate", "win rate over SFT"),
    ("gold", "true reward"),
    ("kl", "KL to SFT, nats"),
    ("bpb", "bits per byte of held-out text"),
    ("accuracy", "held-out accuracy"),
)
# The figures of the responses' text.
TEXT_FIGURES = (
    ("perplexity", "perplexity under SFT"),
    ("distinct_1", "different words"),
    ("distinct_2", "different word pairs"),
    ("repeated", "same for two prompts"),
    ("repetition", "3-grams said twice"),
    ("tokens", "tokens"),
)
REWARD_FIGURES = (
    ("accuracy", "Accuracy on held-out pairs"),
    ("noise_ceiling", "Ceiling that the labels' noise allows"),
    ("length_baseline", "Length alone"),
    ("above_length", "Accuracy above length alone"),
    ("gold_order_accuracy", "Accuracy on the gold order"),
    ("labeler_agreement", "Labelers' agreement with each other"),
)


def make_evaluation(run: RunFiles) -> dict[str, Any]:
    """The tables of one run's evaluate/results.json."""
    results = run.results
    means, parts = get(results, "gold", "mean_score"), get(results, "gold", "parts")
    models = [model for model in MODELS if model in ("sft", "ppo") or number(means, model) is not None]
    names = dict.fromkeys(part for model in models for part in _keys(get(parts, model)))
    rows = [("all parts", {model: number(means, model) for model in models})] if means else []
    rows += [(visible(part, 100), {model: number(parts, model, part) for model in models}) for part in names]
    gold = [
        (
            name,
            [row[model] for model in models],
            row["ppo"] - row["sft"] if row["ppo"] is not None and row["sft"] is not None else None,
        )
        for name, row in rows
    ]
    tree = get(results, "reward_model")
    figures = [(label, get(tree, key)) for key, label in REWARD_FIGURES]
    figures += [
        ("Accuracy on held-out labelers", get(tree, "held_out_labelers", "accuracy")),
        ("Held-out labelers' agreement", get(tree, "agreement", "held_out")),
    ]
    return {
        "run": run.name,
        "audit": make_audit(run.audit),
        "external": make_external(run.evaluations, get(results, "judge")),
        "labelled": make_labelled(run.labelled),
        "models": models,
        "gold": gold,
        "judge": judge_name(results),
        "policies": list(_policies(results)),
        "texts": list(_texts(results)),
        "text_figures": [title for _, title in TEXT_FIGURES],
        "reward_model": [
            (label, *interval(value), number(value, "n")) for label, value in figures if interval(value)[0] is not None
        ],
        "by_rank_gap": list(_by_rank_gap(get(tree, "by_rank_gap"))),
        "ranks": list(rank_agreement(run)),
        "paid_for": list(_paid_for(get(tree, "gold_regression", "parts"))),
        "calibration": calibration_rows(run),
        "studies": list(study_tables(run)),
        "json": visible(json.dumps(results, indent=1, ensure_ascii=False), 20_000) if results else "",
    }


def _policies(results: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """(policy, reward, KL to SFT, win rates over SFT with interval: by the reward model and by the true score, mean true score), with
    baselines only.
    """
    baselines = get(results, "baselines")
    if not isinstance(baselines, dict):
        return
    ppo = {
        "kl_to_sft_nats": get(results, "kl_to_sft_nats"),
        "rm_win_rate_vs_sft": get(results, "rm_win_rate_vs_sft"),
        "win_rate_vs_sft": get(results, "gold", "win_rate_vs_sft"),
    }
    for name, row in [("sft", {}), ("ppo", ppo), *baselines.items()]:
        score = get(results, "gold", "score", name) or get(results, "gold", "mean_score", name)
        yield (
            visible(name, 60),
            number(results, "reward", name),
            number(row, "kl_to_sft_nats"),
            *(list(interval(found)) for found in (get(row, "rm_win_rate_vs_sft"), get(row, "win_rate_vs_sft"), score)),
        )
    picked = _items(get(results, "generate_and_rate", "picked"))
    for title, best in [("best of", get(results, "best_of_n")), *picked]:
        if not best:
            continue
        yield (
            f"{visible(title, 60).replace('_', ' ')} {number(best, 'n') or 0:g}",
            number(best, "reward"),
            number(best, "kl_estimate_nats"),
            [None] * 3,
            *(
                list(interval(found))
                for found in (get(best, "win_rate_vs_sft"), get(best, "score") or get(best, "gold"))
            ),
        )


def _texts(results: dict[str, Any]) -> Iterator[tuple[str, list[list[Any]]]]:
    """(policy, a figure with interval for each of TEXT_FIGURES)."""
    best = get(results, "best_of_n", "text")
    told = f"best of {number(results, 'best_of_n', 'n') or 0:g}"
    for name, figures in [*_items(get(results, "text")), *([(told, best)] if best else [])]:
        yield visible(name, 60), [list(interval(get(figures, key))) for key, _ in TEXT_FIGURES]


def _items(tree: Any) -> list[tuple[str, Any]]:
    return list(tree.items()) if isinstance(tree, dict) else []


def _keys(tree: Any) -> list[str]:
    return list(tree) if isinstance(tree, dict) else []


def _by_rank_gap(rows: Any) -> Iterator[tuple[Any, ...]]:
    for row in rows if isinstance(rows, list) else []:
        gap = number(row, "gap")
        if gap is not None and interval(row)[0] is not None:
            yield (f"{gap:g} apart", *interval(row), number(row, "n"))


def _paid_for(parts: Any) -> Iterator[tuple[str, float | None, float | None]]:
    for name, row in parts.items() if isinstance(parts, dict) else []:
        yield visible(name, 100), number(row, "weight"), number(row, "true")


def calibration_rows(run: RunFiles) -> list[tuple[float, float, float, float]]:
    """(gap, predicted, observed, n) of the reward model."""
    listed = get(run.results, "reward_model", "calibration")
    keys = ("gap", "predicted", "observed", "n")
    return [
        (row["gap"], row["predicted"], row["observed"], row["n"])
        for row in (listed if isinstance(listed, list) else [])
        if all(number(row, key) is not None for key in keys)
    ]


def scored(run: RunFiles, model: str) -> list[float]:
    """The reward model's scores of a model's held-out responses."""
    return [value for row in run.samples if (value := number(row, "scores", model)) is not None]


def histograms(runs: list[RunFiles]) -> list[tuple[str, dict[str, list[tuple[float, float]]]]]:
    """{model: (middle of a bin, share of responses)} of each run, over bins that all runs share."""
    found = [(run.name, {model: scored(run, model) for model in ("sft", "ppo")}) for run in runs]
    together = {(run, model): values for run, models in found for model, values in models.items()}
    if sum(map(len, together.values())) < 10:
        return []
    shares = histogram(together)
    return [(run, {model: shares[run, model] for model in models}) for run, models in found]


def rank_agreement(run: RunFiles) -> Iterator[tuple[str, float, int]]:
    """(model, Kendall's tau-b, n): whether the reward model and the gold judge order the same responses in the same way."""
    for model in ("sft", "ppo"):
        pairs = [
            (score, gold)
            for row in run.samples
            if (score := number(row, "scores", model)) is not None and (gold := number(row, "gold", model)) is not None
        ]
        if len(pairs) >= 10:
            from scipy.stats import kendalltau

            tau = float(kendalltau([score for score, _ in pairs], [gold for _, gold in pairs]).statistic)
            if math.isfinite(tau):
                yield model, tau, len(pairs)


def make_pictures(runs: list[RunFiles]) -> list[Picture]:
    """Calibration, histograms and studies, all runs on the same axes."""
    pictures = [
        make_calibration([(run.name, calibration_rows(run)) for run in runs]),
        make_histogram(histograms(runs)),
    ]
    for run in runs:
        told = run.name if len(runs) > 1 else ""
        pictures.append(
            make_shots(run.evaluations.get("shots"), "In-context learning" + (f" ({told})" if told else ""))
        )
        for study in run.studies:
            pictures += make_study_pictures(study, told)
    return [picture for picture in pictures if picture is not None]


def make_study_pictures(study: dict[str, Any], run: str) -> Iterator[Picture | None]:
    """A study's frontiers: learned and true reward against KL, one path per choice, or one dot per policy if there is no path."""
    listed = study.get("points")
    points = [
        {key: value for key, value in point.items() if is_number(value)}
        for point in (listed if isinstance(listed, list) else [])
        if isinstance(point, dict)
    ]
    title = visible(study.get("title") or study.get("file") or "study", 100)
    if isinstance(sizes := study.get("sizes"), dict):
        yield make_by_size(f"Preference over {visible(study.get('reference'), 60)}", *_by_size(study, sizes))
        return
    for measure, unit in (("score", "learned reward"), ("gold", "true reward"), ("win_rate", "win rate over SFT")):
        told = f"{title.partition(':')[0]}: {unit}" + (f" ({run})" if run else "")
        paths = dict(_paths(study, measure))
        yield make_paths(told, paths, unit) if paths else make_study(told, points, measure, unit)
    for measure, unit in CHOICE_FIGURES:
        told = f"{title}: {unit}" + (f" ({run})" if run else "")
        yield make_choices(told, dict(_choices(study, measure)), unit)
    yield make_isoflops(study, "Loss at equal compute" + (f" ({run})" if run else ""))


def _by_size(
    study: dict[str, Any], sizes: dict[str, Any]
) -> tuple[dict[str, float], dict[str, list[tuple[float, float, float]]]]:
    """{size: parameters}, and {policy: its win rate with interval at each size, smallest first}."""
    known = {visible(size, 60): value for size, value in sizes.items() if is_number(value)}
    found: dict[str, list[tuple[float, float, float]]] = {}
    for size in sorted(known, key=lambda size: known[size]):
        for name, row in _items(study.get("rows")):
            value, low, high = interval(get(row, "win_rate"))
            if name.startswith(f"{size} ") and value is not None and low is not None and high is not None:
                found.setdefault(visible(name.removeprefix(f"{size} "), 60), []).append((value, low, high))
    return known, found


def _choices(study: dict[str, Any], measure: str) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """(choice, value and its interval) of a study with one row per choice; without an interval, the value itself."""
    rows = study.get("rows")
    for name, row in rows.items() if isinstance(rows, dict) else []:
        value, low, high = interval(get(row, measure))
        if value is not None:
            ends = (value, value) if low is None or high is None else (low, high)
            yield visible(name.replace("_", " "), 24), (value, *ends)


def _paths(study: dict[str, Any], measure: str) -> Iterator[tuple[str, list[tuple[float, float, float, float]]]]:
    """(choice, rows of KL, value and its interval); if there is no interval, the value itself.

    Best-of-n is drawn at the estimate of its KL if there is one, else at the upper bound.
    """
    curves = study.get("curves")
    found = {name: get(curve, "mean") for name, curve in (curves if isinstance(curves, dict) else {}).items()}
    for name, rows in [*found.items(), ("best of n", study.get("best_of_n"))]:
        path = []
        for row in rows if isinstance(rows, list) else []:
            kl, (value, low, high) = interval(get(row, "kl_estimate"))[0], interval(get(row, measure))
            kl = interval(get(row, "kl"))[0] if kl is None else kl
            if kl is not None and value is not None:
                path.append((kl, value, value if low is None else low, value if high is None else high))
        if path:
            yield visible(name.replace("_", " "), 60), path


def study_tables(run: RunFiles) -> Iterator[dict[str, Any]]:
    """Studies with one row per choice: {"title", "columns", "rows": (choice, figures)}, each figure with its interval."""
    for study in run.studies:
        rows = study.get("rows")
        if not isinstance(rows, dict) or not rows:
            continue
        columns = list(dict.fromkeys(key for row in rows.values() for key in _keys(row) if key != "difference"))
        yield {
            "title": visible(study.get("title") or study.get("file") or "study", 100),
            "columns": [visible(column.replace("_", " "), 40) for column in columns],
            "rows": [
                (visible(name.replace("_", " "), 60), [interval(get(row, column)) for column in columns])
                for name, row in rows.items()
            ],
        }

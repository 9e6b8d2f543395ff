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
    make_scatter,
    make_study,
)
from rlhf.report.external import make_external
from rlhf.report.figures import Point
from rlhf.report.labelled import make_labelled
from rlhf.report.overview import judge_name
from rlhf.report.scaling import make_isoflops
from rlhf.report.shots import make_shots
from rlhf.tracking.jsonl import is_number
from rlhf.tracking.results import histogram
from rlhf.tracking.run_files import RunFiles, entries, estimate, get, interval, number, rows_of, visible

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
    names = dict.fromkeys(part for model in models for part, _ in entries(parts, model))
    rows = [("all parts", {model: number(means, model) for model in models})] if means else []
    rows += [(visible(part, 100), {model: number(parts, model, part) for model in models}) for part in names]
    gold = []
    for name, scores in rows:
        sft, ppo = scores["sft"], scores["ppo"]
        gold.append((name, [*scores.values()], None if sft is None or ppo is None else ppo - sft))
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
        "by_rank_gap": list(_by_rank_gap(tree)),
        "ranks": list(rank_agreement(run)),
        "part_weights": [
            (visible(name, 100), number(row, "weight"), number(row, "true"))
            for name, row in entries(tree, "gold_regression", "parts")
        ],
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
    picked = entries(results, "generate_and_rate", "picked")
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
    best_name = f"best of {number(results, 'best_of_n', 'n') or 0:g}"
    for name, figures in [*entries(results, "text"), *([(best_name, best)] if best else [])]:
        yield visible(name, 60), [list(interval(get(figures, key))) for key, _ in TEXT_FIGURES]


def _by_rank_gap(reward_model: Any) -> Iterator[tuple[Any, ...]]:
    for row in rows_of(reward_model, "by_rank_gap"):
        gap = number(row, "gap")
        if gap is not None and interval(row)[0] is not None:
            yield (f"{gap:g} apart", *interval(row), number(row, "n"))


def calibration_rows(run: RunFiles) -> list[tuple[float, float, float, float]]:
    """(gap, predicted, observed, n) of the reward model."""
    return [
        (row["gap"], row["predicted"], row["observed"], row["n"])
        for row in rows_of(run.results, "reward_model", "calibration")
        if all(number(row, key) is not None for key in ("gap", "predicted", "observed", "n"))
    ]


def scored(run: RunFiles, model: str) -> list[float]:
    """The reward model's scores of a model's held-out responses."""
    return [value for row in run.samples if (value := number(row, "scores", model)) is not None]


def histograms(runs: list[RunFiles]) -> list[tuple[str, dict[str, list[tuple[float, float]]]]]:
    """{model: (middle of a bin, share of responses)} of each run, over bins that all runs share."""
    models = ("sft", "ppo")
    scores = {(run.name, model): scored(run, model) for run in runs for model in models}
    if sum(map(len, scores.values())) < 10:
        return []
    shares = histogram(scores)
    return [(run.name, {model: shares[run.name, model] for model in models}) for run in runs]


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
        of_run = f" ({run.name})" if len(runs) > 1 else ""
        pictures.append(make_shots(run.evaluations.get("shots"), f"In-context learning{of_run}"))
        for study in run.studies:
            pictures += make_study_pictures(study, of_run)
    return [picture for picture in pictures if picture is not None]


def make_study_pictures(study: dict[str, Any], of_run: str) -> Iterator[Picture | None]:
    """A study's frontiers: learned and true reward against KL, one path per choice, or one dot per policy if there is no path.

    of_run: the end of the pictures' titles.
    """
    points = [{key: value for key, value in row.items() if is_number(value)} for row in rows_of(study, "points")]
    title = study_title(study)
    if isinstance(study.get("sizes"), dict):
        yield make_by_size(f"Preference over {visible(study.get('reference'), 60)}", *_by_size(study))
        return
    yield make_scatter(f"{title}{of_run}", _outcomes(study), "pairs flipped by the attacks", "true reward gained")
    for measure, unit in (("score", "learned reward"), ("gold", "true reward"), ("win_rate", "win rate over SFT")):
        frontier, paths = f"{title.partition(':')[0]}: {unit}{of_run}", dict(_paths(study, measure))
        yield make_paths(frontier, paths, unit) if paths else make_study(frontier, points, measure, unit)
    for measure, unit in CHOICE_FIGURES:
        yield make_choices(f"{title}: {unit}{of_run}", dict(_choices(study, measure)), unit)
    yield make_isoflops(study, f"Loss at equal compute{of_run}")


def _outcomes(study: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """{parent: (mean share of flipped pairs, true reward gained) of its runs} of an audit study."""
    dots: dict[str, list[tuple[float, float]]] = {}
    for row in rows_of(study, "runs"):
        flips, gain = get(row, "figures", "mean_flips"), get(row, "gold_gain")
        if is_number(flips) and is_number(gain):
            dots.setdefault(visible(row.get("parent"), 60), []).append((flips, gain))
    return dots


def study_title(study: dict[str, Any]) -> str:
    return visible(study.get("title") or study.get("file") or "study", 100)


def _by_size(study: dict[str, Any]) -> tuple[dict[str, float], dict[str, list[tuple[float, float, float]]]]:
    """{size: parameters}, and {policy: its win rate with interval at each size, smallest first}."""
    sizes = {visible(size, 60): value for size, value in entries(study, "sizes") if is_number(value)}
    win_rates: dict[str, list[tuple[float, float, float]]] = {}
    for size in sorted(sizes, key=lambda size: sizes[size]):
        for name, row in entries(study, "rows"):
            win_rate = estimate(get(row, "win_rate"))
            if name.startswith(f"{size} ") and win_rate is not None:
                win_rates.setdefault(visible(name.removeprefix(f"{size} "), 60), []).append(win_rate)
    return sizes, win_rates


def _choices(study: dict[str, Any], measure: str) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """(choice, value and its interval) of a study with one row per choice."""
    for name, row in entries(study, "rows"):
        if (figure := estimate(get(row, measure))) is not None:
            yield visible(name.replace("_", " "), 24), figure


def _paths(study: dict[str, Any], measure: str) -> Iterator[tuple[str, list[Point]]]:
    """(choice, rows of KL, value and its interval).

    Best-of-n is drawn at the estimate of its KL if there is one, else at the upper bound.
    """
    curves = [(name, rows_of(curve, "mean")) for name, curve in entries(study, "curves")]
    for name, rows in [*curves, ("best of n", rows_of(study, "best_of_n"))]:
        path = []
        for row in rows:
            kl, figure = estimate(get(row, "kl_estimate")) or estimate(get(row, "kl")), estimate(get(row, measure))
            if kl is not None and figure is not None:
                path.append((kl[0], *figure))
        if path:
            yield visible(name.replace("_", " "), 60), path


def study_tables(run: RunFiles) -> Iterator[dict[str, Any]]:
    """Studies with one row per choice: {"title", "columns", "rows": (choice, figures)}, each figure with its interval."""
    for study in run.studies:
        rows = entries(study, "rows")
        if not rows:
            continue
        columns = list(dict.fromkeys(key for _, row in rows for key, _ in entries(row) if key != "difference"))
        yield {
            "title": study_title(study),
            "columns": [visible(column.replace("_", " "), 40) for column in columns],
            "rows": [
                (visible(name.replace("_", " "), 60), [interval(get(row, column)) for column in columns])
                for name, row in rows
            ],
        }

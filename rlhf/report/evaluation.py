"""The report's evaluation: true scores, policies, the reward model with its calibration and histograms, agreement of ranks."""

import json
import math
from collections.abc import Iterator
from typing import Any

from rlhf.recipe import BASELINES
from rlhf.report.figures import Curve, Mark, with_intervals
from rlhf.report.overview import judge_name
from rlhf.report.pictures import Picture, make_calibration, make_histogram
from rlhf.report.tables import Table, cell, make_audit, make_external, make_labelled, share, shot_rows
from rlhf.runs.results import histogram
from rlhf.runs.run_files import RunFiles, decimal, entries, get, interval, number, percent, rows_of, visible

MODELS = ("base", "sft", "ppo", *BASELINES)
TITLES = {"sft": "SFT", "ppo": "PPO", "dpo": "DPO"}
# The figures of the responses' text.
TEXT_FIGURES = {
    "perplexity": "perplexity under SFT",
    "distinct_1": "different words",
    "distinct_2": "different word pairs",
    "repeated": "same for two prompts",
    "repetition": "3-grams said twice",
    "tokens": "tokens",
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


def make_evaluation(run: RunFiles) -> dict[str, Any]:
    """The tables of one run's evaluation, of its audit and of other evaluations."""
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
    return {
        "run": run.name,
        "audit": make_audit(run.audit),
        "external": make_external(run.evaluations, get(results, "judge")),
        "labelled": make_labelled(run.labelled),
        "models": [TITLES.get(model, model) for model in models],
        "gold": gold,
        "judge": judge_name(results),
        "tables": make_tables(run),
        "calibration": calibration_rows(run),
        "json": visible(json.dumps(results, indent=1, ensure_ascii=False), 20_000) if results else "",
    }


def make_tables(run: RunFiles) -> list[Table]:
    """The policies, their texts and the reward model, from evaluate/results.json."""
    results, tree = run.results, get(run.results, "reward_model")
    best = get(results, "best_of_n", "text")
    best_name = f"best of {number(results, 'best_of_n', 'n') or 0:g}"
    texts = [*entries(results, "text"), *([(best_name, best)] if best else [])]
    gaps = [(number(row, "gap"), row) for row in rows_of(tree, "by_rank_gap")]
    return [
        Table(
            "PPO and its baselines, held-out prompts",
            ("policy", "reward", "KL to SFT", "win rate over SFT, reward model", "true win rate", "true score"),
            list(policy_rows(results)),
        ),
        Table(
            "The responses as text, with 95% intervals",
            ("policy", *TEXT_FIGURES.values()),
            [[titled(name), *(cell(get(figures, key), decimal) for key in TEXT_FIGURES)] for name, figures in texts],
        ),
        Table(
            "Reward model",
            ("share of pairs", "value", "95% interval", "pairs"),
            pair_rows([(label, get(tree, *place)) for label, *place in REWARD_FIGURES]),
        ),
        Table(
            "Agreement with labelers by how far apart they ranked two answers",
            ("ranks", "accuracy", "95% interval", "pairs"),
            pair_rows([(f"{gap:g} apart", row) for gap, row in gaps if gap is not None]),
        ),
        Table(
            f"Agreement of ranks: the reward model against the {judge_name(results)}, over the same answers",
            ("answers of", "Kendall's τ-b", "answers"),
            [[model, decimal(tau, 2), f"{n:,.0f}"] for model, tau, n in rank_agreement(run)],
        ),
        Table(
            "What the reward model pays for, and what labelers want",
            ("part", "weight", "wanted"),
            [
                [visible(name, 100), decimal(number(row, "weight"), 2), decimal(number(row, "true"), 2)]
                for name, row in entries(tree, "gold_regression", "parts")
            ],
        ),
    ]


def titled(policy: str) -> str:
    return TITLES.get(policy, visible(policy, 60))


def policy_rows(results: dict[str, Any]) -> Iterator[list[str]]:
    """Policy, reward, KL to SFT, win rates over SFT by the reward model and by the true score, mean true score; with baselines only."""
    baselines = get(results, "baselines")
    if not isinstance(baselines, dict):
        return

    def row(name: str, tree: Any, kl: str, reward: float | None, score: Any) -> list[str]:
        rates = share(get(tree, "rm_win_rate_vs_sft")), share(get(tree, "win_rate_vs_sft"))
        return [name, decimal(reward), decimal(number(tree, kl)), *rates, cell(score, decimal)]

    ppo = results | {"win_rate_vs_sft": get(results, "gold", "win_rate_vs_sft")}
    for name, tree in [("sft", {}), ("ppo", ppo), *baselines.items()]:
        score = get(results, "gold", "score", name) or get(results, "gold", "mean_score", name)
        yield row(titled(name), tree, "kl_to_sft_nats", number(results, "reward", name), score)
    for title, best in [("best of", get(results, "best_of_n")), *entries(results, "generate_and_rate", "picked")]:
        if best:
            name = f"{visible(title.replace('_', ' '), 60)} {number(best, 'n') or 0:g}"
            score = get(best, "score") or get(best, "gold")
            yield row(name, best, "kl_estimate_nats", number(best, "reward"), score)


def pair_rows(figures: list[tuple[str, Any]]) -> list[list[str]]:
    """Label, share, interval and number of pairs of the figures that have a value."""
    rows = []
    for label, figure in figures:
        (value, low, high), n = interval(figure), number(figure, "n")
        if value is not None:
            span = "" if low is None else f"{percent(low)} – {percent(high)}"
            rows.append([label, percent(value), span, "" if n is None else f"{n:,.0f}"])
    return rows


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
    """Calibration, histograms and in-context learning, the first two of all runs on the same axes."""
    pictures = [
        make_calibration([(run.name, calibration_rows(run)) for run in runs]),
        make_histogram(histograms(runs)),
    ]
    for run in runs:
        of_run = f" ({run.name})" if len(runs) > 1 else ""
        pictures.append(make_shots(run.evaluations.get("shots"), f"In-context learning{of_run}"))
    return [picture for picture in pictures if picture is not None]


def make_shots(results: Any, title: str) -> Picture | None:
    """Accuracy by examples in the prompt, a line per model with its 95% interval."""
    series = [
        with_intervals(name, [point for _, point in rows], colour)
        for colour, (name, rows) in enumerate(shot_rows(results))
    ]
    majority = number(results, "majority")
    marks = [] if majority is None else [Mark("most frequent label", majority)]
    curve = Curve(series, marks, x_name="examples in the prompt", label=title, y_name="accuracy")
    note = "The same held-out examples and draws for every model; 95% intervals."
    unit = "accuracy, over examples in the prompt"
    return Picture(title, curve, "evaluate", unit, note=note, half=True) if series else None

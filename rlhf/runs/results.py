"""The final figures of results.json as metrics and tables, for dashboards.

results.json is the record; figures that it lacks are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.runs.metric_table import TABLES
from rlhf.runs.run_files import entry_at, is_figure, with_interval
from rlhf.runs.trackers import Tracker

# Metric under eval/test/ by its path in results.json.
PLACES: dict[str, tuple[str, ...]] = {
    "accuracy": ("reward_model", "accuracy"),
    "length_baseline": ("reward_model", "length_baseline"),
    "noise_ceiling": ("reward_model", "noise_ceiling"),
    "gold_order_accuracy": ("reward_model", "gold_order_accuracy"),
    "labeler_agreement": ("reward_model", "labeler_agreement"),
    "win_rate": ("gold", "win_rate_vs_sft"),
    "win_rate_greedy": ("gold", "win_rate_greedy"),
    "scores": ("reward", "ppo"),
    "eos_fraction": ("ended", "ppo"),
    "kl": ("kl_to_sft_nats",),
    "bpb": ("pretrain_bits_per_byte",),
    "gold/total": ("gold", "mean_score", "ppo"),
}
HELD_OUT_LABELERS = ("reward_model", "held_out_labelers", "accuracy")
BINS = 24


def log_results(tracker: Tracker, results: Mapping[str, Any], scores: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Logs the figures under eval/test/, the calibration curve and the histograms of `scores`, {model: a list per prompt}."""
    metrics = {
        f"eval/test/{name}": value
        for name, place in PLACES.items()
        if (value := with_interval(entry_at(results, *place))[0]) is not None
    }
    parts = entry_at(results, "gold", "parts", "ppo")
    if isinstance(parts, Mapping):
        metrics |= {f"eval/test/gold/{name}": float(value) for name, value in parts.items() if is_figure(value)}
    if (strangers := with_interval(entry_at(results, *HELD_OUT_LABELERS))[0]) is not None:
        metrics["eval/held_out_labelers/accuracy"] = strangers
    tracker.log(metrics, step=0)
    rows = entry_at(results, "reward_model", "calibration") or []
    curves = [(row["gap"], curve, row[curve], row["n"]) for row in rows for curve in ("predicted", "observed")]
    tracker.table("calibration", TABLES["calibration"], curves)
    flat = {model: [score for row in rows for score in row] for model, rows in scores.items()}
    bins = [(middle, model, share) for model, rows in histogram(flat).items() for middle, share in rows]
    tracker.table("score_histogram", TABLES["score_histogram"], bins)
    tracker.summary(metrics)


def histogram(scores: Mapping[Any, Sequence[float]]) -> dict[Any, list[tuple[float, float]]]:
    """{name: (middle of a bin, share of its scores)}, all models over the same bins."""
    import numpy as np

    edges = np.histogram_bin_edges([score for values in scores.values() for score in values], BINS)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    shares = {model: np.histogram(values, edges)[0] / max(len(values), 1) for model, values in scores.items()}
    return {model: list(zip(middles, shares[model].tolist(), strict=True)) if scores[model] else [] for model in scores}

"""The final figures of results.json as metrics and tables, so that a dashboard has them beside the curves.

results.json stays the record; what is missing there is missing here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.tracking.jsonl import is_number
from rlhf.tracking.panels import TABLES
from rlhf.tracking.writers import Tracker

# Metric under eval/test/ by its place in results.json.
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
        if (value := find_number(results, place)) is not None
    }
    parts = at(results, ("gold", "parts", "ppo"))
    if isinstance(parts, Mapping):
        metrics |= {f"eval/test/gold/{name}": float(value) for name, value in parts.items() if is_number(value)}
    strangers = find_number(results, HELD_OUT_LABELERS)
    if strangers is not None:
        metrics["eval/held_out_labelers/accuracy"] = strangers
    tracker.log(metrics, step=0)
    tracker.table("calibration", TABLES["calibration"], list(calibration_rows(results)))
    tracker.table("score_histogram", TABLES["score_histogram"], list(histogram_rows(scores)))
    tracker.summary(metrics)


def at(tree: Any, place: Sequence[str]) -> Any:
    for key in place:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def find_number(tree: Any, place: Sequence[str]) -> float | None:
    """The number there, or the `value` of {"value", "ci95", …}."""
    found = at(tree, place)
    found = found.get("value") if isinstance(found, Mapping) else found
    return float(found) if found is not None and is_number(found) else None


def calibration_rows(results: Mapping[str, Any]) -> Iterator[tuple[float, str, float, int]]:
    """(score gap, predicted or observed, share of wins, pairs)."""
    for row in at(results, ("reward_model", "calibration")) or []:
        for curve in ("predicted", "observed"):
            yield row["gap"], curve, row[curve], row["n"]


def histogram_rows(scores: Mapping[str, Sequence[Sequence[float]]]) -> Iterator[tuple[float, str, float]]:
    """(middle of a bin, model, share of its responses), all models over the same bins."""
    flat = {model: [score for row in rows for score in row] for model, rows in scores.items()}
    everything = [score for values in flat.values() for score in values]
    if not everything:
        return
    low = min(everything)
    width = (max(everything) - low) / BINS or 1.0
    for model, values in flat.items():
        counts = [0] * BINS
        for value in values:
            counts[min(int((value - low) / width), BINS - 1)] += 1
        for i, count in enumerate(counts):
            yield low + (i + 0.5) * width, model, count / len(values)

"""Means with 95% intervals in which a prompt, not a sample, is the unit."""

import math
from collections.abc import Sequence


def interval(values: Sequence[float]) -> dict[str, object]:
    """{"value": mean, "ci95": [low, high], "n"} of one number per prompt, by the normal approximation."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / max(1, n - 1)
    half = 1.96 * math.sqrt(variance / n)
    return {"value": round(mean, 4), "ci95": [round(mean - half, 4), round(mean + half, 4)], "n": n}


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, object]:
    """As `interval`, for a share whose parts come from prompts: sum of numerators over sum of denominators.

    The interval is the delta method's with a prompt as the unit (Cochran 1977, section 6.3).
    """
    n, total = len(numerators), sum(denominators)
    ratio = sum(numerators) / total
    residuals = sum((a - ratio * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    half = 1.96 * math.sqrt(n / max(1, n - 1) * residuals) / total
    return {"value": round(ratio, 4), "ci95": [round(ratio - half, 4), round(ratio + half, 4)], "n": round(total)}


def win_rate(scores: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> dict[str, object]:
    """How often a response beats the baseline's: all pairs of samples of a prompt, ties half, then over prompts."""
    per_prompt = []
    for ours, theirs in zip(scores, baseline, strict=True):
        points = [1.0 if a > b + 1e-9 else 0.5 if abs(a - b) <= 1e-9 else 0.0 for a in ours for b in theirs]
        per_prompt.append(sum(points) / len(points))
    return interval(per_prompt)

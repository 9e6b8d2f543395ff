"""Means with 95% intervals in which a prompt, not a sample, is the unit; the figures of a classifier."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

RIDGE = 1e-3  # ridge of a logistic regression, so that it has a solution if one side always wins


Figures = dict[str, Any]


def figure(value: float, half: float | None, n: int) -> Figures:
    """{"value", "ci95": [low, high], "n"}, rounded. half: half the width of the interval; None if it is unknown."""
    ends = None if half is None else [round(value - half, 4), round(value + half, 4)]
    return {"value": round(value, 4), "ci95": ends, "n": n}


def interval(values: Sequence[float]) -> Figures:
    """`figure` of the mean of one number per prompt, by the normal approximation."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / max(1, n - 1)
    return figure(mean, 1.96 * math.sqrt(variance / n), n)


def sum_by(keys: Sequence[Any], values: Sequence[float]) -> list[float]:
    """The sum of the values of each key, in the order in which the keys first occur."""
    sums = dict.fromkeys(keys, 0.0)
    for key, value in zip(keys, values, strict=True):
        sums[key] += value
    return list(sums.values())


def per_key(keys: Sequence[Any], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The sum of the values of each key, and their number: a `ratio_interval` of means of values with a key as the unit."""
    return sum_by(keys, values), sum_by(keys, [1.0] * len(keys))


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Figures:
    """As `interval`, for a share whose parts come from prompts: sum of numerators over sum of denominators.

    The interval is the delta method's with a prompt as the unit (Cochran 1977, section 6.3).
    """
    n, total = len(numerators), sum(denominators)
    ratio = sum(numerators) / total
    residuals = sum((a - ratio * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    return figure(ratio, 1.96 * math.sqrt(n / max(1, n - 1) * residuals) / total, round(total))


def win_points(scores: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> list[float]:
    """How often a response to each prompt beats the baseline's: all pairs of samples, ties half."""
    return [sum(points) / len(points) for points in pair_points(scores, baseline)]


def pair_points(scores: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> list[list[float]]:
    """1 for a response that beats the baseline's, 1/2 for a tie, else 0: all pairs of samples, a list per prompt."""
    return [
        [1.0 if a > b + 1e-9 else 0.5 if abs(a - b) <= 1e-9 else 0.0 for a in ours for b in theirs]
        for ours, theirs in zip(scores, baseline, strict=True)
    ]


def win_rate(scores: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> Figures:
    """The mean of `win_points` over prompts."""
    return interval(win_points(scores, baseline))


def length_controlled(points: Sequence[Sequence[float]], lengths: Sequence[Sequence[float]]) -> Figures:
    """The win rate if both answers had the same number of words, by logistic regression: sigmoid(a) of

        P(win) = sigmoid(a + b d / sd(d))        d = words of ours minus theirs

    points, lengths: one value per comparison of a prompt's answers, a list per prompt, all of one length. The interval is a sandwich
    with the prompt as the unit. value is None if one side's answers are always longer: the data then say nothing about equal length.
    Source: Dubois et al. 2024, equation 2. Differs: no term per prompt, and d as it is rather than its hyperbolic tangent.
    """
    y, d = np.array(points, dtype=float), np.array(lengths, dtype=float)  # (prompts, comparisons)
    if d.min() > 0 or d.max() < 0:
        return {"value": None, "ci95": None, "n": len(y), "per_sd_of_length": None}
    x = np.stack([np.ones_like(d), d / d.std() if d.std() > 0 else np.zeros_like(d)], -1)  # (prompts, comparisons, 2)
    flat, wins, w = x.reshape(-1, 2), y.reshape(-1), np.zeros(2)
    for _ in range(100):
        p = 1.0 / (1.0 + np.exp(-flat @ w))
        curvature = flat.T @ (flat * (p * (1 - p))[:, None]) + RIDGE * np.eye(2)
        step = np.linalg.solve(curvature, flat.T @ (wins - p) - RIDGE * w)
        w += step
        if np.abs(step).max() < 1e-10:
            break
    bread = np.linalg.inv(curvature)
    residual = (x * (y - p.reshape(y.shape))[..., None]).sum(1)  # (prompts, 2)
    error = math.sqrt((bread @ (residual.T @ residual) @ bread)[0, 0])
    low, value, high = (1.0 / (1.0 + math.exp(-(w[0] + side * 1.96 * error))) for side in (-1, 0, 1))
    rate: Figures = {"value": round(value, 4), "ci95": [round(low, 4), round(high, 4)], "n": len(y)}
    return rate | {"per_sd_of_length": round(float(w[1]), 4)}


def show(figure: dict[str, Any] | None, digits: int = 3) -> str:
    """A figure with its interval, if it has one, as text."""
    if figure is None or figure["value"] is None:
        return "none"
    ends = "" if figure["ci95"] is None else " [" + ", ".join(f"{end:.{digits}f}" for end in figure["ci95"]) + "]"
    return f"{figure['value']:.{digits}f}{ends}"


def wilson(right: int, n: int) -> Figures:
    """{"value", "ci95", "n"} of a share of independent cases. Source: Wilson 1927; z = 1.96."""
    share, z2 = right / n, 1.96**2
    centre, half = share + z2 / (2 * n), 1.96 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    ends = [(centre - half) / (1 + z2 / n), (centre + half) / (1 + z2 / n)]
    return {"value": round(share, 4), "ci95": [abs(round(end, 4)) for end in ends], "n": n}  # no -0.0


def classification(labels: Sequence[int], predicted: Sequence[int], classes: Sequence[str]) -> dict[str, Any]:
    """Accuracy, macro F1 over the classes that occur, the confusion matrix (a row per label), and figures per class.

    majority: the accuracy of always saying the most frequent label.
    """
    confusion = [[0] * len(classes) for _ in classes]
    for label, prediction in zip(labels, predicted, strict=True):
        confusion[label][prediction] += 1
    rows: dict[str, Figures] = {}
    scores = []
    for i, name in enumerate(classes):
        right, positives, n = confusion[i][i], sum(row[i] for row in confusion), sum(confusion[i])
        f1 = 2 * right / (positives + n) if positives + n else 0.0
        scores += [f1] if positives + n else []
        precision, recall = right / positives if positives else None, right / n if n else None
        rows[name] = {"n": n, "precision": precision, "recall": recall, "f1": f1}
    right = sum(confusion[i][i] for i in range(len(classes)))
    return {
        "accuracy": wilson(right, len(labels)),
        "macro_f1": sum(scores) / len(scores),
        "majority": max(map(sum, confusion)) / len(labels),
        "classes": rows,
        "confusion": confusion,
    }


def text_figures(
    texts: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]], nats: Sequence[Sequence[float]]
) -> dict[str, Figures]:
    """Figures of one policy's responses, a list per prompt.

    lengths: response tokens; nats: log-probs of whole responses under the SFT model.
    perplexity: under the SFT model, per token. distinct_n: different n-grams of words over all n-grams, and repeated: share of
    responses that occur for another prompt too; both use the first response to each prompt, so that they do not depend on
    the number of samples. repetition: share of a response's 3-grams that it contains earlier. tokens, words: per response.
    """
    words = [[text.lower().split() for text in row] for row in texts]
    first = [row[0] for row in words]
    said = Counter(map(tuple, first))
    spread = ratio_interval([-sum(row) for row in nats], [float(sum(row)) for row in lengths])
    return {
        "perplexity": exponential(spread),
        **{f"distinct_{n}": distinct([ngrams(response, n) for response in first]) for n in (1, 2, 3)},
        "repeated": interval([float(said[tuple(response)] > 1) for response in first]),
        "repetition": interval([mean([repetition(response) for response in row]) for row in words]),
        "tokens": interval([mean(row) for row in lengths]),
        "words": interval([mean([len(response) for response in row]) for row in words]),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def exponential(of: Figures) -> Figures:
    ends = [round(math.exp(end), 4) for end in of["ci95"]]
    return of | {"value": round(math.exp(of["value"]), 4), "ci95": ends}


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def repetition(words: Sequence[str]) -> float:
    trigrams = ngrams(words, 3)
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def distinct(rows: Sequence[Sequence[tuple[str, ...]]]) -> Figures:
    """Different n-grams over all n-grams of all rows; the interval is the delete-one jackknife's (Efron and Tibshirani 1993,
    chapter 11).
    """
    rows_with: Counter[tuple[str, ...]] = Counter(gram for row in rows for gram in set(row))
    total, kinds, n = sum(map(len, rows)), len(rows_with), len(rows)
    if not total or n < 2:
        return {"value": None, "ci95": None, "n": n}
    left = []
    for row in rows:
        alone = sum(rows_with[gram] == 1 for gram in set(row))
        left.append((kinds - alone) / max(1, total - len(row)))
    centre = mean(left)
    return figure(kinds / total, 1.96 * math.sqrt((n - 1) / n * sum((x - centre) ** 2 for x in left)), n)

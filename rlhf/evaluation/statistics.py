"""Means with 95% intervals in which a prompt, not a sample, is the unit; the figures of a classifier."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pvariance
from typing import Any

import numpy as np

from rlhf.data.agreement import LEAST_ITEMS, figure, ratio_interval

RIDGE = 1e-3  # ridge of a logistic regression, so that it has a solution if one side always wins
SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？]*")
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")

Figures = dict[str, Any]


def flatten(rows: Iterable[Iterable[Any]]) -> list[Any]:
    """All values of rows in turn."""
    return list(itertools.chain.from_iterable(rows))


def split_like(values: Iterable[Any], rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """Flat values as rows of the given rows' lengths: the inverse of `flatten`."""
    flat = iter(values)
    return [list(itertools.islice(flat, len(row))) for row in rows]


def interval(values: Sequence[float], share: bool = False) -> Figures:
    """`figure` of the mean of one number per prompt, by the normal approximation. share: of numbers in [0, 1]."""
    return ratio_interval(values, [1.0] * len(values), share)


def interval_of(rows: Sequence[Sequence[float]], share: bool = False) -> Figures:
    """`interval` of each prompt's mean."""
    return interval(list(map(fmean, rows)), share)


def mean_by(keys: Sequence[Any], values: Sequence[float], share: bool = False) -> Figures:
    """`ratio_interval` of the mean of values, with a key (a prompt) as the unit. share: of values in [0, 1]."""
    sums: dict[Any, float] = dict.fromkeys(keys, 0.0)
    for key, value in zip(keys, values, strict=True):
        sums[key] += value
    return ratio_interval(list(sums.values()), list(Counter(keys).values()), share)


def ends(figure: Figures) -> list[float]:
    """The ends of a figure's interval; without one nothing is excluded."""
    return figure["ci95"] or [-math.inf, math.inf]


def within_bounds(share: Figures) -> Figures:
    """A share's figure with the ends of its interval within 0 and 1."""
    return share | {"ci95": share["ci95"] and [min(1.0, max(0.0, end)) for end in share["ci95"]]}


def win(a: float, b: float) -> float:
    """1 if a is above b, 1/2 if they are equal, else 0."""
    return (a > b) + 0.5 * (a == b)


def pair_points(scores: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> list[list[float]]:
    """1 for a response that beats the baseline's, 1/2 for a tie, else 0: all pairs of samples, a list per prompt."""
    return [
        [1.0 if a > b + 1e-9 else 0.5 if abs(a - b) <= 1e-9 else 0.0 for a in ours for b in theirs]
        for ours, theirs in zip(scores, baseline, strict=True)
    ]


def win_rate(scores: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> Figures:
    """How often a response beats the baseline's: all pairs of samples to a prompt, ties half; the mean over prompts."""
    return interval_of(pair_points(scores, baseline), share=True)


def prediction_powered(labelled: Mapping[Any, float], judged: Mapping[Any, float]) -> Figures:
    """The mean of people's values, corrected by a judge's values on the same keys (prompts) and on many more.

        theta = mean(Y) + weight (mean of F without labels - mean of F with them),  weight = cov(Y, F) / ((1 + n / N)
        var(F))

    With the judge's correlation rho to the people, n labelled keys and N others the interval has
    sqrt(1 - rho^2 N / (n + N)) of the width of the people's own. labelled, judged: Y and F by key; keys without F are left out.
    Source: Angelopoulos et al. 2023, "PPI++: Efficient Prediction-Powered Inference", equation 2 and section 6.
    """
    keys = [key for key in labelled if key in judged]
    n, rest = len(keys), [value for key, value in judged.items() if key not in labelled]
    people = interval([labelled[key] for key in keys], share=True) if keys else figure(0.0, None, 0) | {"value": None}
    if n < LEAST_ITEMS or len(rest) < 2 or people["value"] in (0.0, 1.0):
        return {"people": people, "corrected": people, "rho": None, "judged": len(rest)}
    y, f = np.array([labelled[key] for key in keys]), np.array([judged[key] for key in keys])
    both = np.array([*f, *rest]).var(ddof=1)
    covariance = float(np.cov(y, f)[0, 1])
    weight = covariance / ((1 + n / len(rest)) * both) if both > 0 else 0.0
    rho = covariance / math.sqrt(y.var(ddof=1) * f.var(ddof=1)) if y.var() > 0 and f.var() > 0 else None
    value = float(y.mean() + weight * (np.mean(rest) - f.mean()))
    half = 1.96 * math.sqrt((y - weight * f).var(ddof=1) / n + weight**2 * both / len(rest))
    corrected = within_bounds(figure(value, half, n + len(rest)))
    return {"people": people, "corrected": corrected, "rho": rho and round(rho, 4), "judged": len(rest)}


def length_controlled(points: Sequence[Sequence[float]], lengths: Sequence[Sequence[float]]) -> Figures:
    """The win rate if both answers had the same number of words, by logistic regression: sigmoid(a) of

        P(win) = sigmoid(a + b d / sd(d))        d = words of ours minus theirs

    points, lengths: one value per comparison of a prompt's answers, a list per prompt, all of one length. The interval
    is a sandwich with the prompt as the unit. value is None if one side's answers are always longer: the data then say
    nothing about equal length.
    Source: Dubois et al. 2024, equation 2. Differs: no term per prompt, and d as it is rather than its hyperbolic
    tangent.
    """
    y, d = np.array(points, dtype=float), np.array(lengths, dtype=float)  # (prompts, comparisons)
    if d.min() > 0 or d.max() < 0:
        return {"value": None, "ci95": None, "n": len(y)}
    if y.min() == y.max() in (0.0, 1.0):  # one side always wins: the regression's weight has no end
        return interval_of(points, share=True)
    x = np.stack([np.ones_like(d), d / (d.std() or 1.0)], -1)  # (prompts, comparisons, 2)
    w = np.zeros(2)
    for _ in range(100):  # Newton's method
        p = 1.0 / (1.0 + np.exp(-x @ w))
        curvature = np.einsum("ijk,ij,ijl->kl", x, p * (1 - p), x) + RIDGE * np.eye(2)
        residual = (x * (y - p)[..., None]).sum(1)  # (prompts, 2)
        step = np.linalg.solve(curvature, residual.sum(0) - RIDGE * w)
        w += step
        if np.abs(step).max() < 1e-10:
            break
    bread = np.linalg.inv(curvature)
    error = math.sqrt((bread @ (residual.T @ residual) @ bread)[0, 0])
    low, value, high = (1.0 / (1.0 + math.exp(-(w[0] + side * 1.96 * error))) for side in (-1, 0, 1))
    ends = [round(low, 4), round(high, 4)] if len(y) >= LEAST_ITEMS else None
    return {"value": round(value, 4), "ci95": ends, "n": len(y)}


def show(figure: Figures | None, digits: int = 3) -> str:
    """A figure with its interval, if it has one, as text."""
    if figure is None or figure["value"] is None:
        return "not known"
    ends = "" if figure["ci95"] is None else " [" + ", ".join(f"{end:.{digits}f}" for end in figure["ci95"]) + "]"
    return f"{figure['value']:.{digits}f}{ends}"


def describe(results: Figures, name: str) -> list[str]:
    """Results as text: for each mapping a line with its path and its figures; lists of names and of numbers are left out."""
    shown: list[str] = []
    below: list[str] = []
    for key, value in results.items():
        label = key.replace("_", " ")
        if isinstance(value, dict) and "ci95" in value:
            shown.append(f"{label} {show(value)}" + (f" of {value['n']:,}" if value["n"] else ""))
        elif key == "pair":  # the first is compared with the second
            shown.append(" over ".join(value))
        elif isinstance(value, dict):
            below += describe(value, f"{name}: {label}")
        elif isinstance(value, list):
            below += flatten(describe(row, f"{name}: {label}") for row in value if isinstance(row, dict))
        elif value is not None:
            shown.append(f"{label} {value}")
    return ([f"{name}: {', '.join(shown)}"] if shown else []) + below


def wilson(right: int, n: int) -> Figures:
    """{"value", "ci95", "n"} of a share of independent cases. Source: Wilson 1927."""
    from scipy.stats import binomtest

    ends = binomtest(right, n).proportion_ci(method="wilson")
    return {"value": round(right / n, 4), "ci95": [round(float(end), 4) for end in ends], "n": n}


def classification(labels: Sequence[int], predicted: Sequence[int], classes: Sequence[str]) -> dict[str, Any]:
    """Accuracy, macro F1 over the classes that occur, the confusion matrix (a row per label), and figures per class.

    majority: the accuracy of always saying the most frequent label.
    """
    table = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(table, (np.array(labels), np.array(predicted)), 1)
    counts = zip(classes, table.diagonal().tolist(), table.sum(0).tolist(), table.sum(1).tolist(), strict=True)
    rows: dict[str, Figures] = {
        name: {
            "n": n,
            "precision": right / said if said else None,
            "recall": right / n if n else None,
            "f1": 2 * right / (said + n) if said + n else 0.0,
        }
        for name, right, said, n in counts
    }
    return {
        "accuracy": wilson(int(table.trace()), len(labels)),
        "macro_f1": fmean(row["f1"] for row in rows.values() if row["n"] or row["precision"] is not None),
        "majority": int(table.sum(1).max()) / len(labels),
        "classes": rows,
        "confusion": table.tolist(),
    }


def text_figures(answers: Sequence[Sequence[Any]], nats: Sequence[Sequence[float]]) -> dict[str, Figures]:
    """Figures of one policy's responses, `text` and token `ids`, a list per prompt.

    nats: log-probs of whole responses under the SFT model.
    perplexity: under the SFT model, per token. distinct_n: different n-grams of words over all n-grams, of the first
    response to each prompt, so that it does not depend on the number of samples. repetition: share of a response's
    3-grams that it contains earlier. tokens, words: per response.
    """
    words = [[one.text.lower().split() for one in row] for row in answers]
    lengths = [[len(one.ids) for one in row] for row in answers]
    spread = ratio_interval([-sum(row) for row in nats], [float(sum(row)) for row in lengths])
    value, *ends = (round(math.exp(number), 4) for number in (spread["value"], *(spread["ci95"] or ())))
    return {
        "perplexity": spread | {"value": value, "ci95": ends or None},
        **{f"distinct_{n}": distinct([ngrams(row[0], n) for row in words]) for n in (1, 2, 3)},
        "repetition": interval_of([list(map(repetition, row)) for row in words], share=True),
        "tokens": interval_of(lengths),
        "words": interval_of([list(map(len, row)) for row in words]),
    }


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, each with its closing mark."""
    return [sentence.strip() for sentence in SENTENCE.findall(text) if WORD.search(sentence)]


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def repetition(words: Sequence[str]) -> float:
    trigrams = ngrams(words, 3)
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def distinct(rows: Sequence[Sequence[tuple[str, ...]]]) -> Figures:
    """Different n-grams over all n-grams of all rows, with the delete-one jackknife's interval (Efron and Tibshirani 1993, chapter 11)."""
    rows_with: Counter[tuple[str, ...]] = Counter(gram for row in rows for gram in set(row))
    total, kinds, n = sum(map(len, rows)), len(rows_with), len(rows)
    if not total or n < 2:
        return {"value": None, "ci95": None, "n": n}
    alone = [sum(rows_with[gram] == 1 for gram in set(row)) for row in rows]  # n-grams that only this row has
    left = [(kinds - only) / max(1, total - len(row)) for row, only in zip(rows, alone, strict=True)]
    half = 1.96 * math.sqrt((n - 1) * pvariance(left)) if n >= LEAST_ITEMS else None
    return within_bounds(figure(kinds / total, half or None, n))  # without spread no interval

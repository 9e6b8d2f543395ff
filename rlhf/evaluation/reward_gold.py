"""The reward model compared with the gold world's true scores: its ceiling, the judge's order, and the weights of its score.

Training uses nothing of this.
"""

import itertools
import math
from typing import Any

import numpy as np

from rlhf.config import Config
from rlhf.data.items import Item
from rlhf.evaluation.scoring import Scores, accuracy
from rlhf.evaluation.statistics import Figures
from rlhf.gold.labelers import mean_utility
from rlhf.gold.truth import Truth


def judged_parts(truth: Truth, item: Item) -> list[dict[str, float]]:
    """The judge's parts of an item's answers."""
    assert item.record is not None
    return [truth.judge(item.record, text, ended) for text, ended in item.answers]


def true_utilities(config: Config, truth: Truth, item: Item) -> list[float]:
    """The training labelers' noiseless mean utility of an item's answers."""
    labelers = truth.labelers(config.gold.labeler_noise)
    judged = judged_parts(truth, item)
    return [mean_utility(labelers, parts, text) for parts, (text, _) in zip(judged, item.answers, strict=True)]


def compare_with_truth(config: Config, truth: Truth, items: list[Item], scores: Scores) -> Figures:
    """The ceiling (the labelers' noiseless mean utility on the same pairs) and the accuracy on the judge's own order."""
    points = []
    for item, s in zip(items, scores, strict=True):
        answers = zip((parts["total"] for parts in judged_parts(truth, item)), s, strict=True)
        for (total, score), (lower, other) in itertools.permutations(answers, 2):
            if total > lower + 1e-9:
                points.append(1.0 if score > other else 0.5 if score == other else 0.0)
    utilities = [true_utilities(config, truth, item) for item in items]
    return {
        "noise_ceiling": accuracy(items, utilities)["value"],
        "gold_order_accuracy": round(sum(points) / len(points), 4) if points else None,
    }


def gold_regression(config: Config, truth: Truth, items: list[Item], scores: Scores) -> Figures:
    """What the reward model rewards: least squares of the score on the judge's parts, over held-out responses.

    weight: of the score on a part, both in standard deviations; true: the same for the labelers' noiseless mean utility,
    which a perfect reward model would have learned; labelers: the mean of their weights for the part, in utility per
    unit; coefficient: the score's, in calibrated score per unit. A part that never varies has no weight.
    """
    parts = [judged_parts(truth, item) for item in items]
    x = np.array([[p[name] for name in truth.parts] for judged in parts for p in judged])
    prompts = np.repeat(np.arange(len(items)), [len(judged) for judged in parts])
    y = np.array([score for row in scores for score in row])
    utilities = np.array([u for item in items for u in true_utilities(config, truth, item)])
    learned, true = standardised_regression(x, y, prompts), standardised_regression(x, utilities, prompts)
    labelers = truth.labelers(config.gold.labeler_noise)
    spread = x.std(0)
    rows: dict[str, Figures] = {}
    for k, name in enumerate(truth.parts):
        if math.isnan(learned["weights"][k]):
            rows[name] = {"weight": None, "ci95": None, "true": None, "coefficient": None}
        else:
            low, high = (learned["weights"][k] + sign * 1.96 * learned["errors"][k] for sign in (-1, 1))
            rows[name] = {
                "weight": round(float(learned["weights"][k]), 4),
                "ci95": [round(float(low), 4), round(float(high), 4)],
                "true": round(float(true["weights"][k]), 4),
                "coefficient": round(float(learned["weights"][k] * y.std() / spread[k]), 4),
            }
        rows[name]["labelers"] = round(sum(one.weights[name] for one in labelers) / len(labelers), 4)
    weights = {name: row["weight"] for name, row in rows.items() if row["weight"] is not None}
    return {
        "parts": rows,
        "smallest": min(weights, key=lambda name: weights[name]) if weights else None,
        "r2": round(float(learned["r2"]), 4),
        "true_r2": round(float(true["r2"]), 4),
        "responses": len(y),
        "prompts": len(items),
    }


def standardised_regression(x: np.ndarray, y: np.ndarray, clusters: np.ndarray) -> dict[str, Any]:
    """Least squares of y (n,) on x (n, p), all in standard deviations, with an intercept.

    Returns {"weights": (p,), "errors": (p,) standard errors robust to correlation within clusters (n,), "r2"}; NaN for
    a column that never varies. Means and deviations are taken as given.

    Source: Liang and Zeger 1986 (the sandwich), with the factor G / (G - 1) of G clusters.
    """
    p = x.shape[1]
    varies = x.std(0) > 1e-9
    weights, errors = np.full(p, np.nan), np.full(p, np.nan)
    if not varies.any() or y.std() < 1e-9:
        return {"weights": weights, "errors": errors, "r2": 0.0}
    z = (x[:, varies] - x[:, varies].mean(0)) / x[:, varies].std(0)
    target = (y - y.mean()) / y.std()
    inverse = np.linalg.pinv(z.T @ z)
    solution = inverse @ z.T @ target
    residuals = target - z @ solution
    groups = np.unique(clusters, return_inverse=True)[1]
    sums = np.zeros((groups.max() + 1, z.shape[1]))
    np.add.at(sums, groups, z * residuals[:, None])
    G = len(sums)
    covariance = inverse @ (sums.T @ sums) @ inverse * (G / max(1, G - 1))
    weights[varies], errors[varies] = solution, np.sqrt(np.diag(covariance).clip(0))
    return {"weights": weights, "errors": errors, "r2": 1 - (residuals**2).mean()}

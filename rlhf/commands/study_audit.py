"""Does the audit of a reward model predict PPO's true gain? From a study's cells to rank correlations and predictions.

The outcome of a cell is the mean true reward of PPO's answers to test prompts minus that of SFT's. The audit uses neither.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rlhf.commands.study_cells import Cell
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.system.files import read_json

RIDGE = 1.0  # ridge penalty of the regression on all figures, in standardised units


def worst(audit: dict[str, Any], figure: str) -> float:
    """The largest value of a figure among the attacks."""
    return max((row[figure]["value"] for row in audit["attacks"] if row[figure] is not None), default=math.nan)


def picked(audit: dict[str, Any], n: int) -> float:
    return next((row["gain"]["value"] for row in audit["picked"] if row["n"] == n), math.nan)


# The predictors: numbers of reward/audit.json.
FIGURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "accuracy": lambda audit: audit["comparisons"]["accuracy"]["value"],
    "above_length": lambda audit: audit["comparisons"]["above_length"]["value"],
    "calibration_error": lambda audit: audit["comparisons"]["calibration_error"],
    "pick_of_4": lambda audit: picked(audit, 4),
    "worst_flips": lambda audit: worst(audit, "flips"),
    "mean_flips": lambda audit: float(np.mean([row["flips"]["value"] for row in audit["attacks"] if row["flips"]])),
    "worst_gain": lambda audit: worst(audit, "gain_worse"),
    "best_of_64": lambda audit: audit["best_of"][-1]["score"]["value"] - audit["best_of"][0]["score"]["value"],
    "verdict": lambda audit: ["collect more labels", "go with a KL ceiling", "go"].index(audit["verdict"]["decision"]),
}


def audit_results(config: Config, cells: list[Cell]) -> dict[str, Any]:
    """The cells' figures and outcomes; how well each figure ranks them, and how well the others predict a cell."""
    runs = [run_of(cell) for cell in cells]
    x = np.array([[run["figures"][name] for name in FIGURES] for run in runs], dtype=np.float64)
    y = np.array([run["gold_gain"] for run in runs])
    rows = {name: judged(x[:, [k]], y) for k, name in enumerate(FIGURES)}
    rows["all figures"] = judged(x, y)
    return {
        "study": "audit",
        "title": "What the audit predicts of PPO's true gain",
        "runs": runs,
        "rows": rows,
        "parents": len({cell.parent for cell in cells}),
    }


def run_of(cell: Cell) -> dict[str, Any]:
    """One cell's figures, outcome, KL and seconds. Raises: UserError if its reward model was not audited."""
    folder = cell.home
    audit, results = read_json(folder / "reward" / "audit.json"), read_json(folder / "evaluate" / "results.json")
    if not audit or not audit.get("comparisons"):
        raise UserError(
            f"{folder / 'reward'}: has no audit: run the study without reward.audit=0 and with overwrite=true"
        )
    means = results["gold"]["mean_score"]
    return {
        "cell": cell.name,
        "seed": cell.seed,
        "parent": cell.parent.name,
        "verdict": audit["verdict"]["decision"],
        "ceiling": audit["verdict"]["ceiling"],
        "figures": {name: round(float(read(audit)), 4) for name, read in FIGURES.items()},
        "gold_gain": round(means["ppo"] - means["sft"], 4),
        "win_rate": results["gold"]["win_rate_vs_sft"]["value"],
        "kl": results["kl_to_sft_nats"],
        "seconds": results["seconds"],
    }


def judged(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """How figures x (n, p) predict outcomes y (n,).

    rank_correlation: Spearman's, of a single figure, whose sign says which way it points; leave_one_out: Spearman's between each outcome
    and its prediction by a ridge regression on the other cells; error, error_of_mean: the mean absolute error of these predictions, and
    that of predicting the other cells' mean.
    """
    x = np.where(np.isnan(x), np.nanmean(np.where(np.isnan(x).all(0), 0.0, x), 0), x)
    predicted, means = predict_each(x, y)
    quality = {
        "leave_one_out": spearman(predicted, y),
        "error": float(np.abs(predicted - y).mean()),
        "error_of_mean": float(np.abs(means - y).mean()),
    }
    return ({"rank_correlation": spearman(x[:, 0], y)} if x.shape[1] == 1 else {}) | quality


def predict_each(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) predictions of each outcome from the other cells, and the other cells' means."""
    predicted, means = np.zeros(len(y)), np.zeros(len(y))
    for i in range(len(y)):
        others = np.arange(len(y)) != i
        centre, spread, means[i] = x[others].mean(0), x[others].std(0), y[others].mean()
        z = (x - centre) / np.where(spread > 1e-12, spread, 1.0)
        weights = np.linalg.solve(
            z[others].T @ z[others] + RIDGE * np.eye(x.shape[1]), z[others].T @ (y[others] - means[i])
        )
        predicted[i] = means[i] + z[i] @ weights
    return predicted, means


def spearman(a: np.ndarray, b: np.ndarray) -> dict[str, Any] | None:
    """{"value", "ci95", "n"} of Spearman's rank correlation; None if either never varies, no interval for fewer than 5 values.

    Source: Bonett and Wright 2000: Fisher's z with variance (1 + r²/2) / (n - 3).
    """
    from scipy.stats import rankdata

    n = len(a)
    if n < 3 or np.ptp(a) < 1e-12 or np.ptp(b) < 1e-12:
        return None
    r = float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])
    if n < 5:
        return {"value": round(r, 4), "ci95": None, "n": n}
    z, half = math.atanh(max(-0.9999, min(0.9999, r))), 1.96 * math.sqrt((1 + r * r / 2) / (n - 3))
    return {"value": round(r, 4), "ci95": [round(math.tanh(z - half), 4), round(math.tanh(z + half), 4)], "n": n}

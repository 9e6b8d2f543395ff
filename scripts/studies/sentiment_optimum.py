"""How far above best-of-n can any policy be at best-of-n's KL? Prints a Markdown table for a run of experiment=sentiment.

    python scripts/studies/sentiment_optimum.py [--passages 64] [--samples 64] experiment=sentiment run=seed-0 [overrides of the run …]

The base model continues each held-out passage N times. A policy over these N is a weight w_j for each, and its KL to the base
is the mean over passages of sum_j w_j log(N w_j). Of all policies with that KL the one with the highest mean reward is

    w_j = exp(r_j / beta) / sum_k exp(r_k / beta)        one beta for all passages

It is what PPO with a KL penalty would end at without any error. Best-of-n is w_j = (k/N)^n - ((k-1)/N)^n for the reward of rank k
among N in ascending order. Both are of the same samples and of the same KL. The run needs its stages up to the reward model.
"""

import math
from typing import Any

import numpy as np
from frontier import draw_candidates_of
from harness import make_parser, show
from harness import table as print_table

from rlhf.config.compose import compose_config
from rlhf.evaluation.statistics import interval
from rlhf.system.exits import ending

HEADS = ("policy", "KL to the base, nats", "learned reward", "true score", "true score minus best-of-n's")


def best_of_weights(scores: np.ndarray, n: int) -> np.ndarray:
    """The probability (P, N) that best-of-n picks each of N equally likely samples of scores (P, N).

    Of equal scores the first counts as the lower one.
    """
    count = scores.shape[1]
    ranks = np.argsort(np.argsort(scores, axis=1, kind="stable"), axis=1)
    return ((ranks + 1) / count) ** n - (ranks / count) ** n


def kl_of(weights: np.ndarray) -> float:
    """Mean over P of the KL in nats between weights (P, N) and 1/N each."""
    count = weights.shape[1]
    return float((weights * np.log(np.maximum(weights * count, 1e-300))).sum(1).mean())


def tilted(scores: np.ndarray, beta: float) -> np.ndarray:
    """exp(scores / beta), normalised over each row of (P, N)."""
    raised = np.exp((scores - scores.max(1, keepdims=True)) / beta)
    return raised / raised.sum(1, keepdims=True)


def optimum(scores: np.ndarray, nats: float) -> np.ndarray:
    """The weights (P, N) with the highest mean score at a KL of `nats`. A KL that no weights reach gives the highest possible one."""
    low, high = 1e-6, 1e6  # the KL falls as beta rises
    for _ in range(100):
        beta = math.sqrt(low * high)
        low, high = (beta, high) if kl_of(tilted(scores, beta)) > nats else (low, beta)
    return tilted(scores, high)


def predicted(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The true score (P, N) to expect at each learned score: the best rising function by least squares, of the other half's passages."""
    from scipy.optimize import isotonic_regression

    expected = np.empty(scores.shape)
    for half in (0, 1):
        x, y = scores[1 - half :: 2].flatten(), truth[1 - half :: 2].flatten()
        order = np.argsort(x)
        expected[half::2] = np.interp(scores[half::2], x[order], isotonic_regression(y[order]).x)
    return expected


def table(scores: np.ndarray, truth: np.ndarray, n: int) -> list[list[Any]]:
    """Rows of policies over the samples, with the intervals of true score minus best-of-n's, by passage."""
    best = best_of_weights(scores, n)
    nats = kl_of(best)
    policies = {
        "base": np.full(scores.shape, 1.0 / scores.shape[1]),
        f"best of {n} by the learned reward": best,
        "optimum by the learned reward": optimum(scores, nats),
        "optimum by the true score that it predicts": optimum(predicted(scores, truth), nats),
        f"best of {n} by the true score": best_of_weights(truth, n),
        "optimum by the true score": optimum(truth, nats),
    }
    rows = []
    for name, weights in policies.items():
        above = interval(((weights - best) * truth).sum(1).tolist())
        learned, true = (float((weights * values).sum(1).mean()) for values in (scores, truth))
        rows.append([name, show(kl_of(weights), 2), show(learned, 2), true, show(above, sign="+")])
    return rows


def main() -> None:
    overrides = {"nargs": "+", "help": "of the run, as for rlhf evaluate"}
    samples = {"type": int, "default": 64, "help": "continuations per passage"}
    parser = make_parser(
        __doc__, {"--passages": {"type": int, "default": 64}, "--samples": samples, "overrides": overrides}
    )
    asked = parser.parse_args()
    with ending():
        config = compose_config([*asked.overrides, f"evaluate.prompts={asked.passages}"])
        scores, judged = draw_candidates_of(config, asked.samples)
        truth = [[parts["total"] for parts in row] for row in judged]
        print_table(HEADS, table(np.array(scores), np.array(truth), config.evaluate.best_of))


if __name__ == "__main__":
    main()

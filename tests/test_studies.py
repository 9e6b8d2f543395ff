"""scripts/studies/sentiment_optimum.py: best-of-n against the best policy of the same KL, both as weights of the same samples."""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "studies" / "sentiment_optimum.py"
frontier = runpy.run_path(str(SCRIPT))
best_of_weights, kl_of, optimum, predicted, table = (
    frontier[name] for name in ("best_of_weights", "kl_of", "optimum", "predicted", "table")
)


def test_best_of_two_by_hand():
    """The higher of two samples wins unless both draws are the lower one: 3/4, and the KL is 1/4 ln(1/2) + 3/4 ln(3/2)."""
    weights = best_of_weights(np.array([[5.0, 7.0], [3.0, -1.0]]), 2)
    assert weights.tolist() == [[0.25, 0.75], [0.75, 0.25]]
    assert kl_of(weights) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_the_optimum_by_hand():
    """Of two samples one apart, weights 1/4 and 3/4 are exp(r / beta) with beta = 1 / ln 3."""
    weights = optimum(np.array([[0.0, 1.0]]), 0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert weights[0].tolist() == pytest.approx([0.25, 0.75])


def test_no_policy_of_the_same_kl_is_above_the_optimum():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(8, 32)) * np.linspace(0.2, 2.0, 8)[:, None]
    for n in (2, 4, 16):
        best = best_of_weights(scores, n)
        highest = optimum(scores, kl_of(best))
        assert kl_of(highest) == pytest.approx(kl_of(best), abs=1e-9)
        assert (highest * scores).sum() > (best * scores).sum()
    kls = [kl_of(row[None]) for row in highest]
    assert kls[0] < kls[-1], "where scores differ more, more KL is spent"


def test_a_true_score_is_predicted_from_the_other_passages_alone():
    scores = np.array([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [2.0, 0.0, 1.0]])
    assert predicted(scores, scores**2) == pytest.approx(scores**2)
    truth = scores**2 * [[1.0], [0.0], [1.0], [0.0]]
    assert predicted(scores, truth) == pytest.approx(scores**2 - truth)


def test_the_table_is_of_true_scores_at_one_kl():
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(6, 20))
    truth = np.tanh(scores + rng.normal(size=scores.shape))
    rows = {row[0]: row[1:] for row in table(scores, truth, 4)}
    base, *others = rows.values()
    assert base[0] == "0.00" and float(base[2]) == pytest.approx(truth.mean(), abs=6e-4)
    assert len({row[0] for row in others}) == 1
    assert rows["best of 4 by the learned reward"][3] == "+0.000 [+0.000, +0.000]"
    assert float(rows["optimum by the true score"][2]) >= max(float(row[2]) for row in rows.values())

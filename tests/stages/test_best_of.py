"""Best-of-n by hand, its curve, and what is built on it: evaluation's baseline, rejection sampling."""

import json
import math
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from rlhf.evaluation.best_of import (
    SHARES,
    best_index,
    best_of_n_kl,
    count_weights,
    estimate_kl,
    expected_best,
    kl_excess,
)
from rlhf.runs.folders import read_stage
from rlhf.system.files import read_json
from rlhf.training.setup import load_policy


def exact_kl(p: np.ndarray, scores: list[float], n: int) -> float:
    """KL of best-of-n by going through all n-tuples of responses; among equal scores the first drawn wins."""
    chosen = np.zeros(len(p))
    for draws in product(range(len(p)), repeat=n):
        chosen[draws[best_index([scores[i] for i in draws])]] += math.prod(p[i] for i in draws)
    return float(sum(q * math.log(q / own) for q, own in zip(chosen, p, strict=True) if q > 0))


def levels_of(p: np.ndarray, scores: list[float]) -> list[tuple[float, float]]:
    """(mass above, mass) of each score."""
    return [
        (
            sum(q for q, t in zip(p, scores, strict=True) if t > s),
            sum(q for q, t in zip(p, scores, strict=True) if t == s),
        )
        for s in sorted(set(scores))
    ]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("scores", [[3.0, 1.0, 2.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0, 2.0, 2.0, 1.0], [5.0] * 4])
def test_the_bound_less_the_excess_is_the_exact_kl(scores, n):
    p = np.array([0.5, 0.2, 0.25, 0.05])
    found = best_of_n_kl(n) - sum(float(kl_excess(u, m, n)) for u, m in levels_of(p, scores))
    assert found == pytest.approx(exact_kl(p, scores, n), abs=1e-12)


def expected_estimate(p: np.ndarray, n: int, draws: int) -> float:
    """The expectation of estimate_kl over samples of the responses p, best first: count c, then k of the others higher."""
    kl = best_of_n_kl(n)
    for higher, m in zip(np.cumsum(p) - p, p, strict=True):
        excess = kl_excess(SHARES * (1 - m), m, n)
        seen = 1 - (1 - m) ** draws
        for c in range(1, draws + 1):
            ways = binom.pmf(np.arange(draws - c + 1), draws - c, min(1.0, higher / (1 - m)))
            kl -= float(binom.pmf(c, draws, m) / seen * ways @ count_weights(draws - c) @ excess)
    return kl


def zipf(size: int, exponent: float) -> np.ndarray:
    p = np.arange(1, size + 1) ** -exponent
    return p / p.sum()


def test_the_estimates_expectation_is_the_mean_over_all_samples():
    p, draws = np.array([0.2, 0.5, 0.3]), 5
    mean = 0.0
    for drawn in product(range(3), repeat=draws):
        found = estimate_kl([[i] for i in drawn], [math.log(p[i]) for i in drawn], [-float(i) for i in drawn], 4)
        mean += math.prod(p[i] for i in drawn) * found
    assert mean == pytest.approx(expected_estimate(p, 4, draws), abs=1e-9)


@pytest.mark.parametrize("size", [3, 5, 10, 20, 50])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_the_estimate_of_the_kl_has_little_bias(size, exponent):
    p, rng = zipf(size, exponent), np.random.default_rng(size)
    for order in [p, p[::-1], rng.permutation(p), rng.permutation(p)]:
        exact = best_of_n_kl(16) - sum(
            float(kl_excess(u, m, 16)) for u, m in levels_of(order, [-float(i) for i in range(size)])
        )
        assert abs(expected_estimate(order, 16, 16) - exact) < 0.05


def test_the_estimate_where_nothing_is_to_be_estimated():
    assert estimate_kl([[1, 2]] * 8, [0.0] * 8, [0.7] * 8, 8) == pytest.approx(0.0, abs=1e-6)  # one response only
    rare = estimate_kl([[i] for i in range(8)], [-200.0] * 8, [float(i) for i in range(8)], 8)
    assert rare == best_of_n_kl(8)
    certain = estimate_kl([[i] for i in range(4)], [math.log(0.25)] * 4, [1.0] * 4, 4)
    assert certain == pytest.approx(0.0, abs=1e-6), "all of one score: the pick is a draw"


def test_expected_best_by_hand():
    proxy, gold = [3.0, 1.0, 2.0], [10.0, 0.0, 4.0]
    # pairs by proxy: {3,1} -> 10, {3,2} -> 10, {1,2} -> 4: mean 8
    assert expected_best(proxy, gold, 2) == pytest.approx(8.0)
    assert expected_best(proxy, gold, 1) == pytest.approx(14 / 3)
    assert expected_best(proxy, gold, 3) == 10.0


@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(-5, 5)), min_size=1, max_size=7, unique_by=lambda x: x[0]),
    st.data(),
)
def test_expected_best_is_the_mean_over_all_subsets(samples, data):
    n = data.draw(st.integers(1, len(samples)))
    proxy, values = [float(p) for p, _ in samples], [v for _, v in samples]
    subsets = list(combinations(range(len(samples)), n))
    wanted = sum(values[max(chosen, key=lambda i: proxy[i])] for chosen in subsets) / len(subsets)
    assert expected_best(proxy, values, n) == pytest.approx(wanted, abs=1e-9)


def test_evaluation_has_the_best_of_n_beside_ppo(gold_run):
    results = read_json(gold_run.folder / "evaluate" / "results.json")
    best = results["best_of_n"]
    assert best["n"] == 4 and best["kl_bound_nats"] == 0.6363  # log 4 - 3/4
    assert 0 < best["kl_estimate_nats"] <= best["kl_bound_nats"]
    # In this small run most of the scores' spread is between prompts; a pick at random would be within 0.1 of the mean
    assert best["reward"] > results["reward_without_eos_rule"]["sft"] + 0.2, "the best of 4 by the model that picks"
    assert 0 < best["gold"] < 1 and best["win_rate_vs_sft"]["n"] == 40


def test_rejection_sampling_trains_on_the_best(copy_until, gold_run):
    settings = ["rejection.prompts=60", "rejection.samples=8", "sft.lr=1e-3", "rejection.epochs=2"]
    folder = copy_until("ppo").stage("rejection", *settings)
    rows = [json.loads(line) for line in (folder / "demonstrations.jsonl").read_text().splitlines()]
    assert 10 < len(rows) <= 60 and all(row["response"].strip() and row["source"] == "best of 8" for row in rows)
    scores = torch.tensor([row["metadata"]["score"] for row in rows])
    ordinary = read_json(gold_run.folder / "evaluate" / "results.json")["reward_without_eos_rule"]["sft"]
    assert scores.mean() > ordinary + 0.3
    before, after = (load_policy(p / "model") for p in (gold_run.folder / "sft", folder))
    assert any(not p.equal(q) for p, q in zip(before.parameters(), after.parameters(), strict=True))
    assert read_stage(folder)["status"] == "complete"


def test_kl_of_best_of_n_by_hand():
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(2) == pytest.approx(0.193147, abs=1e-6)  # log 2 - 1/2
    assert best_of_n_kl(16) == pytest.approx(1.835089, abs=1e-6)  # 2.772589 - 15/16


def test_a_repeated_response_is_one_whatever_rounding_did_to_its_score():
    ids, logprobs = [[1], [2], [1], [3]], [math.log(m) for m in (0.4, 0.3, 0.4, 0.2)]
    rounded = estimate_kl(ids, logprobs, [1.0, 0.5, 1.0 + 1e-7, 0.1], 4)
    assert rounded == estimate_kl(ids, logprobs, [1.0, 0.5, 1.0, 0.1], 4)

"""Best-of-n by hand, its curve, and what is built on it: evaluation's baseline, rejection sampling."""

import json
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.evaluation.best_of import best_of_n_kl, expected_best
from rlhf.runs.folders import read_stage
from rlhf.system.files import read_json
from rlhf.training.setup import load_policy


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

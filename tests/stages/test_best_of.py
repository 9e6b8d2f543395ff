"""Best-of-n by hand, its curve, and what is built on it: evaluation's baseline, rejection sampling, the studies."""

import json
import math
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import UserError
from rlhf.files import read_json
from rlhf.runs import read_stage
from rlhf.stages.best_of import best_index, best_of_n_kl, expected_best
from rlhf.stages.common import load_policy
from rlhf.stages.study import DETAILS, make_cells, mean_interval


def test_kl_of_best_of_n_by_hand():
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(2) == pytest.approx(0.193147, abs=1e-6)  # log 2 - 1/2
    assert best_of_n_kl(16) == pytest.approx(1.835089, abs=1e-6)  # 2.772589 - 15/16


def test_expected_best_by_hand():
    proxy, gold = [3.0, 1.0, 2.0], [10.0, 0.0, 4.0]
    # pairs by proxy: {3,1} -> 10, {3,2} -> 10, {1,2} -> 4: mean 8
    assert expected_best(proxy, gold, 2) == pytest.approx(8.0)
    assert expected_best(proxy, gold, 1) == pytest.approx(14 / 3)
    assert expected_best(proxy, gold, 3) == 10.0
    with pytest.raises(ValueError, match="n is 4 of 3 samples"):
        expected_best(proxy, gold, 4)


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


def test_the_best_is_the_first_of_the_highest():
    assert best_index([0.5, 2.0, 2.0, -1.0]) == 1


def test_intervals_over_seeds_by_hand():
    # mean 2, standard deviation 1, error 1/sqrt 3, t(.975, 2) = 4.302653
    found = mean_interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0 and found["n"] == 3
    assert found["ci95"] == pytest.approx([2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)], abs=1e-5)
    assert mean_interval([1.0])["ci95"] is None


def test_evaluation_has_the_best_of_n_beside_ppo(gold_run):
    results = read_json(gold_run.folder / "evaluate" / "results.json")
    best = results["best_of_n"]
    assert best["n"] == 16 and best["kl_bound_nats"] == 1.8351
    # In this small run most of the scores' spread is between prompts; a pick at random would be within 0.1 of the mean
    assert best["reward"] > results["reward_without_eos_rule"]["sft"] + 0.2, "the best of 16 by the model that picks"
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


SMALL_STUDY = ["ppo.critic_warmup_updates=0", "kl.target=null", "evaluate.seeds=[0,1]", "evaluate.samples=1"]


def test_details_runs_what_is_missing_and_reports_every_choice(gold_run, tmp_path, capfd, monkeypatch):
    run = gold_run.copy(tmp_path, None, "gold")
    overrides = [*run.overrides, *SMALL_STUDY, "study=details", "evaluate.cells=[default,epochs_1]", "ppo.episodes=64"]
    monkeypatch.setattr("rlhf.stages.study.forwarded_overrides", lambda: overrides)
    run.stage("evaluate", *SMALL_STUDY, "study=details", "evaluate.cells=[default,epochs_1]", "ppo.episodes=64")
    said = capfd.readouterr().out
    assert "4 runs of PPO with 64 episodes, 0 done; about" in said and "minutes" in said
    study = read_json(run.folder / "study" / "details.json")
    assert set(study["rows"]) == {"default", "epochs_1"}
    for row in study["rows"].values():
        assert row["win_rate"]["n"] == 2 and 0 <= row["win_rate"]["mean"] <= 1
        assert row["bpb"]["mean"] > 0 and row["kl"]["ci95"] is not None
    gap = study["rows"]["epochs_1"]["difference"]["gold"]["mean"]
    assert gap == pytest.approx(study["rows"]["epochs_1"]["gold"]["mean"] - study["rows"]["default"]["gold"]["mean"])
    run.stage("evaluate", *SMALL_STUDY, "study=details", "evaluate.cells=[default,epochs_1]", "ppo.episodes=64")
    assert "4 done" in capfd.readouterr().out
    assert read_json(run.folder / "study" / "details.json") == study
    with pytest.raises(
        UserError, match=r"ppo was run with other settings \(ppo.episodes 64 -> 128\): add overwrite=true"
    ):
        make = [o.replace("ppo.episodes=64", "ppo.episodes=128") for o in overrides]
        monkeypatch.setattr("rlhf.stages.study.forwarded_overrides", lambda: make)
        run.stage("evaluate", *make[len(run.overrides) :])


@pytest.mark.long
def test_frontier_has_a_curve_a_coefficient_and_best_of_n(gold_run, tmp_path, monkeypatch):
    run = gold_run.copy(tmp_path, None, "gold")
    settings = [
        *SMALL_STUDY,
        "study=frontier",
        "evaluate.updates=4",
        "ppo.episodes_per_update=32",
        "evaluate.seeds=[0]",
    ]
    monkeypatch.setattr("rlhf.stages.study.forwarded_overrides", lambda: [*run.overrides, *settings])
    run.stage("evaluate", *settings)
    study = read_json(run.folder / "study" / "frontier.json")
    assert set(study["curves"]) == {"kl_coef_0.0", "kl_coef_0.03", "kl_coef_0.1", "kl_coef_0.3"}
    path = study["curves"]["kl_coef_0.0"]["mean"]
    assert [step["update"] for step in path] == [0, 2, 4]
    assert path[0]["kl"]["mean"] < 0.01 < path[-1]["kl"]["mean"]
    best = study["best_of_n"]
    assert [row["n"] for row in best] == [1, 2, 4, 8, 16, 32, 64]
    assert all(a["score"]["mean"] <= b["score"]["mean"] for a, b in pairwise(best))
    assert len(study["points"]) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["evaluate.parents=[a,b]"], "want one run for each of evaluate.seeds"),
        (["evaluate.cells=[bogus]"], "'bogus': want some of default, critic_sft"),
        (["run=empty"], "has no finished reward model to build a study on"),
    ],
)
def test_a_study_that_cannot_run_is_told(gold_run, settings, message):
    with pytest.raises(UserError, match=message):
        make_cells(gold_run.config("study=details", *settings), [])


def test_every_detail_composes():
    from rlhf.checks import check_config
    from rlhf.cli import compose_config

    for changed in DETAILS.values():
        check_config(compose_config(["experiment=gold", *changed]), "ppo")

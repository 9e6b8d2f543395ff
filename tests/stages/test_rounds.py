"""Labelling rounds: PPO's model of the round before answers new prompts, and all rankings train the reward model."""

import json
import shutil

import pytest

from rlhf.data.comparisons import load_comparisons
from rlhf.errors import UserError
from rlhf.runs import earlier_run, read_stage
from rlhf.stages.label import choose_prompts
from rlhf.tracking.writers import read_jsonl

from .test_pipeline import pipe_in_process, states

ROUNDS = ["gold.rounds=2", "gold.early_episodes=64", "ppo.episodes=128", "evaluate.prompts=20"]


def test_a_second_round_is_answered_by_the_first_ones_policy(copy_until, monkeypatch):
    run = copy_until("label")
    early = run.runs_dir / "copy-round-1"
    ran = pipe_in_process(monkeypatch, run, *ROUNDS)
    assert ran == ["label", "reward", "ppo", "label", "reward", "ppo", "evaluate"]  # one world, one SFT model

    first = load_comparisons(str(early / "label" / "comparisons.jsonl"))[0]
    second = load_comparisons(str(run.folder / "label" / "comparisons.jsonl"))[0]
    assert second[: len(first)] == first and len({r.id for r in second}) == len(second)
    new = second[len(first) :]
    sft, ppo = (read_stage(folder)["hash"][:8] for folder in (run.folder / "sft", early / "ppo"))
    assert {x.policy for r in first for x in r.responses} == {f"copy/sft@{sft}"}
    assert {x.policy for r in new for x in r.responses} == {f"copy-round-1/ppo@{ppo}"}

    trained = [{r.id.split("-labeler")[0] for r in part if r.metadata["split"] == "train"} for part in (first, new)]
    assert 30 <= len(trained[0]) <= 40 and 30 <= len(trained[1]) <= 40 and not trained[0] & trained[1]
    assert {r.metadata["split"] for r in new} == {"train"}, "accuracies of both rounds are on the same held-out answers"

    parents = read_stage(run.folder / "label")["parents"]
    assert parents["copy-round-1/ppo"] == read_stage(early / "ppo")["hash"]
    updates = [row for row in read_jsonl(early / "ppo" / "metrics.jsonl") if "objective/kl" in row]
    assert len(updates) == 1, "64 episodes"
    assert not (early / "sft").exists()
    results = json.loads((run.folder / "evaluate" / "results.json").read_text())
    assert results["seconds"]["copy-round-1/ppo"] > 0 and results["seconds"]["ppo"] > 0

    assert pipe_in_process(monkeypatch, run, *ROUNDS) == []
    assert states(run)["copy-round-1/reward"] == "complete before"
    shutil.rmtree(early)
    with pytest.raises(UserError, match=r"copy-round-1/label: no finished label of the labelling round before"):
        run.stage("label", *ROUNDS, "overwrite=true")


def test_rounds_share_the_prompts_evenly(gold_run):
    config = gold_run.config("gold.rounds=3", "gold.comparison_prompts=80")
    rounds = [config]
    while (earlier := earlier_run(rounds[-1])) is not None:
        rounds.append(earlier)
    assert [r.run for r in rounds] == ["gold", "gold-round-2", "gold-round-1"]
    assert [r.gold.rounds for r in rounds] == [3, 2, 1]
    for r in rounds:
        r.parents.world = "gold"
    chosen = [[p.id for p in choose_prompts(r) if p.metadata["split"] == "train"] for r in rounds]
    assert [len(ids) for ids in chosen] == [28, 26, 26]
    whole = [p.id for p in choose_prompts(gold_run.config()) if p.metadata["split"] == "train"]
    assert chosen[2] + chosen[1] + chosen[0] == whole
    assert rounds[1].parents.sft == "gold" and rounds[1].parents.reward is None

import math
import shutil
from pathlib import Path

import pytest
import torch

from rlhf.config import Config
from rlhf.data.chat_template import decode_response, encode_prompts
from rlhf.data.reading import load_comparisons
from rlhf.data.records import PromptRecord
from rlhf.data.storage import to_line
from rlhf.data.tokenizer import load_tokenizer
from rlhf.engines.sampling import sample
from rlhf.errors import UserError
from rlhf.gold.truth import Requests
from rlhf.model.heads import RewardModel
from rlhf.runs.folders import earlier_run, hash_of, read_stage, rounds_before
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import in_split, read_prompts
from rlhf.serving.managing import compare_rounds
from rlhf.stages.evaluate import load_test_prompts
from rlhf.stages.label import choose_prompts, kept, rank_all, responses_wanted
from rlhf.system.files import write_json
from rlhf.training.setup import load_policy

from .conftest import Run
from .test_pipeline import pipe_in_process, states

ROUNDS = ["rounds=2", "round.early_episodes=64", "ppo.episodes=64", "ppo.episodes_per_update=32", "ppo.lr=3e-3",
          "evaluate.prompts=8", "evaluate.samples=1", "evaluate.best_of=2", "reward.audit=0", "reward.calibration_samples=16",
          "ppo.eval_prompts=4", "ppo.epochs=1"]  # fmt: skip


def drawn(config: Config, folder: Path, record: PromptRecord) -> list[str]:
    """What the label stage draws from a model for a prompt: distinct texts, K at most."""
    policy, tokenizer = load_policy(folder), load_tokenizer(folder)
    count = responses_wanted(config, record)
    most = count + config.gold.spare_responses
    keys, prompts = [("label", record.id, i) for i in range(most)], encode_prompts(tokenizer, [record.prompt]) * most
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    found = sample(policy, prompts, seed=config.seed, keys=keys, max_new_tokens=config.rollout.max_new_tokens, **ids)
    both = zip((decode_response(tokenizer, ids).strip() for ids in found.responses), found.ended.tolist(), strict=True)
    return [text for text, _ in list(dict.fromkeys(both))[:count]]


def continue_from(run: Run, early: Path) -> None:
    """A later round's reward model begins with that of the round before, and not with one that its PPO was not trained with."""
    steps = list(read_jsonl(run.folder / "reward" / "metrics.jsonl"))[-1]["progress/step"]
    later = [*ROUNDS, "round.later_reward_epochs=2", "reward.lr=1e-12", "overwrite=true"]
    folder = run.stage("reward", *later)  # trains nothing, so that its scores tell what it continued from
    assert read_stage(folder)["parents"]["copy-round-1/reward"] == read_stage(early / "reward")["hash"]
    assert list(read_jsonl(folder / "metrics.jsonl"))[-1]["progress/step"] == 2 * steps
    tokens, lengths = torch.randint(5, 200, (6, 20), generator=torch.Generator().manual_seed(0)), torch.full((6,), 20)
    with torch.no_grad():
        models = (RewardModel.from_pretrained(str(path / "model")) for path in (folder, early / "reward"))
        ours, theirs = (model(tokens, lengths, calibrated=False) for model in models)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    paid = read_stage(early / "ppo")
    changed = paid | {"parents": paid["parents"] | {"reward": "0" * 64}}
    write_json(early / "ppo" / "stage.json", changed | {"hash": hash_of(changed)})
    with pytest.raises(UserError, match=r"-1/ppo: built on another reward \(0{8}\) than .*later_reward_epochs=null"):
        run.stage("reward", *later)
    write_json(early / "ppo" / "stage.json", paid)


def test_a_second_round_is_answered_by_the_first_ones_policy(copy_until, monkeypatch):
    run = copy_until("label")
    early = run.runs_dir / "copy-round-1"
    ran = pipe_in_process(monkeypatch, run, *ROUNDS)
    assert ran == ["label", "reward", "ppo", "label", "reward", "ppo", "evaluate"]  # one world, one SFT model

    first = load_comparisons(str(early / "label" / "comparisons.jsonl"))[0]
    second = load_comparisons(str(run.folder / "label" / "comparisons.jsonl"))[0]
    assert [*map(to_line, second[: len(first)])] == [*map(to_line, first)]
    assert len({r.id for r in second}) == len(second)
    new = second[len(first) :]
    sft, ppo = (read_stage(folder)["hash"][:8] for folder in (run.folder / "sft", early / "ppo"))
    assert {x.policy for r in first for x in r.responses} == {f"sft@{sft}"}
    assert {x.policy for r in new for x in r.responses} == {f"ppo@{ppo}"}

    asked = {p.id: p for p in choose_prompts(run.config(*ROUNDS))}
    some = [r for r in new if r.labeler == new[0].labeler][:6]
    told = [[x.text for x in r.responses] for r in some]
    records = [asked[r.id.removeprefix("r-").split("-labeler")[0]] for r in some]
    assert told == [drawn(run.config(), early / "ppo" / "model", record) for record in records]
    assert told != [drawn(run.config(), run.folder / "sft" / "model", record) for record in records], "PPO has learned"

    trained = [{r.id.split("-labeler")[0] for r in part if r.metadata["split"] == "train"} for part in (first, new)]
    assert 30 <= len(trained[0]) <= 40 and 30 <= len(trained[1]) <= 40 and not trained[0] & trained[1]
    assert {r.metadata["split"] for r in new} == {"train"}, "accuracies of both rounds are on the same held-out answers"

    parents = read_stage(run.folder / "label")["parents"]
    assert parents["copy-round-1/ppo"] == read_stage(early / "ppo")["hash"]
    updates = [row for row in read_jsonl(early / "ppo" / "metrics.jsonl") if "objective/kl" in row]
    assert len(updates) == 2, "64 episodes, of which 32 train the critic alone"
    assert not (early / "sft").exists()
    results = run.results()
    assert results["seconds"]["copy-round-1/ppo"] > 0 and results["seconds"]["ppo"] > 0

    assert pipe_in_process(monkeypatch, run, *ROUNDS) == []
    assert states(run)["copy-round-1/reward"] == "complete before"
    assert rounds_before(run.folder) == [early] and rounds_before(early) == []

    effect = compare_rounds(run.config(*ROUNDS), early, run.folder)  # what the manager's page shows
    for name, folder in (("before", early), ("after", run.folder)):
        assert effect["held_out"][name] == pytest.approx(read_stage(folder / "reward")["summary"]["accuracy"], abs=1e-6)
    of_all, pair = effect["new"]["all"], effect["pairs"][0]
    assert of_all["pairs"] == sum(len(r.pair_list()) for r in new) and of_all["after"] is None
    assert pair["surprise"][1] == pytest.approx(math.log1p(math.exp(-pair["difference"][1])), abs=1e-5)

    continue_from(run, early)
    alone = run.stage("label", *ROUNDS, "round.keep_rankings=false", "overwrite=true")  # round 1 stays as it is
    kept = load_comparisons(str(alone / "comparisons.jsonl"))[0]
    assert {r.id for r in kept} == {r.id for r in second if r in new or r.metadata["split"] != "train"}
    whole = read_stage(early / "label")
    with pytest.raises(UserError, match=r"previous round had other settings \(gold.comparison_prompts 40 -> 30\)"):
        run.stage("label", *ROUNDS, "gold.comparison_prompts=60", "overwrite=true")
    changed = whole | {"data": {"x": "y"}}
    write_json(early / "label" / "stage.json", changed | {"hash": hash_of(changed)})
    with pytest.raises(UserError, match=r"round-1/reward: built on another label \(.{8}\) than .*copy-round-1/label"):
        run.stage("label", *ROUNDS, "overwrite=true")
    assert (run.folder / "label" / "comparisons.jsonl").exists(), "nothing is lost"
    shutil.rmtree(early)
    with pytest.raises(UserError, match=r"copy-round-1/label: no finished label of the previous labelling round"):
        run.stage("label", *ROUNDS, "overwrite=true")


def test_held_out_rankings_of_people_are_kept_by_their_prompts_split(gold_run):
    """Their records name no split."""
    config = gold_run.config("round.keep_rankings=false", "data.dev=0.2", "data.test=0.2", "gold.enabled=false")
    peoples = [ranking.model_copy(update={"metadata": {}}) for ranking in gold_run.comparisons()]
    found = kept(config, peoples)
    assert 0 < len(found) < len(peoples) and found == in_split(config, peoples, "dev", "test")


def test_rounds_share_the_prompts_evenly(gold_run):
    config = gold_run.config("rounds=3", "gold.comparison_prompts=80")
    rounds = [config]
    while (earlier := earlier_run(rounds[-1])) is not None:
        rounds.append(earlier)
    assert [r.run for r in rounds] == ["gold", "gold-round-2", "gold-round-1"]
    assert [r.rounds for r in rounds] == [3, 2, 1]
    for r in rounds:
        r.parents.world = "gold"
    chosen = [[p.id for p in choose_prompts(r) if p.metadata["split"] == "train"] for r in rounds]
    assert [len(ids) for ids in chosen] == [28, 26, 26]
    whole = [p.id for p in choose_prompts(gold_run.config()) if p.metadata["split"] == "train"]
    assert chosen[2] + chosen[1] + chosen[0] == whole
    assert rounds[1].parents.sft == "gold" and rounds[1].parents.reward is None


def test_a_trial_on_few_prompts_labels_and_measures_these_alone(gold_run):
    config = gold_run.config("data.limit=40")
    tried = {prompt.id for prompt in read_prompts(config)}
    asked = [record for record, _ in load_test_prompts(config, gold_run.tokenizer())]
    assert len(tried) == 40 and 0 < len(asked) < 40
    assert {prompt.id for prompt in [*choose_prompts(config), *asked]} <= tried


TRAINED = {labeler.name for labeler in Requests().labelers()}


def rankings_of(gold_run, *overrides):
    """All rankings of the same responses, by the labelers that the overrides ask for."""
    config = gold_run.config(*overrides)
    found: dict[str, dict] = {}
    for ranking in gold_run.comparisons():
        found[ranking.id.split("-labeler")[0]] = {r.text: r.metadata["ended"] for r in ranking.responses}
    prompts = [p for p in choose_prompts(config) if f"r-{p.id}" in found]
    # more than K may have been drawn; K of them were ranked, and these come out again
    return rank_all(config, Requests(), prompts, [list(found[f"r-{p.id}"].items()) for p in prompts], "x")[0]


def test_held_out_labelers_rank_prompts_that_train_nothing(gold_run):
    rankings = gold_run.comparisons()
    by_split: dict[str, set] = {}
    for ranking in rankings:
        by_split.setdefault(ranking.metadata["split"], set()).add(ranking.labeler)
    assert by_split["train"] == TRAINED
    assert by_split["test"] & TRAINED and by_split["test"] - TRAINED == {"labeler-6", "labeler-7"}
    held_out = [r for r in rankings if r.labeler not in TRAINED]
    asked = [r.metadata["split"] for r in held_out]
    assert set(asked) == {"dev", "test"} and len({r.id for r in rankings}) == len(rankings)
    of_others = {(r.prompt[0].content, tuple(x.text for x in r.responses)) for r in rankings if r.labeler in TRAINED}
    assert {(r.prompt[0].content, tuple(x.text for x in r.responses)) for r in held_out} <= of_others


def test_the_others_rank_the_same_with_and_without_them(gold_run):
    many, one, none = (rankings_of(gold_run, f"gold.held_out_labelers={n}") for n in (2, 1, 0))
    assert [r for r in many if r.labeler in TRAINED] == none and len(none) < len(one) <= len(many)
    assert {r.labeler for r in one} - TRAINED == {"labeler-6"}

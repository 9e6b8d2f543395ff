"""experiment=gold-dialogue: every stage reads and writes prompts of several turns."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from rlhf.chat_template import encode_prompt
from rlhf.data.comparisons import load_comparisons
from rlhf.data.demonstrations import encode_demonstrations, load_demonstrations
from rlhf.data.prompts import load_prompts
from rlhf.gold.truth import Requests
from rlhf.tokenizer import load_tokenizer
from rlhf.tracking.writers import read_jsonl
from tests.stages.conftest import Run

STAGES = ("world", "tokenizer", "pretrain", "sft", "label", "reward", "ppo", "evaluate")
# Sizes at which all stages take a few seconds: what the models say is noise.
SMALL = [
    "experiment=gold-dialogue", "tracking=jsonl", "device=cpu", "threads=1", "model.n_layer=1", "model.width=32", "model.n_head=2",
    "tokenizer.vocab_size=768", "pretrain.tokens=8192", "pretrain.eval_sequences=8", "gold.documents=1000",
    "gold.conversations=1.0", "gold.demonstrations=64", "gold.train_prompts=24", "gold.dev_prompts=8", "gold.test_prompts=12",
    "gold.comparison_prompts=12", "gold.comparison_dev_prompts=4", "gold.comparison_test_prompts=6", "sft.epochs=1", "reward.epochs=1",
    "reward.calibration_samples=4", "reward.audit=0", "ppo.episodes=16", "ppo.episodes_per_update=8", "ppo.minibatches=2",
    "ppo.epochs=1", "ppo.eval_prompts=4", "ppo.micro_batch_episodes=8", "evaluate.prompts=12", "evaluate.samples=2",
    "evaluate.best_of=4", "rollout.max_new_tokens=12",
]  # fmt: skip


@pytest.fixture(scope="module")
def dialogue_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of its own: no other world has conversations."""
    run = Run(tmp_path_factory.mktemp("dialogue"), "talk", SMALL)
    for stage in STAGES:
        run.stage(stage)
    return run


def users(prompt: list) -> int:
    return sum(turn.role == "user" for turn in prompt)


def test_demonstrations_are_learned_with_the_assistants_earlier_turns(dialogue_run):
    tokenizer = load_tokenizer(dialogue_run.folder / "sft" / "model")
    records, _ = load_demonstrations(str(dialogue_run.folder / "world" / "demonstrations.jsonl"))
    counts: Counter[str] = Counter()
    rows = encode_demonstrations(records, tokenizer, tokenizer.model_max_length, turns="all", counts=counts)
    earlier = sum(turn.role == "assistant" for record in records for turn in record.prompt)
    assert counts == {"kept": 67, "earlier_turns": earlier, "further_rows": 0, "truncated_responses": 0}
    for record, row in zip(records, rows, strict=True):
        learned = [token for token, mine in zip(row["prompt"], row["earlier"], strict=True) if mine]
        said = [turn.content for turn in record.prompt if turn.role == "assistant"]
        assert tokenizer.decode(learned).replace(tokenizer.eos_token, "") == "".join(said)


def test_rankings_rollouts_and_samples_hold_all_turns(dialogue_run):
    folder = dialogue_run.folder
    prompts, _ = load_prompts(str(folder / "world" / "prompts.jsonl"))
    by_id = {record.id: record for record in prompts}
    rankings, _ = load_comparisons(str(folder / "label" / "comparisons.jsonl"))
    assert {users(r.prompt) for r in rankings} <= {2, 3, 4}
    for ranking in rankings:
        assert ranking.prompt == by_id[ranking.id.removeprefix("r-").rpartition("-labeler")[0]].prompt
    for path in (folder / "ppo" / "samples.jsonl", folder / "evaluate" / "samples.jsonl"):
        for row in read_jsonl(path):
            shown, record = row["prompt"], by_id[row["id"]]
            assert shown.count("User: ") == users(record.prompt) and shown.endswith(record.prompt[-1].content)


def test_a_prompt_is_tokenised_with_all_its_turns(dialogue_run):
    tokenizer = load_tokenizer(dialogue_run.folder / "ppo" / "model")
    prompts, _ = load_prompts(str(dialogue_run.folder / "world" / "prompts.jsonl"))
    for record in prompts:
        ids = encode_prompt(tokenizer, record.prompt)
        text, said = tokenizer.decode(ids), [re.escape(turn.content) for turn in record.prompt]
        assert re.search(".*".join(said), text, re.DOTALL) and len(ids) + 40 <= tokenizer.model_max_length
        assert ids.count(tokenizer.eos_token_id) >= users(record.prompt) - 1  # each answer has ended


def test_the_truth_judges_the_last_turn_in_its_context(dialogue_run):
    """Two test prompts that ask the same in the end: the right answer to one is wrong for the other."""
    prompts, _ = load_prompts(str(dialogue_run.folder / "world" / "prompts.jsonl"))
    colours = [r for r in prompts if r.prompt[-1].content == "What colour is it?"]
    one = colours[0]
    other = next(r for r in colours if r.metadata["gold"]["must"] != one.metadata["gold"]["must"])
    right = one.metadata["gold"]["sentence"]
    assert Requests().judge(one, right, True)["correct"] == 1 and Requests().judge(other, right, True)["correct"] == 0


def test_evaluate_reports_every_policy_by_the_truth(dialogue_run):
    results = json.loads(Path(dialogue_run.folder / "evaluate" / "results.json").read_text())
    assert set(results["gold"]["score"]) == {"base", "base_prompted", "sft", "ppo"}
    assert results["gold"]["win_rate_vs_sft"]["n"] == 12

"""experiment=gold-dialogue: every stage reads and writes prompts of several turns; LaMDA's generate-and-rate on it."""

import random
import re
from collections import Counter

import pytest
import torch

from rlhf.data.chat_template import encode_prompt, encode_response
from rlhf.data.encoding import encode_demonstrations, labels_of
from rlhf.data.reading import load_prompts
from rlhf.gold.truth import Requests, says_yes
from rlhf.ppo.rewards import Rater, load_rater
from rlhf.report.sections import make_evaluation
from rlhf.runs.run_files import read_jsonl, read_run
from rlhf.stages.rate import choose_qualities, draw_rating_rows, rate_all
from tests.stages.conftest import Run

STAGES = ("world", "tokenizer", "pretrain", "sft", "label", "reward", "ppo", "rate", "evaluate")
# Sizes at which all stages take a few seconds: what the models say is noise.
SMALL = [
    "experiment=gold-dialogue", "tracking=jsonl", "device=cpu", "threads=1", "model.n_layer=1", "model.width=32", "model.n_head=2",
    "tokenizer.vocab_size=768", "pretrain.tokens=8192", "pretrain.eval_sequences=8", "gold.documents=1000",
    "gold.conversations=1.0", "gold.demonstrations=64", "gold.train_prompts=24", "gold.dev_prompts=8", "gold.test_prompts=12",
    "gold.comparison_prompts=12", "gold.comparison_dev_prompts=4", "gold.comparison_test_prompts=6", "sft.epochs=1", "reward.epochs=1",
    "reward.calibration_samples=4", "reward.audit=0", "ppo.episodes=16", "ppo.episodes_per_update=8", "ppo.minibatches=2",
    "ppo.epochs=1", "ppo.eval_prompts=4", "ppo.micro_batch_episodes=8", "evaluate.prompts=12", "evaluate.samples=2",
    "evaluate.best_of=4", "rollout.max_new_tokens=12", "rate.ratings=128", "rate.least={safe: 0.01}",
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
    tokenizer, records = dialogue_run.tokenizer(), dialogue_run.demonstrations()
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
    rankings = dialogue_run.comparisons()
    assert {users(r.prompt) for r in rankings} <= {2, 3, 4}
    for ranking in rankings:
        assert ranking.prompt == by_id[ranking.id.removeprefix("r-").rpartition("-labeler")[0]].prompt
    for path in (folder / "ppo" / "samples.jsonl", folder / "evaluate" / "samples.jsonl"):
        for row in read_jsonl(path):
            shown, record = row["prompt"], by_id[row["id"]]
            assert shown.count("User: ") == users(record.prompt) and shown.endswith(record.prompt[-1].content)


def test_a_rating_row_teaches_the_rating_alone(dialogue_run):
    config, tokenizer = dialogue_run.config(), dialogue_run.tokenizer()
    rankings = [r for r in dialogue_run.comparisons() if r.metadata["split"] == "train"]
    rated = list(rate_all(tokenizer, rankings, {}))
    qualities = choose_qualities(config, rated, rankings, {})
    assert list(qualities) == ["interesting", "safe", "sensible", "specific"], "not the overall rating"
    rater = Rater(config, dialogue_run.policy(), tokenizer, qualities, torch.device("cpu"))
    assert rater.weights == {"sensible": 3, "specific": 1, "interesting": 1}
    rows = draw_rating_rows(config, rater, rated)
    assert len(rows) == 128 and len({tuple(row["prompt"]) for row in rows}) > 100
    for row in rows:
        assert [label for label in labels_of(row, -100) if label != -100] == row["response"]
        text = tokenizer.decode(row["prompt"] + row["response"])
        assert re.search(r"(SENSIBLE|SPECIFIC|INTERESTING|SAFE) [01]$", text)


def test_a_rating_is_the_probability_of_a_1_whatever_it_is_rated_with(dialogue_run):
    tokenizer = dialogue_run.tokenizer("rate")
    prompt = encode_prompt(tokenizer, "What is the word?")
    rows = [prompt + encode_response(tokenizer, text) for text in ("Cup.", "I cannot say it.", "The word is cup.")]
    rater = load_rater(dialogue_run.config(), dialogue_run.folder / "rate", tokenizer, torch.device("cpu"))
    found = rater.rate(rows)
    for i, row in enumerate(rows):
        for name in ("sensible", "specific", "interesting", "safe"):
            ids = row + tokenizer(f"{name.upper()} ", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = rater.model(torch.tensor([ids])).logits[0, -1]
            chances = logits[tokenizer.convert_tokens_to_ids(["0", "1"])].double().softmax(0)
            assert found[name][i].item() == pytest.approx(chances[1].item(), abs=1e-5)


def test_a_labelers_yes_is_wrong_as_often_as_the_noise_makes_it():
    careful, kind = Requests().labelers(0.0)[1], Requests().labelers(1.4)[1]
    rng = random.Random(0)
    assert [says_yes(careful, part, rng) for part in (0.0, 0.4, 0.6, 1.0)] == [False, False, True, True]
    wrong = sum(says_yes(kind, 0.0, rng) for _ in range(4000)) / 4000
    assert wrong == pytest.approx(0.0766, abs=0.017)  # P(N(0, 1.4 / 4) > 0.5); four standard errors


def test_evaluate_compares_generate_and_rate_at_equal_samples(dialogue_run):
    results = dialogue_run.results()
    found = results["generate_and_rate"]
    assert set(found["picked"]) == {"generate_and_rate", "sft_rated", "ppo_best_of_n"} and found["n"] == 4
    assert {row["win_rate_vs_sft"]["n"] for row in found["picked"].values()} == {12}
    assert set(found["over"]) == {"best_of_n", "ppo", "ppo_best_of_n"}
    assert "rate" in results["baselines"] and 0 <= found["dropped"] <= 1
    assert {name: set(row) for name, row in results["ratings"].items()}["safe"] == {"sft", "ppo", "rate"}
    sections = make_evaluation(read_run(dialogue_run.folder))
    tables = {table.caption: table for section in sections for table in section.tables}
    policies = [row[0] for row in tables["PPO and its baselines, held-out prompts"].rows]
    assert policies[-4:] == ["best of 4", "generate and rate 4", "sft rated 4", "ppo best of n 4"]

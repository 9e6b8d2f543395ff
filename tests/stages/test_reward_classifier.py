"""Text classifiers with tokenizers of their own in the stages: trained on comparisons, used in PPO, evaluated."""

import json
import random

import pytest
import torch

from rlhf.data.chat_template import decode_response
from rlhf.model.classifier import TextRewardModel, load_reward_model
from rlhf.runs.folders import read_stage
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.stage import open_stage
from tests.stages.ppo_trainer import make_trainer

from ..model.classifiers import save_classifier, score_texts

CPU = torch.device("cpu")
FILLERS = ["Snow is white.", "Coal is black.", "A dog barks.", "Of course.", "That depends."]
QUICK = [
    "reward.batch_prompts=4", "reward.lr=5e-3", "reward.epochs=3", "reward.calibration_samples=16", "reward.final_lr_fraction=0.5",
    "data.dev=0.2", "ppo.episodes=16", "ppo.episodes_per_update=16", "ppo.minibatches=2", "ppo.epochs=1",
    "ppo.critic_warmup_updates=0", "ppo.warmup_updates=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory) -> str:
    """Answers that say "red" are better; three answers a prompt."""
    rng, rows = random.Random(0), []
    for i in range(64):
        texts = [f"{rng.choice(FILLERS)} {rng.choice(FILLERS)}" for _ in range(3)]
        texts[i % 3] = f"{rng.choice(FILLERS)} Blood is red."
        order = [["abc"[i % 3]], [name for name in "abc" if name != "abc"[i % 3]]]
        rows.append(
            {
                "kind": "ranking",
                "id": f"r{i}",
                "prompt": f"What is it like, {i}?",
                "labeler": "x",
                "ranking": order,
                "responses": [{"id": name, "text": text} for name, text in zip("abc", texts, strict=True)],
            }
        )
    path = tmp_path_factory.mktemp("comparisons") / "red.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(run, comparisons: str, name: str, *more: str):
    """The reward stage on a classifier whose tokenizer knows the world's words."""
    text = [row["response"] for row in read_jsonl(run.folder / "world" / "demonstrations.jsonl")]
    text += [" ".join(FILLERS), "What is it like ? Blood is red . User Assistant :"]
    source = save_classifier(run.runs_dir / "base" / name, name, text=text)
    return run.stage("reward", *QUICK, f"data.comparisons={comparisons}", f"reward.model='{source}'", *more)


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])  # text pairs, an encoder, plain text
def test_classifiers_learn_from_comparisons_and_pay_in_ppo(copy_until, comparisons, name):
    run = copy_until("reward")
    folder = train(run, comparisons, name)
    rows = [row["reward/loss"] for row in read_jsonl(folder / "metrics.jsonl") if "reward/loss" in row]
    summary = read_stage(folder)["summary"]
    assert rows[-1] < rows[0] - 0.1 and summary["accuracy"] > 0.75, f"loss {rows[0]} to {rows[-1]}, held out {summary}"
    model = load_reward_model(folder / "model", CPU)
    assert isinstance(model, TextRewardModel) and model.gain == pytest.approx(summary["gain"])

    config = run.config(*QUICK)
    with open_stage(config, "ppo") as stage:
        trainer = make_trainer(config, stage)
        rollout = trainer.respond(12)
        ids = [
            row[start:end].tolist()
            for row, start, end in zip(rollout.tokens, rollout.prompt_lengths, rollout.lengths, strict=True)
        ]
        texts = [decode_response(trainer.tokenizer, answer) for answer in ids]
        wanted = score_texts(
            model, [record.prompt for record, _ in trainer.prompts.train[:12]], texts, rollout.ended.tolist()
        )
        assert torch.allclose(rollout.scores, wanted, atol=1e-5) and wanted.std() > 0
        before = [p.detach().clone() for p in trainer.actor_critic.policy.parameters()]
        metrics = trainer.update()
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
        assert any(not torch.equal(a, b) for a, b in zip(before, trainer.actor_critic.policy.parameters(), strict=True))


def test_calibration_holds_for_a_classifier_too(copy_until, comparisons):
    """Demonstrations of the training split average 0 in what the saved model says."""
    from rlhf.data.reading import load_demonstrations
    from rlhf.data.splits import record_split
    from rlhf.runs.sources import fractions

    run = copy_until("reward")
    folder = train(run, comparisons, "distilbert")
    config = run.config(*QUICK)
    records = load_demonstrations(str(run.folder / "world" / "demonstrations.jsonl"))[0]
    written = [r for r in records if record_split(r, 0, fractions(config)) == "train"]
    model = load_reward_model(folder / "model", CPU)
    scores = score_texts(model, [r.prompt for r in written], [r.response for r in written], [True] * len(written))
    assert scores.mean().item() == pytest.approx(0, abs=1e-4) and scores.std() > 0.01


def test_evaluation_with_a_classifier(copy_until):
    """On the gold world's own comparisons, through every stage that follows."""
    run = copy_until("reward")
    train(run, str(run.folder / "label" / "comparisons.jsonl"), "bert", "data.dev=0.05")
    run.stage("ppo", *QUICK, "data.dev=0.05")
    folder = run.stage("evaluate", "evaluate.prompts=10")
    results = json.loads((folder / "results.json").read_text())
    rm = results["reward_model"]
    assert rm["accuracy"]["n"] > 100 and rm["held_out_labelers"]["accuracy"]["n"] > 100
    assert set(results["reward"]) == {"sft", "ppo"} and rm["scores"]["sft_samples"]["n"] == 20


def test_a_changed_classifier_is_noticed(gold_run, comparisons, tmp_path):
    from rlhf.runs.sources import hash_sources

    config = gold_run.config(f"reward.model='{save_classifier(tmp_path, 'albert')}'", f"data.comparisons={comparisons}")
    before = hash_sources(config, "reward")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes() + b" ")
    assert before != hash_sources(config, "reward")

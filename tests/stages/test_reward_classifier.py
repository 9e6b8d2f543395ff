"""Text classifiers with tokenizers of their own in the stages: trained on comparisons, used in PPO, evaluated."""

import json
import random

import pytest
import torch

from rlhf.data.chat_template import decode_response
from rlhf.data.splits import record_split
from rlhf.model.classifier import TextRewardModel, load_reward_model
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import fractions, hash_sources

from ..model.classifiers import save_classifier, score_texts
from .ppo_trainer import changed, open_trainer, weights

CPU = torch.device("cpu")
FILLERS = ["Snow is white.", "Coal is black.", "A dog barks.", "Of course.", "That depends."]
QUICK = [
    "reward.batch_prompts=4", "reward.lr=5e-3", "reward.epochs=3", "reward.calibration_samples=16", "reward.final_lr_fraction=0.5",
    "data.dev=0.2", "ppo.episodes=16", "ppo.episodes_per_update=16", "ppo.minibatches=2", "ppo.epochs=1",
    "ppo.critic_warmup_updates=0", "ppo.warmup_fraction=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory) -> str:
    """Answers that say "red" are better; three answers per prompt."""
    rng, rows = random.Random(0), []
    for i in range(64):
        texts = [f"{rng.choice(FILLERS)} {rng.choice(FILLERS)}" for _ in range(3)]
        texts[i % 3] = f"{rng.choice(FILLERS)} Blood is red."
        order = [["abc"[i % 3]], [name for name in "abc" if name != "abc"[i % 3]]]
        told = {"kind": "ranking", "id": f"r{i}", "prompt": f"What is it like, {i}?", "labeler": "x", "ranking": order}
        rows.append(told | {"responses": [{"id": name, "text": text} for name, text in zip("abc", texts, strict=True)]})
    path = tmp_path_factory.mktemp("comparisons") / "red.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(run, comparisons: str, name: str, *more: str):
    """The reward stage on a classifier whose vocabulary contains the world's words."""
    text = [row["response"] for row in read_jsonl(run.folder / "world" / "demonstrations.jsonl")]
    text += [" ".join(FILLERS), "What is it like ? Blood is red . User Assistant :"]
    source = save_classifier(run.runs_dir / "base" / name, name, text=text)
    return run.stage("reward", *QUICK, f"data.comparisons={comparisons}", f"reward.model='{source}'", *more)


@pytest.mark.parametrize("name", ["bert", "gpt2"])  # text pairs, plain text
def test_classifiers_learn_from_comparisons_and_pay_in_ppo(copy_until, comparisons, name):
    run = copy_until("reward")
    folder = train(run, comparisons, name)
    losses = [loss for _, loss in run.values("reward", "reward/loss")]
    summary = run.record("reward")["summary"]
    assert losses[-1] < losses[0] - 0.1 and summary["accuracy"] > 0.75, (
        f"{losses[0]} to {losses[-1]}, held out {summary}"
    )
    model = load_reward_model(folder / "model", CPU)
    assert isinstance(model, TextRewardModel) and model.gain == pytest.approx(summary["gain"])

    with open_trainer(run, *QUICK) as trainer:
        rollout = trainer.respond(12)
        places = zip(rollout.tokens, rollout.prompt_lengths, rollout.lengths, strict=True)
        texts = [decode_response(trainer.tokenizer, row[start:end].tolist()) for row, start, end in places]
        prompts = [record.prompt for record, _ in trainer.prompts.train[:12]]
        wanted = score_texts(model, prompts, texts, rollout.ended.tolist())
        assert torch.allclose(rollout.scores, wanted, atol=1e-5) and wanted.std() > 0
        before = weights(trainer.actor_critic.policy)
        metrics = trainer.update()
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
        assert changed(before, trainer.actor_critic.policy)


def test_calibration_holds_for_a_classifier_and_a_changed_one_is_noticed(copy_until, comparisons):
    """Scores of the training split's demonstrations by the saved model average 0."""
    run = copy_until("reward")
    folder = train(run, comparisons, "distilbert")
    path = run.runs_dir / "base" / "distilbert" / "model.safetensors"
    config = run.config(*QUICK, f"reward.model='{path.parent}'", f"data.comparisons={comparisons}")
    written = [r for r in run.demonstrations() if record_split(r, 0, fractions(config)) == "train"]
    model = load_reward_model(folder / "model", CPU)
    scores = score_texts(model, [r.prompt for r in written], [r.response for r in written], [True] * len(written))
    assert scores.mean().item() == pytest.approx(0, abs=1e-4) and scores.std() > 0.01

    assert run.record("reward")["data"] == hash_sources(config, "reward") != {}
    path.write_bytes(path.read_bytes() + b" ")
    assert run.record("reward")["data"] != hash_sources(config, "reward")

"""What pays in PPO: several reward models, classifiers of others, and classifiers trained here."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from rlhf.data.chat_template import decode_response
from rlhf.data.reading import load_prompts
from rlhf.data.splits import record_split
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.model.classifier import TextRewardModel, load_reward_model
from rlhf.ppo.rewards import Episodes, make_reward
from rlhf.runs.folders import hash_of, read_stage
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import fractions, hash_sources
from rlhf.system.files import sha256_file, write_json

from ..model.classifiers import WORDS, save_classifier, score_texts
from .conftest import ONE_LABELER, Run
from .ppo_trainer import changed, open_trainer, weights

SHORT = ["ppo.episodes=64", "ppo.episodes_per_update=32", "ppo.epochs=1", "ppo.missing_eos_rule=none"]


def test_a_whole_stage_on_two_reward_models(gold_run, copy_until):
    """The second one has the same parents and was trained on its data in another order."""
    run, more = copy_until("ppo"), ["seed=7", "reward.audit=0", "reward.calibration_samples=16", *ONE_LABELER]
    second_reward = copy_until("reward", name="other").stage("reward", *more)
    sources = f"ppo.rewards=['{gold_run.folder / 'reward'}','{second_reward}']"
    stage = run.stage("ppo", sources, "ppo.reward_weights=[0.5,0.5]", *SHORT)
    assert read_stage(stage)["status"] == "complete"
    both, *each = (run.values("ppo", f"objective/scores{part}") for part in ("", "/model_0", "/model_1"))
    assert len(both) == 2
    for (_, score), (_, first), (_, second) in zip(both, *each, strict=True):
        assert first != second, "two models, not one twice"
        assert score == pytest.approx((first + second) / 2, abs=1e-5)
    hashes = {h for name, h in read_stage(stage)["data"].items() if name.startswith("reward:")}
    assert hashes == {gold_run.record("reward")["hash"], read_stage(second_reward)["hash"]}


@pytest.mark.parametrize("own", [True, False])
def test_a_reward_model_of_another_tokenizer_is_refused(gold_run, copy_until, tmp_path, own):
    """Its chat template differs, so that it would read other tokens than it was trained on; no step is taken."""
    run = copy_until("ppo")
    folder = run.folder / "reward" if own else Path(shutil.copytree(gold_run.folder / "reward", tmp_path / "foreign"))
    retemplate(folder)
    with pytest.raises(UserError, match=r"its tokenizer or chat template is not that of this run: train \w+ again"):
        run.stage("ppo", *([] if own else [f"ppo.rewards='{folder}'"]))
    assert not (run.folder / "ppo" / "model").exists()


def retemplate(folder: Path) -> None:
    """Give a reward stage another chat template, and the record that a stage trained with it would have."""
    path = folder / "model" / "chat_template.jinja"
    path.write_text("[" + path.read_text())
    record = read_stage(folder)
    assert record is not None
    record["files"][str(path.relative_to(folder))] = sha256_file(path)
    write_json(folder / "stage.json", record | {"hash": hash_of(record)})


def one_update(run: Run, *more: str) -> Path:
    return run.stage("ppo", "ppo.episodes=64", "ppo.epochs=1", "ppo.missing_eos_rule=none", "ppo.eval_every=0", *more)


def test_a_finished_classifier_pays_without_a_reward_stage(gold_run, copy_until, tmp_path):
    folder = Path(save_classifier(tmp_path / "classifier", "bert", text=[WORDS]))
    run = copy_until("reward")
    stage = one_update(run, f"ppo.rewards='{folder}'")
    record = read_stage(stage)
    assert "reward" not in record["parents"]
    hashes = {key: value for key, value in record["data"].items() if key.startswith("reward:")}
    assert hashes == {f"reward:{folder}/{path.name}": sha256_file(path) for path in folder.iterdir()}
    assert f"reward:{folder}/model.safetensors" in hashes

    # It pays what plain transformers says, each text alone.
    config, tokenizer = run.config(f"ppo.rewards='{folder}'"), load_tokenizer(gold_run.folder / "sft" / "model")
    reward, own = make_reward(config, tokenizer, torch.device("cpu"))
    records = load_prompts(str(gold_run.folder / "world" / "prompts.jsonl"))[0][:3]
    texts = ["red .", "a good dog , of course", ""]
    paid = reward(Episodes(records, [[]] * 3, [[]] * 3, texts, torch.ones(3, dtype=torch.bool)))
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    encode = TextRewardModel.from_pretrained(folder).encoder.encode
    for score, record, text in zip(paid.tolist(), records, texts, strict=True):
        with torch.no_grad():
            row = encode(record.prompt, text)
            kinds = torch.tensor([row.types])
            assert plain(torch.tensor([row.ids]), token_type_ids=kinds).logits.item() == pytest.approx(score, abs=1e-5)
    assert own is None and len(set(paid.tolist())) == 3


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
    assert losses[-1] < losses[0] - 0.1 and summary["accuracy"] > 0.75, (losses, summary)
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

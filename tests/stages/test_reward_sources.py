"""PPO with several reward models: a whole stage with two of them, and models of other tokenizers are refused."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from rlhf.data.reading import load_prompts
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.model.classifier import TextRewardModel
from rlhf.ppo.rewards import Episodes, make_reward
from rlhf.runs.folders import hash_of, read_stage
from rlhf.system.files import sha256_file, write_json

from ..model.classifiers import WORDS, save_classifier
from .conftest import Run

SHORT = ["ppo.episodes=128", "ppo.epochs=1", "ppo.missing_eos_rule=none"]


def test_a_whole_stage_on_two_reward_models(gold_run, copy_until):
    """The second one has the same parents and was trained on its data in another order."""
    run, second_reward = copy_until("ppo"), copy_until("reward", name="other").stage("reward", "seed=7")
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
    """A plain transformers classifier with one label is used as it is; its files are the lineage."""
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
    encode = TextRewardModel.from_pretrained(folder).encode
    for score, record, text in zip(paid.tolist(), records, texts, strict=True):
        with torch.no_grad():
            row = encode(record.prompt, text)
            kinds = torch.tensor([row.types])
            assert plain(torch.tensor([row.ids]), token_type_ids=kinds).logits.item() == pytest.approx(score, abs=1e-5)
    assert own is None and len(set(paid.tolist())) == 3

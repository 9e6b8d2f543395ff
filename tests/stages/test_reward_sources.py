"""PPO paid by several reward models: a whole stage with two of them, and models of other tokenizers refused."""

import shutil
from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.files import sha256_file, write_json
from rlhf.runs.folders import hash_of, read_stage
from rlhf.tracking.writers import read_jsonl

from .conftest import Run

SHORT = ["ppo.episodes=128", "ppo.epochs=1", "ppo.missing_eos_rule=none"]


@pytest.fixture
def second_reward(gold_run: Run, copy_until) -> Path:
    """A reward stage of the same parents that went through its data in another order."""
    return copy_until("reward", name="other").stage("reward", "seed=7")


def test_a_whole_stage_on_two_reward_models(gold_run, copy_until, second_reward):
    run = copy_until("ppo")
    sources = f"ppo.rewards=['{gold_run.folder / 'reward'}','{second_reward}']"
    stage = run.stage("ppo", sources, "ppo.reward_weights=[0.5,0.5]", *SHORT)
    assert read_stage(stage)["status"] == "complete"
    rows = [row for row in read_jsonl(stage / "metrics.jsonl") if "objective/scores" in row]
    assert len(rows) == 2
    for row in rows:
        each = row["objective/scores/model_0"], row["objective/scores/model_1"]
        assert each[0] != each[1], "two models, not one twice"
        assert row["objective/scores"] == pytest.approx(sum(each) / 2, abs=1e-5)
    hashes = read_stage(stage)["data"]
    assert {h for name, h in hashes.items() if name.startswith("reward:")} == {
        read_stage(gold_run.folder / "reward")["hash"], read_stage(second_reward)["hash"],
    }  # fmt: skip


@pytest.mark.parametrize("own", [True, False])
def test_a_reward_model_of_another_tokenizer_is_refused(gold_run, copy_until, tmp_path, own):
    """Its chat template differs, so that it would read other tokens than it was trained on; no step is taken."""
    run = copy_until("ppo")
    folder = run.folder / "reward" if own else Path(shutil.copytree(gold_run.folder / "reward", tmp_path / "foreign"))
    retemplate(folder)
    with pytest.raises(UserError, match=r"its tokenizer or chat template is not that of this run: train \w+ anew"):
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

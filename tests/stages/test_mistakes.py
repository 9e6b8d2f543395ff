"""A user's mistake is one line that names the place, and exit code 2; long texts are cut, and it is said."""

import json
from pathlib import Path

import pytest
import torch

from rlhf.config.commands import SHARED_FLAG
from rlhf.system.files import hash_files

from .conftest import SMALL_MODEL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def plain(tmp_path: Path, *more: str) -> list[str]:
    """A run that is not of the gold world; the settings of runs are those of all stages."""
    return [*SMALL_MODEL, f"runs_dir={tmp_path / 'runs'}", "run=x", SHARED_FLAG, *more]


def test_nothing_to_train_on(refused, tmp_path):
    told = refused("pipeline", *plain(tmp_path))
    assert "data.corpus" in told and "data.demonstrations" in told and "experiment=gold" in told
    assert not (tmp_path / "runs").exists(), "nothing is begun"


@pytest.mark.parametrize(("command", "settings", "told"), [
    ("tokenizer", [], "data.corpus is not set"), ("sft", ["parents.pretrain=nowhere"], "parents.pretrain=nowhere"),
    ("label", [], "experiment=gold"), ("report", [], "no such run"), ("chat", [], "no finished ppo there"),
    ("export", [], "no finished ppo there"),
])  # fmt: skip
def test_a_run_that_has_nothing_yet(refused, tmp_path, command, settings, told):
    assert told in refused(command, *plain(tmp_path, *settings))


BAD_DEMONSTRATIONS = [
    ('{"question": "Hello", "reply": "Hi"}', "mine.jsonl: no format recognised"),
    ('{"kind": "demonstration", "id": "1", "prompt": "Hello"}', "mine.jsonl:1"),
    ('{"kind": "demonstration", "id": "1", "prompt": "a", "response": "b", "split": "dev"}', "none is left"),
]


@pytest.mark.parametrize(("content", "told"), BAD_DEMONSTRATIONS)
def test_demonstrations_that_cannot_be_used(refused, copy_until, folder, content, told):
    (folder / "mine.jsonl").write_text(content + "\n")
    assert told in refused("sft", *copy_until("sft").words(SHARED_FLAG), f"data.demonstrations={folder / 'mine.jsonl'}")


MISTAKES = [
    ("pretrain", "model.n_kv_head=3", "n_kv_head"),
    ("sft", "data.demonstrations='{folder}/bad.jsonl'", "bad.jsonl:2"),
    ("reward", "reward.labeler_weights={{nobody: 2}}", "nobody"),
    ("reward", "data.comparisons='{folder}/bad.jsonl'", "bad.jsonl"),
    ("ppo", "ppo.rewards='math:no_such_function'", "no_such_function"),
    ("ppo", "rollout.max_new_tokens=128", "rollout.max_new_tokens=128"),
    ("evaluate", "data.prompts='{folder}/missing.jsonl'", "missing.jsonl"),
]


def test_overwriting_with_a_mistake_loses_nothing(refused, copy_until, folder):
    good = json.dumps({"kind": "demonstration", "id": "1", "prompt": "Hello", "response": "Hi"})
    (folder / "bad.jsonl").write_text(good + '\n{"kind": "demonstration", "id": "2"}\n')
    run = copy_until(None)
    before = hash_files(run.folder)
    without_gpu = [] if torch.cuda.is_available() else [("pretrain", "device=cuda", "device=cuda")]
    for stage, mistake, told in MISTAKES + without_gpu:
        assert told in refused(stage, *run.words(SHARED_FLAG), "overwrite=true", mistake.format(folder=folder))
        left = hash_files(run.folder)
        assert {name: left.get(name) for name in before} == before, mistake
        assert not any(f"{stage}.new/" in name for name in left), "no half-made replacement"

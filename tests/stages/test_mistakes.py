"""A user's mistake is one line that names the place, and exit code 2; long texts are cut, and it is said."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf.cli import main
from rlhf.system.files import hash_files

from .conftest import SMALL_MODEL


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """refused("sft", …): the one line on stderr with which the command ends."""

    def call(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--shared-settings"])  # the runs' settings are those of all stages
        assert caught.value.code == 2
        err = capsys.readouterr().err
        lines = err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("rlhf: error: "), err
        return lines[0]

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def plain(tmp_path: Path, *more: str) -> list[str]:
    """A run that is not of the gold world."""
    return [*SMALL_MODEL, f"runs_dir={tmp_path / 'runs'}", "run=x", *more]


def test_nothing_to_train_on(refused, tmp_path):
    told = refused("pipeline", *plain(tmp_path))
    assert "data.corpus" in told and "data.demonstrations" in told and "experiment=gold" in told
    assert not (tmp_path / "runs").exists(), "nothing is begun"


@pytest.mark.parametrize(
    ("command", "settings", "told"),
    [
        ("tokenizer", [], "data.corpus is not set"),
        ("sft", ["parents.pretrain=nowhere"], "parents.pretrain=nowhere"),
        ("label", [], "experiment=gold"),
        ("report", [], "no such run"),
        ("chat", [], "no finished ppo there"),
        ("export", [], "no finished ppo there"),
    ],
)
def test_a_run_that_has_nothing_yet(refused, tmp_path, command, settings, told):
    assert told in refused(command, *plain(tmp_path, *settings))


def test_a_corpus_that_cannot_be_read(refused, tmp_path, folder):
    (folder / "torn.jsonl").write_text('{"text": "good"}\n{"text": "bro')
    assert "torn.jsonl:2" in refused("tokenizer", *plain(tmp_path, f"data.corpus={folder / 'torn.jsonl'}"))
    data = [f"data.{kind}={folder / 'missing.txt'}" for kind in ("corpus", "demonstrations", "comparisons")]
    assert "missing.txt" in refused("pipeline", *plain(tmp_path, *data))


BAD_DEMONSTRATIONS = [
    ('{"question": "Hello", "reply": "Hi"}', "mine.jsonl: no format recognised"),
    ('{"kind": "demonstration", "id": "1", "prompt": "Hello"}', "mine.jsonl:1"),
    ('{"kind": "demonstration", "id": "1", "prompt": "a", "response": "b", "split": "dev"}', "none is left"),
]


@pytest.mark.parametrize(("content", "told"), BAD_DEMONSTRATIONS)
def test_demonstrations_that_cannot_be_used(refused, copy_until, folder, content, told):
    (folder / "mine.jsonl").write_text(content + "\n")
    assert told in refused("sft", *copy_until("sft").words(), f"data.demonstrations={folder / 'mine.jsonl'}")


def test_comparisons_without_an_ordered_pair(refused, copy_until, folder):
    answers = [{"id": "a", "text": "Hi"}, {"id": "b", "text": "Ho"}]
    row = {"kind": "ranking", "id": "1", "prompt": "Hello", "ranking": [["a", "b"]], "responses": answers}
    (folder / "ties.jsonl").write_text(json.dumps(row) + "\n")
    told = refused("reward", *copy_until("reward").words(), f"data.comparisons={folder / 'ties.jsonl'}")
    assert "data.comparisons" in told and "ordered pair" in told


def test_a_stage_without_its_parent(refused, copy_until):
    assert "run `rlhf sft`, or name one with parents.sft" in refused("ppo", *copy_until("sft").words())


def test_a_stage_that_is_complete_is_not_overwritten(refused, copy_until):
    run = copy_until("label")
    before = (run.folder / "sft" / "stage.json").read_bytes()
    told = refused("sft", *run.words())
    assert "already has a complete sft" in told and "overwrite=true" in told
    assert (run.folder / "sft" / "stage.json").read_bytes() == before


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
        assert told in refused(stage, *run.words(), "overwrite=true", mistake.format(folder=folder))
        left = hash_files(run.folder)
        assert {name: left.get(name) for name in before} == before, mistake
        assert not any(f"{stage}.new/" in name for name in left), "no half-made replacement"


def test_a_stage_that_another_process_runs(refused, copy_until):
    run = copy_until("sft")
    (run.folder / "sft").mkdir()
    with (run.folder / "sft" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process" in refused("sft", *run.words())


def test_exports_that_are_not_written(refused, copy_until):
    run = copy_until("evaluate")
    (run.runs_dir / "taken").mkdir()
    (run.runs_dir / "taken" / "file").touch()
    assert "exists: choose another export.out=" in refused(
        "export", *run.words(), f"export.out={run.runs_dir / 'taken'}"
    )
    assert "convert to gpt2: positions is 'rotary'" in refused("export", *run.words(), "export.form=gpt2")


@pytest.mark.parametrize("setting", ["kl.coef=0", "kl.horizon=10"])
def test_an_adaptive_coefficient_that_could_not_move(refused, copy_until, setting):
    assert setting.split("=")[0] in refused("ppo", *copy_until("ppo").words(), setting)


def test_long_prompts_are_cut_and_it_is_said(copy_until, folder, capsys):
    """In SFT and in PPO; the model never sees more than its context."""
    long = "Tell me about the dog. " * 100
    rows = [{"kind": "prompt", "id": f"p{i}", "prompt": f"Say {i}."} for i in range(10)]
    rows.append({"kind": "prompt", "id": "long", "prompt": long})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ppo = copy_until("ppo", "ppo")
    capsys.readouterr()
    ppo.stage("ppo", f"data.prompts={folder / 'prompts.jsonl'}", "data.dev=0", "ppo.episodes=64")
    assert "11 prompts, 1 of them cut from the left to fit" in capsys.readouterr().out

    rows = [{"kind": "demonstration", "id": f"d{i}", "prompt": "Say it.", "response": f"It {i}."} for i in range(10)]
    rows.append({"kind": "demonstration", "id": "long", "prompt": long, "response": "A dog barks."})
    rows.append({"kind": "demonstration", "id": "longer", "prompt": "Say it.", "response": long})
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = copy_until("sft", "sft")
    sft.stage("sft", f"data.demonstrations={folder / 'demonstrations.jsonl'}", "data.dev=0")
    told = capsys.readouterr().out
    assert "cut_prompts 1" in told and "truncated_responses 1" in told and "kept 12" in told
    assert sft.values("sft", "sft/loss")

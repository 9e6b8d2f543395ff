"""A run remembers its settings: a later command needs only what changes."""

import json
import sys
from pathlib import Path

import pytest
import yaml

import rlhf
from rlhf import cli
from rlhf.errors import UserError
from rlhf.runs.remembered import by_key, recall


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run `rlhf <arguments>` in an empty folder that has a corpus: its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlhf"])
    rows = [
        json.dumps({"text": f"The {word} is in the garden, said the {word}. " * 9}) for word in ("cat", "dog", "owl")
    ]
    Path("books.jsonl").write_text("\n".join(rows), encoding="utf-8")

    def run(*arguments: str) -> tuple[int, str]:
        code = 0
        try:
            cli.main(list(arguments))
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


FIRST = ("tokenizer", "model=tiny", "run=x", "data.corpus=books.jsonl", "tokenizer.vocab_size=300", "tracking=off")


def composed(call, *words: str) -> dict:
    code, out = call(*words, "--cfg", "job")
    assert code == 0, out
    return yaml.safe_load(out)


def test_the_second_command_needs_only_what_changes(call):
    assert call(*FIRST)[0] == 0
    kept = recall(Path("runs/x"))
    assert kept == by_key(FIRST[1:2] + FIRST[3:])
    again = composed(call, "sft", "run=x", "sft.epochs=3")
    assert again["data"]["corpus"] == "books.jsonl" and again["tokenizer"]["vocab_size"] == 300
    assert (
        again["sft"]["epochs"] == 3 and again["model"]["width"] == composed(call, "sft", "model=tiny")["model"]["width"]
    )
    assert composed(call, "sft", "run=y")["data"]["corpus"] is None  # another run
    changed = composed(call, "sft", "run=x", "model=gpt2", "tokenizer.vocab_size=400")
    assert changed["model"]["n_layer"] == 12 and changed["tokenizer"]["vocab_size"] == 400
    code, out = call("pretrain", "run=x", "pretrain.tokens=1", "pretrain.global_batch_tokens=7")
    assert code == 2 and "as run=x was given: model=tiny data.corpus=books.jsonl" in out and "want a multiple" in out
    assert recall(Path("runs/x")) == kept  # what was refused is not remembered


def test_a_setting_for_one_command_is_not_remembered(call):
    assert call(*FIRST, "overwrite=true")[0] == 0
    assert "overwrite" not in recall(Path("runs/x")) and "run" not in recall(Path("runs/x"))


def test_python_and_the_command_line_remember_for_each_other(call):
    assert call(*FIRST)[0] == 0
    run = rlhf.Run("x")
    assert run.config().tokenizer.vocab_size == 300
    other = rlhf.Run("z", corpus="books.jsonl", tokenizer_vocab_size=290, tracking_kind="off", model_context_length=64)
    other.tokenizer()
    assert composed(call, "pretrain", "run=z")["tokenizer"]["vocab_size"] == 290


EVIL = "from pathlib import Path\n\ndef f():\n    Path('ran').touch()\n"


@pytest.mark.parametrize(
    "settings",
    [
        {"plugins": "runs/x/evil.py:f"},
        {"hydra.searchpath": "[runs/x]", "experiment": "evil"},
        {"experiment": "../../runs/x/experiment/evil"},
        {"tracking.project": "'${oc.env:HOME}'"},
    ],
)
def test_a_foreign_runs_settings_run_no_code_and_read_no_secret(call, monkeypatch, settings):
    """Until the user gives them."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    Path("runs/x/experiment").mkdir(parents=True)
    Path("runs/x/settings.json").write_text(json.dumps(settings), encoding="utf-8")
    Path("runs/x/evil.py").write_text(EVIL, encoding="utf-8")
    Path("runs/x/experiment/evil.yaml").write_text("# @package _global_\nplugins: runs/x/evil.py:f\n", encoding="utf-8")
    key = next(iter(settings))
    for words in (FIRST, ("pipeline", "run=x")):
        code, out = call(*words)
        assert code == 2 and f"rlhf: error: runs/x/settings.json: {key}=" in out.splitlines()[-1], out
    with pytest.raises(UserError, match="add it to the command"):
        rlhf.Run("x")
    assert not Path("ran").exists() and not Path("cache").exists()
    if key == "plugins":
        assert call(*FIRST, "plugins=runs/x/evil.py:f")[0] == 0 and Path("ran").exists()
        assert call(*FIRST, "overwrite=true")[0] == 0


def test_what_a_foreign_run_names_and_a_command_does_not_use_is_left_out(call, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/settings.json").write_text(
        json.dumps({"ppo.rewards": "runs/x/evil.py:f", "sft.epochs": "2"}), encoding="utf-8"
    )
    assert call(*FIRST)[0] == 0
    assert not Path("cache/rlhf/given").exists() and recall(Path("runs/x"))["ppo.rewards"] == "runs/x/evil.py:f"
    assert call("ppo", "run=x")[0] == 2


def test_a_damaged_file_is_one_line_and_stays(call):
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/settings.json").write_text('{"sft.lr": "1e-4",}', encoding="utf-8")
    code, out = call(*FIRST)
    assert code == 2 and out.startswith("rlhf: error: runs/x/settings.json: damaged (") and out.count("\n") == 1
    assert "sft.lr" in Path("runs/x/settings.json").read_text(encoding="utf-8")

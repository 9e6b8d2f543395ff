"""Damaged run files: reading one is one line that says what to do, never a traceback."""

import itertools
import json
from pathlib import Path

import pytest

from rlhf.cli import main
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.recipe import STAGES
from rlhf.report.sections import make_skipped
from rlhf.runs import folders as runs
from rlhf.runs.run_files import read_run

GOOD = {
    "stage": "sft", "status": "complete", "settings": {}, "parents": {}, "data": {}, "files": {}, "hash": "0" * 64,
    "seconds": 1.0, "run": "x", "versions": {},
}  # fmt: skip
DAMAGE: dict[str, bytes | None] = {
    "without files": json.dumps({k: v for k, v in GOOD.items() if k != "files"}).encode(),
    "a list": b"[]",
    "a list of files": json.dumps(GOOD | {"files": ["a"]}).encode(),
    "null": b"null",
    "null settings": json.dumps(GOOD | {"settings": None}).encode(),
    "deep": b'{"a":' * 50_000,
    "no utf-8": b'{"stage": "\xff\xfe"}',
    "empty": b"",
    "a file outside": json.dumps(GOOD | {"files": {"../../x": "0" * 64}}).encode(),
    "a folder": None,
}


def damage(path: Path, content: bytes | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if content is None else path.write_bytes(content)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_is_one_line(tmp_path, name):
    config = Config(run="x", runs_dir=str(tmp_path))
    damage(tmp_path / "x" / "sft" / "stage.json", DAMAGE[name])
    for read in (
        lambda: runs.read_stage(tmp_path / "x" / "sft"),
        lambda: runs.check_output(tmp_path / "x" / "sft"),
        lambda: runs.collect_parents(config, "reward"),
    ):
        with pytest.raises(UserError, match=r"sft/stage.json: (damaged|is a folder)[^\n]*overwrite=true$"):
            read()
    read_run(tmp_path / "x")  # the report is patient


READERS = (
    "chat", "export", "generate", "sample", "pipeline", "evaluate", "rejection", "dpo", "ppo", "reward", "label", "sft",
    "pretrain", "tokenizer",
)  # fmt: skip


@pytest.mark.parametrize(("command", "name"), zip(READERS, itertools.cycle(DAMAGE), strict=False))
def test_every_command_that_reads_a_damaged_record_says_so_in_one_line(tmp_path, capsys, command, name):
    for stage in STAGES:
        damage(tmp_path / "x" / stage / "stage.json", DAMAGE[name])
    given = f"experiment=gold runs_dir={tmp_path} run=x rounds=1 device=cpu tracking=off --shared-settings"
    with pytest.raises(SystemExit) as ended:
        main([command, *given.split()])
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("rlhf: error: ") and "/stage.json: " in line, line


@pytest.mark.parametrize("name", DAMAGE)
def test_the_report_and_watch_show_what_is_there_and_name_what_is_damaged(tmp_path, capsys, name):
    files = ["sft/stage.json", "evaluate/results.json", "pipeline.json"]
    files += ["sft/metrics.jsonl", "sft/samples.jsonl", "sft/config.yaml", "evaluate/samples.jsonl"]
    for file in files:
        damage(tmp_path / "x" / file, DAMAGE[name])
    notes = make_skipped(read_run(tmp_path / "x"))
    for file in files[:2]:
        assert any(f"{file}: damaged" in note or f"{file}: is a folder" in note for note in notes), file
    place = [f"runs_dir={tmp_path}", "run=x"]
    main(["watch", "watch.wait=false", *place])
    if name in ("a list", "null settings", "a folder"):
        main(["report", *place])
        assert "damaged" in (tmp_path / "x" / "report.html").read_text() or name == "a folder"
    assert capsys.readouterr().err == ""

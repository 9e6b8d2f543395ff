import errno
import json
import os
import re
import shutil
from dataclasses import asdict

import pytest
import yaml

from rlhf.cli import main
from rlhf.config import Config
from rlhf.config.setting import settings_in
from rlhf.errors import UserError
from rlhf.recipe import STAGES
from rlhf.runs import folders as runs
from rlhf.runs.checkpoints import checkpoints, latest_checkpoint
from rlhf.runs.folders import check_output, under_way
from rlhf.runs.remembered import GIVEN, recall
from rlhf.runs.stage import git_state, misfit, open_stage
from rlhf.system.files import beside, hash_files, set_aside

from .test_files import change_a_byte, checkpoint, sealed
from .tiny_stages import changed, interrupt, run_stage


@pytest.fixture
def config(tmp_path) -> Config:
    return Config(run="demo", runs_dir=str(tmp_path / "runs"))


def test_a_complete_stage_keeps_what_was_asked_for(config):
    wanted = changed(config, checkpoints__keep_best=1, checkpoints__keep_every=2)
    with open_stage(wanted, "tokenizer") as stage:
        for step, figure in ((1, 0.9), (2, 0.1), (3, 0.2)):
            sealed(stage.checkpoints, step, figure, wanted.checkpoints)
        stage.finish()
    assert [p.name for p in checkpoints(stage.checkpoints)] == ["step-1", "step-2"]
    record = runs.check_output(stage.folder)
    assert record["files"] == {}, "checkpoints are no output"


def test_identity_settings_exist_in_the_schema_and_cover_what_trains():
    named = {key for row in STAGES.values() for key in row.settings}
    groups = {key.partition(".")[0] for key in settings_in(Config)}
    trains = "model tokenizer pretrain sft reward ppo kl rollout evaluate gold seed"
    assert set(trains.split()) <= named <= {*settings_in(Config), *groups}


def test_a_setting_newer_than_a_record_counts_as_its_default(config):
    folder = interrupt(config, "tokenizer")
    record = runs.read_stage(folder)
    del record["settings"]["tokenizer.vocab_size"]
    (folder / "stage.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"other settings \(tokenizer.vocab_size 50257 -> 400\)"):
        run_stage(changed(config, tokenizer__vocab_size=400), "tokenizer")
    assert misfit(config, "tokenizer", record, {}, {}) is None
    with open_stage(config, "tokenizer") as stage:
        assert stage.resumed


def test_a_stage_from_beginning_to_end(config, capsys):
    with open_stage(config, "tokenizer", {"corpus:a.txt": "0f"}) as stage:
        running = runs.read_stage(stage.folder)
        assert running is not None and running["status"] == "running" and not runs.is_complete(stage.folder)
        assert not stage.resumed and running["steps"] is None
        stage.plan(12)
        assert runs.read_stage(stage.folder)["steps"] == 12
        stage.model.mkdir()
        (stage.model / "tokenizer.json").write_text("{}")
        (stage.folder / "metrics.jsonl").write_text("{}\n")
        checkpoint(stage.checkpoints, 1)
        stage.finish({"entries": 300.0})
    record = runs.read_stage(stage.folder)
    assert record is not None and runs.check_output(stage.folder) == record | {"folder": stage.folder}
    assert not stage.checkpoints.exists()
    assert list(record["files"]) == ["model/tokenizer.json"]  # what is logged is no output
    assert (record["stage"], record["seed"], record["summary"]) == ("tokenizer", 0, {"entries": 300.0})
    assert record["parents"] == {} and record["data"] == {"corpus:a.txt": "0f"}
    assert record["versions"].keys() >= {"python", "torch", "transformers"} and record["peak_rss_mb"] > 1
    assert record["git"] == git_state() and record["steps"] == 12
    assert record["hash"] == runs.hash_of(record) and record["seconds"] >= 0
    assert yaml.safe_load((stage.folder / "config.yaml").read_text()) == asdict(config) == record["config"]
    said = capsys.readouterr().out
    assert re.match(r"tokenizer: starting\ntokenizer: complete in \d+ s", said) and str(stage.folder) in said


def test_what_a_kill_left_half_written_is_no_output(config):
    folder = interrupt(config, "tokenizer")
    for name in (".stage.json.123.tmp", "metrics.jsonl.kept"):
        (folder / name).write_text("torn")
    run_stage(config, "tokenizer")
    record = runs.read_stage(folder)
    assert record is not None and list(record["files"]) == ["model/weights.txt"]
    assert not (folder / ".stage.json.123.tmp").exists() and not (folder / "metrics.jsonl.kept").exists()
    other = changed(config, run="other")  # killed before its first record
    folder = runs.stage_folder(other, "tokenizer")
    folder.mkdir(parents=True)
    (folder / ".stage.json.17.tmp").touch()
    run_stage(other, "tokenizer")
    assert not (folder / ".stage.json.17.tmp").exists()


def test_a_complete_stage_is_refused_and_overwrite_leaves_it_until_the_new_one_is_complete(config):
    folder = run_stage(config, "tokenizer", "old")
    (folder / "stray.txt").touch()
    before = hash_files(folder)
    with pytest.raises(UserError, match=r"already has a complete tokenizer: choose another run=…, or add over"):
        run_stage(config, "tokenizer")
    with open_stage(changed(config, overwrite=True), "tokenizer") as stage:
        assert not stage.resumed and stage.folder == beside(folder) and under_way(folder) == stage.folder
        assert sorted(p.name for p in stage.folder.iterdir()) == ["config.yaml", "stage.json"]
        stage.model.mkdir()
        (stage.model / "weights.txt").write_text("new")
        assert hash_files(folder) == before
        runs.check_output(folder)
        stage.finish()
    assert stage.folder == folder == under_way(folder)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["tokenizer"]
    assert (folder / "model" / "weights.txt").read_text() == "new" and not (folder / "stray.txt").exists()
    assert runs.check_output(folder)["status"] == "complete"


def test_an_interrupted_overwrite_is_resumed(config):
    folder = run_stage(config, "tokenizer", "old")
    again = changed(config, overwrite=True)
    interrupt(again, "tokenizer")
    assert runs.check_output(folder)["status"] == "complete"
    with pytest.raises(UserError, match="already has a complete tokenizer"):
        run_stage(config, "tokenizer")
    with open_stage(again, "tokenizer") as stage:
        assert stage.resumed and stage.elapsed() >= 100 and latest_checkpoint(stage.checkpoints) is not None
        stage.finish()
    interrupt(again, "tokenizer")
    other = changed(again, tokenizer__vocab_size=400)
    given = GIVEN.set(("tokenizer.vocab_size=400",))
    with open_stage(other, "tokenizer") as stage:  # what an overwrite left for other settings is in nobody's way
        assert not stage.resumed and not stage.checkpoints.exists()
        stage.plan(3)
        assert not recall(folder.parent), "if it fails, the old stage stays, with its settings"
        stage.finish()
    GIVEN.reset(given)
    assert recall(folder.parent) == {"tokenizer.vocab_size": "400"}
    assert runs.read_stage(folder)["settings"]["tokenizer.vocab_size"] == 400


@pytest.mark.parametrize("killed", ["between", "after"])
def test_a_kill_during_the_swap_is_settled(config, killed):
    folder = run_stage(config, "tokenizer", "old")
    shutil.copytree(folder, beside(folder))
    (beside(folder) / "model" / "weights.txt").write_text("new")
    folder.rename(set_aside(folder))
    if killed == "after":
        beside(folder).rename(folder)
    with pytest.raises(UserError, match="already has a complete tokenizer"):
        run_stage(config, "tokenizer")
    assert (folder / "model" / "weights.txt").read_text() == "new"
    assert sorted(p.name for p in folder.parent.iterdir()) == ["tokenizer"]


def test_an_interrupted_stage_is_resumed_with_its_time_or_dropped(config):
    folder = interrupt(config, "tokenizer")
    with open_stage(config, "tokenizer") as stage:
        assert stage.resumed and 100 <= stage.elapsed() < 110
        assert latest_checkpoint(stage.checkpoints) == folder / "checkpoints" / "step-1"
        stage.finish()
    assert runs.read_stage(folder)["seconds"] >= 100
    other = changed(config, run="other")
    for more, before in ({"overwrite": True}, 0), ({}, 100):  # the second was killed before its first checkpoint
        shutil.rmtree(interrupt(other, "tokenizer") / ("checkpoints" if before else "other"), ignore_errors=True)
        with open_stage(changed(other, **more), "tokenizer") as stage:
            assert not stage.resumed and before <= stage.elapsed() < before + 10 and not stage.checkpoints.exists()


def test_an_interrupted_stage_is_resumed_only_as_it_was_started(config):
    folder = interrupt(config, "tokenizer", data={"corpus:a.txt": "0f"})
    told = r"run with other settings \(tokenizer.vocab_size 50257 -> 400\): restore them"
    with pytest.raises(UserError, match=told):
        run_stage(changed(config, tokenizer__vocab_size=400), "tokenizer", data={"corpus:a.txt": "0f"})
    with pytest.raises(UserError, match="tokenizer was run on other data"):
        run_stage(config, "tokenizer", data={"corpus:a.txt": "1f"})
    assert latest_checkpoint(folder / "checkpoints") is not None
    pace = changed(config, threads=1, checkpoints__keep=1)
    run_stage(pace, "tokenizer", data={"corpus:a.txt": "0f"})


@pytest.mark.parametrize(("record", "told"), [
    (None, r"no readable stage.json but other files \(.*thesis.txt\): choose another run=…"),
    ("{", r"stage.json: damaged \(Expecting property name"), ("[]", r"stage.json: damaged \(got \[\], want an object"),
], ids=["absent", "torn", "no record"])  # fmt: skip
def test_files_without_a_record_are_not_deleted(config, record, told):
    folder = runs.stage_folder(config, "tokenizer")
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("years of work")
    if record is not None:
        (folder / "stage.json").write_text(record)
    with pytest.raises(UserError, match=told):
        run_stage(config, "tokenizer")
    assert (folder / "thesis.txt").read_text() == "years of work"
    run_stage(changed(config, overwrite=True), "tokenizer")
    assert not (folder / "thesis.txt").exists()


def test_two_processes_do_not_work_on_one_stage(config):
    with open_stage(config, "tokenizer") as stage:
        with pytest.raises(UserError, match=f"{stage.folder}: another process is working on it: wait"):
            run_stage(changed(config, overwrite=True), "tokenizer")
        assert runs.read_stage(stage.folder)["status"] == "running"
        run_stage(changed(config, run="other"), "tokenizer")
    with pytest.raises(ValueError, match="bug"), open_stage(changed(config, run="failed"), "tokenizer"):
        raise ValueError("bug")
    for run in ("demo", "failed"):
        run_stage(changed(config, run=run), "tokenizer")  # the lock is gone


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.bin")


@pytest.mark.parametrize(("raised", "kind", "told"), [
    (FULL, UserError, r"model.bin: cannot write: No space left on device: free space"),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), UserError,
     r"tokenizer: cannot write: No space left on device: free"),
    (PermissionError(errno.EACCES, "Permission denied", "corpus.txt"), PermissionError, "corpus.txt"),
], ids=["full", "full under torch", "unreadable"])  # fmt: skip
def test_a_disk_that_fills_while_a_stage_writes_and_a_file_that_cannot_be_read(config, raised, kind, told):
    with pytest.raises(kind, match=told), open_stage(config, "tokenizer"):
        raise raised
    run_stage(config, "tokenizer")


@pytest.fixture
def words(tmp_path) -> list[str]:
    """The words for a run with a complete tokenizer, which kept a checkpoint, and an interrupted world and SFT."""
    config = Config(run="demo", runs_dir=str(tmp_path))
    with open_stage(changed(config, checkpoints__keep_every=1), "tokenizer") as stage:
        (stage.folder / "output").write_text("x")
        sealed(stage.checkpoints, 1, None, changed(config, checkpoints__keep_every=1).checkpoints)
        stage.finish()
    run_stage(config, "pretrain")
    folder = interrupt(config, "sft")
    change_a_byte(checkpoint(folder / "checkpoints", 2))
    (folder / ".stage.json.1.tmp").write_text("{")
    beside(tmp_path / "demo" / "pretrain").mkdir()
    return ["clean", "run=demo", f"runs_dir={tmp_path}"]


def test_what_nothing_reads_goes_only_if_asked_for(words, tmp_path, capsys):
    run = tmp_path / "demo"
    going = ["tokenizer/checkpoints/step-1", "sft/checkpoints/step-2", "sft/.stage.json.1.tmp", ".pretrain.new"]
    main(words)
    listed = capsys.readouterr().out
    assert all(f"{run / name}: " in listed and (run / name).exists() for name in going)
    main([*words, "yes=true"])
    out = capsys.readouterr().out
    assert not any((run / name).exists() for name in going) and "is deleted" in out
    assert latest_checkpoint(run / "sft" / "checkpoints").name == "step-1"
    assert all(check_output(run / name, name) for name in ("tokenizer", "pretrain"))
    main(words)
    assert "0 MB  can go\n" in capsys.readouterr().out


def test_a_damaged_stage_and_a_running_one_lose_nothing(words, tmp_path, capsys, refused):
    run = tmp_path / "demo"
    (run / "tokenizer" / "output").write_text("y")
    main([*words, "yes=true"])
    assert (run / "tokenizer" / "checkpoints" / "step-1").exists()
    assert "cut short or changed" in capsys.readouterr().out
    shutil.rmtree(run / "sft")
    with open_stage(Config(run="demo", runs_dir=str(tmp_path)), "sft"):
        assert "another process is working on it" in refused(*words, "yes=true")

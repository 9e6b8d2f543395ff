"""Checkpoints: whole or ignored, which ones stay, and disks that fail."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from rlhf.config import CheckpointConfig
from rlhf.errors import UserError
from rlhf.runs.checkpoints import (
    MANIFEST,
    checkpoint_due,
    checkpoint_figure,
    checkpoints,
    is_whole,
    latest_checkpoint,
    remove_checkpoint,
    save_checkpoint,
    seal,
)

from .test_files import fail_with


def checkpoint(folder: Path, step: int, content: str = "weights", keep: int = 5) -> Path:
    def write(path: Path) -> None:
        (path / "inner").mkdir()
        (path / "inner" / "model.txt").write_text(content * 100)
        (path / "state.json").write_text(json.dumps({"step": step}))

    return save_checkpoint(folder, step, write, CheckpointConfig(keep=keep))


def test_a_saved_checkpoint_is_whole_and_the_latest(tmp_path):
    for step in (9, 10, 100):
        path = checkpoint(tmp_path, step)
        assert path == tmp_path / f"step-{step}" and is_whole(path)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-9", "step-10", "step-100"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100"
    (tmp_path / "other" / "step-x").mkdir(parents=True)
    (tmp_path / "other" / "step-3").touch()
    for folder in (tmp_path / "other", tmp_path / "none"):
        assert checkpoints(folder) == [] and latest_checkpoint(folder) is None


def change_a_byte(path: Path) -> None:
    content = bytearray((path / "inner" / "model.txt").read_bytes())
    content[350] ^= 1
    (path / "inner" / "model.txt").write_bytes(content)


DAMAGES = {
    "a byte changed": change_a_byte,
    "a file cut": lambda path: os.truncate(path / "inner" / "model.txt", 650),
    "a file lost": lambda path: (path / "state.json").unlink(),
    "an empty manifest": lambda path: (path / MANIFEST).write_text('{"files": {}}'),
    "a torn manifest": lambda path: os.truncate(path / MANIFEST, 20),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, damage):
    good, bad = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    damage(bad)
    said: list[str] = []
    assert not is_whole(bad) and latest_checkpoint(tmp_path, said.append) == good
    (line,) = said
    assert line.startswith(f"{bad}: checkpoint is damaged") and "using the previous one" in line
    damage(good)
    assert latest_checkpoint(tmp_path, said.append) is None


def test_a_checkpoint_that_was_being_written_does_not_count(tmp_path):
    good = checkpoint(tmp_path, 1)
    torn = tmp_path / "step-2"
    torn.mkdir()
    (torn / "state.json").write_text("{}")
    said: list[str] = []
    assert latest_checkpoint(tmp_path, said.append) == good and said == []
    seal(torn)
    assert latest_checkpoint(tmp_path, said.append) == torn


def sealed(folder: Path, step: int, figure: float | None, keep: CheckpointConfig) -> None:
    save_checkpoint(folder, step, lambda path: (path / "x").write_text("x") and None, keep, figure)


@pytest.mark.parametrize(
    ("keep", "figures", "kept"),
    [
        (CheckpointConfig(keep=2), [None] * 4, [3, 4]),
        # newest: 7; best: 2 and 6 (0.9 each); every 4: 4
        (CheckpointConfig(keep=1, keep_best=2, keep_every=4), [0.3, 0.9, 0.1, 0.2, None, 0.9, 0.4], [2, 4, 6, 7]),
        (CheckpointConfig(keep=1, keep_best=1), [0.5, 0.5, None], [2, 3]),  # of equal figures the later is better
    ],
)
def test_the_newest_the_best_and_every_so_many_steps_stay(tmp_path, keep, figures, kept):
    for step, figure in enumerate(figures, 1):
        sealed(tmp_path, step, figure, keep)
    assert [p.name for p in checkpoints(tmp_path)] == [f"step-{step}" for step in kept]


def test_a_figure_is_read_back(tmp_path):
    sealed(tmp_path, 6, 0.9, CheckpointConfig())
    assert checkpoint_figure(tmp_path / "step-6") == 0.9


def test_what_a_kill_left_half_written_goes_with_the_next_save_and_takes_nobodys_place(tmp_path):
    checkpoint(tmp_path, 1)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "half").touch()
    checkpoint(tmp_path, 3, keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-1", "step-3"]


def test_a_removal_that_is_cut_off_leaves_no_checkpoint(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)
    remove_checkpoint(path)
    assert path.is_dir() and not is_whole(path) and latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("seconds", "keep_every", "step", "due"),
    [(599.0, 0, 5, False), (600.0, 0, 5, True), (1.0, 5, 5, True), (1.0, 5, 6, False), (1.0, 5, 10, True)],
)
def test_when_a_checkpoint_is_due(seconds, keep_every, step, due):
    assert checkpoint_due(CheckpointConfig(keep_every=keep_every), step, seconds) is due


def test_the_first_checkpoint_comes_early():
    settings = CheckpointConfig(every_seconds=600.0)
    assert [checkpoint_due(settings, 1, seconds, first=True) for seconds in (119, 121)] == [False, True]
    assert not checkpoint_due(settings, 1, 121)
    assert checkpoint_due(CheckpointConfig(every_seconds=5.0), 1, 6, first=True)


def test_writing_checkpoints_takes_at_most_a_twentieth_of_the_time():
    settings = CheckpointConfig(every_seconds=600.0)
    assert checkpoint_due(settings, 1, 601, writing=30.0)
    assert [checkpoint_due(settings, 1, seconds, writing=60.0) for seconds in (601, 1199, 1201)] == [False, False, True]
    assert checkpoint_due(CheckpointConfig(every_seconds=0.0), 1, 0.1, writing=60.0), "asked for after each step"


@pytest.mark.parametrize("keep", [1, 2])
def test_who_goes_back_to_an_earlier_step_does_not_lose_what_is_saved_next(tmp_path, keep):
    checkpoint(tmp_path, 10)
    change_a_byte(checkpoint(tmp_path, 20))
    (tmp_path / "step-30").mkdir()  # torn
    assert latest_checkpoint(tmp_path, lambda text: None) == tmp_path / "step-10"
    checkpoint(tmp_path, 15, keep=keep)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-15"
    assert [p.name for p in checkpoints(tmp_path)] == ["step-10", "step-15"][-keep:]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["python", "torch", "safetensors"],
)
def test_a_full_disk_keeps_the_checkpoints_before_it(tmp_path, error):
    before = checkpoint(tmp_path, 1)

    def write(path: Path) -> None:
        (path / "half").write_text("x")
        raise error

    with pytest.raises(UserError, match=r"step-2: cannot write: No space left on device: free .* resumes"):
        save_checkpoint(tmp_path, 2, write, CheckpointConfig())
    assert [*tmp_path.iterdir()] == [before] and is_whole(before)


def test_a_disk_that_fills_while_sealing_keeps_the_checkpoints_before_it(tmp_path, monkeypatch):
    before = checkpoint(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))
    with pytest.raises(UserError, match="No space left on device"):
        checkpoint(tmp_path, 2, keep=1)
    assert [*tmp_path.iterdir()] == [before] and is_whole(before)


def test_another_error_is_not_taken_for_the_disks(tmp_path):
    def write(path: Path) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        save_checkpoint(tmp_path, 1, write, CheckpointConfig())
    assert not any(tmp_path.iterdir())

import errno
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.config import CheckpointConfig
from rlhf.errors import UserError
from rlhf.runs.checkpoints import (
    MANIFEST,
    checkpoint_due,
    checkpoints,
    is_whole,
    latest_checkpoint,
    save_checkpoint,
    seal,
)
from rlhf.runs.folders import read_record
from rlhf.system.files import beside, hash_files, held, read_json, replaced, set_aside, sha256_file, share, write_json
from rlhf.training.loop import newest_checkpoint


def fail_with(number: int):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


def test_json_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"name": "é", "n": [1, 2]})
    assert read_json(path) == {"name": "é", "n": [1, 2]}
    monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))
    with pytest.raises(UserError, match=r"a\.json: cannot write: No space left on device: free space"):
        write_json(path, {"n": 3})
    assert read_json(path)["n"] == [1, 2] and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_damaged_json_reads_as_nothing(tmp_path):
    for content in (b"", b'{"a": 1', b"\xff\xfe", b"[1] 2", b"[" * 100_000):
        (tmp_path / "a.json").write_bytes(content)
        assert read_json(tmp_path / "a.json") == {}, content[:9]


def test_hashes_are_sha256_by_relative_path_and_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"abc")
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "skipped").write_bytes(b"1")
    assert hash_files(tmp_path, skip=("skipped",)) == {  # the test vectors of FIPS 180-2
        "a": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "b/x": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.gguf", Path("/dev/zero"), tmp_path / "link"):
        for read in (sha256_file, read_json, lambda path: read_record(path, "stage")):
            with pytest.raises(UserError, match="not a regular file"):
                read(path)
    assert hash_files(tmp_path).keys() == {"a", "b/x", "skipped"}


def test_a_folder_is_replaced_when_it_is_whole_and_left_alone_when_not(tmp_path):
    out = tmp_path / "out"
    for text in ("one", "two"):
        with held(out), replaced(out) as folder:
            (folder / "a.txt").write_text(text)
            with pytest.raises(UserError, match="another process is writing it: wait for it"), held(out):
                pass
        assert (out / "a.txt").read_text() == text
    for error in (OSError(errno.ENOSPC, "No space left on device"), ValueError("bug")):
        with pytest.raises((UserError, ValueError)), held(out), replaced(out) as folder:
            (folder / "a.txt").write_text("three")
            raise error
    assert (out / "a.txt").read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_replacement_left_is_finished_or_removed_by_the_next_one(tmp_path, capsys):
    out = tmp_path / "out"
    with held(out), replaced(out) as folder:
        (folder / "a.txt").write_text("one")
    beside(out).mkdir()  # killed while it filled the folder
    with held(out):
        assert [p.name for p in sorted(tmp_path.iterdir())] == [".out.lock", "out"]
    for text in ("one", "two"):  # killed between its two renames, without and with the new folder
        out.rename(set_aside(out))
        if text == "two":
            beside(out).mkdir()
            (beside(out) / "a.txt").write_text(text)
        with held(out):
            assert (out / "a.txt").read_text() == text and not set_aside(out).exists() and not beside(out).exists()
    (said,) = capsys.readouterr().out.splitlines()
    assert "left behind" in said


def test_weights_have_the_mode_of_the_umask(tmp_path):
    from safetensors.torch import save_file

    before = os.umask(0o027)
    try:
        save_file({"a": torch.zeros(2)}, str(tmp_path / "model.safetensors"))
        (tmp_path / "config.json").write_text("{}")
        share(tmp_path)
        assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}
    finally:
        os.umask(before)


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


@pytest.mark.parametrize(("keep", "figures", "kept"), [
    (CheckpointConfig(keep=2), [None] * 4, [3, 4]),
    # newest: 7; best: 2 and 6 (0.9 each); every 4: 4
    (CheckpointConfig(keep=1, keep_best=2, keep_every=4), [0.3, 0.9, 0.1, 0.2, None, 0.9, 0.4], [2, 4, 6, 7]),
    (CheckpointConfig(keep=1, keep_best=1), [0.5, 0.5, None], [2, 3]),  # of equal figures the later is better
])  # fmt: skip
def test_the_newest_the_best_and_every_so_many_steps_stay(tmp_path, keep, figures, kept):
    for step, figure in enumerate(figures, 1):
        sealed(tmp_path, step, figure, keep)
    assert [p.name for p in checkpoints(tmp_path)] == [f"step-{step}" for step in kept]


def test_what_a_kill_left_half_written_goes_with_the_next_save_and_takes_nobodys_place(tmp_path):
    checkpoint(tmp_path, 1)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "half").touch()
    checkpoint(tmp_path, 3, keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-1", "step-3"]


@pytest.mark.parametrize(("step", "seconds", "more", "due"), [
    (5, 599, {}, False), (5, 600, {}, True), (5, 1, {"keep_every": 5}, True), (6, 1, {"keep_every": 5}, False),
    (1, 119, {"first": True}, False), (1, 121, {"first": True}, True), (1, 121, {}, False),  # the first comes early
    (1, 6, {"first": True, "every_seconds": 5.0}, True),
    (1, 601, {"writing": 30.0}, True), (1, 1199, {"writing": 60.0}, False), (1, 1201, {"writing": 60.0}, True),
    (1, 0.1, {"writing": 60.0, "every_seconds": 0.0}, True),  # asked for after each step
])  # fmt: skip
def test_when_a_checkpoint_is_due(step, seconds, more, due):
    """After every_seconds; writing takes at most a twentieth of the time."""
    settings = CheckpointConfig(**{key: more.pop(key) for key in ("keep_every", "every_seconds") if key in more})
    assert checkpoint_due(settings, step, seconds, **more) is due


@pytest.mark.parametrize("keep", [1, 2])
def test_who_goes_back_to_an_earlier_step_does_not_lose_what_is_saved_next(tmp_path, keep):
    checkpoint(tmp_path, 10)
    change_a_byte(checkpoint(tmp_path, 20))
    (tmp_path / "step-30").mkdir()  # torn
    assert newest_checkpoint(SimpleNamespace(checkpoints=tmp_path, say=print, writes=True)) == tmp_path / "step-10"
    checkpoint(tmp_path, 15, keep=keep)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-10", "step-15"][-keep:]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("error", "kind", "told"), [
    (FULL, UserError, r"step-2: cannot write: No space left on device: free .* resumes"),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), UserError, "No space left"),
    (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), UserError, "No space left"),
    (None, UserError, "No space left"), (RuntimeError("shapes differ"), RuntimeError, "shapes differ"),
], ids=["python", "torch", "safetensors", "while sealing", "another error"])  # fmt: skip
def test_a_save_that_fails_keeps_the_checkpoints_before_it(tmp_path, monkeypatch, error, kind, told):
    before = checkpoint(tmp_path, 1)
    if error is None:
        monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))

    def write(path: Path) -> None:
        (path / "half").write_text("x")
        if error is not None:
            raise error

    with pytest.raises(kind, match=told):
        save_checkpoint(tmp_path, 2, write, CheckpointConfig(keep=1))
    assert [*tmp_path.iterdir()] == [before] and is_whole(before)

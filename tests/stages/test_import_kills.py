"""`rlhf import` that is killed, locked out or stopped by a full disk: what it leaves, and what the next one does."""

import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from rlhf.data.reading import load_all
from rlhf.errors import UserError

from .imports import DEMONSTRATION, RANKING, bytes_of, refused, run, write


def start(*arguments: str, **more) -> subprocess.Popen:
    command = [sys.executable, "-m", "rlhf", "import", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def test_a_killed_import_leaves_nothing_that_training_accepts(tmp_path, capsys):
    rows = [RANKING | {"prompt": f"q {i} " + "word " * 200} for i in range(10_000)]
    path, out = write(tmp_path / "labels.jsonl", rows), tmp_path / "out"
    small = write(tmp_path / "small.jsonl", [DEMONSTRATION])
    run(capsys, f"path={small}", f"out={out}")
    before = bytes_of(out)
    child = start(f"path={path}", f"out={out}", "overwrite=true")
    working = tmp_path / ".out.new"
    deadline = time.monotonic() + 60
    while not list(working.glob("unsplit/*.jsonl")):  # in the middle of its writing
        assert child.poll() is None and time.monotonic() < deadline, child.communicate()
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert bytes_of(out) == before, "the old import stands"
    with pytest.raises(UserError):
        load_all(str(working))
    said = run(capsys, f"path={small}", f"out={out}", "overwrite=true")
    assert "which a killed command left behind" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["labels.jsonl", "out", "small.jsonl"]


def test_an_import_killed_between_its_two_renames_is_restored(tmp_path, capsys):
    path, out = write(tmp_path / "labels.jsonl", [DEMONSTRATION]), tmp_path / "out"
    run(capsys, f"path={path}", f"out={out}")
    before = bytes_of(out)
    out.rename(tmp_path / ".out.old")
    line, said = refused(capsys, f"path={path}", f"out={out}")
    assert "restored" in said and "exists" in line and bytes_of(out) == before
    shutil.copytree(out, tmp_path / ".out.old")  # killed just after the second rename
    run(capsys, f"path={path}", f"out={out}", "overwrite=true")
    assert not (tmp_path / ".out.old").exists()


def test_a_full_disk_is_one_line(tmp_path, capsys):
    """A limit on the size of files stands for the disk: the system refuses the write half-way in the same manner."""
    rows = [RANKING | {"prompt": f"q {i} " + "word " * 200} for i in range(2000)]
    path = write(tmp_path / "labels.jsonl", rows)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        line, _ = refused(capsys, f"path={path}", f"out={tmp_path / 'out'}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write: File too large: raise the limit on the size of files" in line
    assert [p.name for p in tmp_path.iterdir()] == ["labels.jsonl"]

"""Files: written whole or not at all, hashed, and read as nothing where they are damaged."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf.errors import UserError
from rlhf.runs.folders import read_record
from rlhf.system.files import beside, hash_files, held, read_json, replaced, set_aside, sha256_file, share, write_json


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


@pytest.mark.parametrize(
    "content", [b"", b'{"a": 1', b"\xff\xfe", b"[1] 2", b"[" * 100_000], ids=["empty", "torn", "utf8", "two", "deep"]
)
def test_damaged_json_reads_as_nothing(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    assert read_json(tmp_path / "a.json") == {}


def test_hashes_are_sha256_by_relative_path(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"abc")
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "skipped").write_bytes(b"1")
    assert hash_files(tmp_path, skip=("skipped",)) == {  # the test vectors of FIPS 180-2
        "a": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "b/x": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.gguf", Path("/dev/zero"), tmp_path / "link"):
        for read in (sha256_file, read_json, lambda path: read_record(path, "stage")):
            with pytest.raises(UserError, match="not a regular file"):
                read(path)
    assert hash_files(tmp_path) == {}


def test_a_folder_is_replaced_when_it_is_whole_and_left_alone_when_not(tmp_path):
    out = tmp_path / "out"
    for text in ("one", "two"):
        with held(out), replaced(out) as folder:
            (folder / "a.txt").write_text(text)
        assert (out / "a.txt").read_text() == text
    for error in (OSError(errno.ENOSPC, "No space left on device"), ValueError("bug")):
        with pytest.raises((UserError, ValueError)), held(out), replaced(out) as folder:
            (folder / "a.txt").write_text("three")
            raise error
    assert (out / "a.txt").read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_replacement_left_is_undone_or_removed_by_the_next_one(tmp_path, capsys):
    out = tmp_path / "out"
    with held(out), replaced(out) as folder:
        (folder / "a.txt").write_text("one")
    beside(out).mkdir()  # killed while it filled the folder
    with held(out):
        assert [p.name for p in sorted(tmp_path.iterdir())] == [".out.lock", "out"]
    out.rename(set_aside(out))  # killed between its two renames
    beside(out).mkdir()
    with held(out):
        assert (out / "a.txt").read_text() == "one" and not set_aside(out).exists()
    said = capsys.readouterr().out.splitlines()
    assert ["restored" in line for line in said] == [False, True, False] and "left behind" in said[0]


def test_two_processes_do_not_write_one_place(tmp_path):
    with held(tmp_path / "out"):
        with pytest.raises(UserError, match="another process is writing it: wait for it"), held(tmp_path / "out"):
            pass
        with held(tmp_path / "other"):
            pass
    with held(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_half_written_file(tmp_path):
    """RLIMIT_FSIZE stands in for the full disk: a write past it gives EFBIG."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from rlhf.system.files import write_text\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_text(Path(sys.argv[1]) / 'report.html', 'x' * 5000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "UserError" in done.stderr and "report.html: cannot write: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


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

"""Files: written whole or not at all, hashed, and read as nothing where they are damaged."""

import errno
import os

import pytest

from rlhf.errors import UserError
from rlhf.files import hash_files, read_json, write_json


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


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe", b"[1] 2"])
def test_damaged_json_reads_as_nothing(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    assert read_json(tmp_path / "a.json") is None


def test_missing_json_reads_as_nothing(tmp_path):
    (tmp_path / "file").touch()
    assert read_json(tmp_path / "none.json") is read_json(tmp_path / "file" / "a.json") is None


def test_hashes_are_sha256_by_relative_path(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"abc")
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "skipped").write_bytes(b"1")
    assert hash_files(tmp_path, skip=("skipped",)) == {  # the test vectors of FIPS 180-2
        "a": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "b/x": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }

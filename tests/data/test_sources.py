"""Which files a setting names: hostile names and folders, and links."""

import os
import socket

import pytest

from rlhf.data.inputs import RECORD_SUFFIXES, ROW_SUFFIXES, Source, is_import, resolve_sources
from rlhf.data.reading import read_rows
from rlhf.data.storage import seal
from rlhf.errors import UserError

PAIRS = [{"prompt": "Why?", "chosen": "So.", "rejected": "No."}, {"prompt": "Who?", "chosen": "I.", "rejected": "U."}]


def names(given, imports=False) -> list[str]:
    return [source.name for source in resolve_sources(given, RECORD_SUFFIXES, imports)]


@pytest.mark.parametrize(
    "given", ["./labels", "../a/b", "data/labels.csv", "data/labels.txt", "data/labels.gz", "a/b/c", "/a/b", "~/b", "a"]
)
def test_what_looks_like_a_path_is_never_a_hub_id(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{given}: no such file or folder: want"):
        resolve_sources(given, RECORD_SUFFIXES)


@pytest.mark.parametrize("given", ["owner/name", "Owner-1/some_data-v1.1", "a.b/c"])
def test_owner_and_name_is_a_hub_id(given):
    [source] = resolve_sources(given, RECORD_SUFFIXES)
    assert (source.name, source.path) == (given, None)


@pytest.mark.parametrize("given", ["a" * 300, "./" + "a/" * 3000, "a\0b"])
def test_a_name_that_no_system_takes_is_refused_in_one_line(given):
    with pytest.raises(UserError, match=r"^[^\n]{1,400}$"):
        resolve_sources(given, RECORD_SUFFIXES)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_folder_with_a_pipe_or_socket_among_its_data_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    if kind == "pipe":
        os.mkfifo("b.jsonl")
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind("b.jsonl")
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"b.jsonl: not a regular file .a pipe, socket or device."):
        names(str(tmp_path))


def test_a_pipe_in_the_place_of_a_manifest_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "dataset.json")
    assert not is_import(tmp_path)


def test_a_link_out_of_a_folder_is_not_followed(tmp_path):
    secret, folder = tmp_path / "other" / "secret.jsonl", tmp_path / "in"
    secret.parent.mkdir()
    secret.write_text("{}")
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.jsonl").write_text("{}")
    (folder / "b.jsonl").symlink_to(folder / "sub" / "a.jsonl")
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "notes").symlink_to(tmp_path / "other" / "nothing there")
    assert names(str(folder)) == [str(folder / "b.jsonl"), str(folder / "sub" / "a.jsonl")]
    (tmp_path / "link").symlink_to(folder)
    assert len(names(str(tmp_path / "link"))) == 2  # a link that the user names
    for target in (secret, secret.parent, tmp_path / "missing.jsonl"):
        link = folder / "sub" / "c.jsonl"
        link.symlink_to(target)
        with pytest.raises(UserError, match=r"sub/c.jsonl: is a link out of the folder or to nothing"):
            names(str(folder))
        link.unlink()
    link.symlink_to(folder / "missing.jsonl")
    with pytest.raises(UserError, match=r"c.jsonl: is a link out of the folder or to nothing"):
        names(str(folder))


@pytest.mark.parametrize("what", ["folder", "file", "parent"])
def test_no_permission_is_one_line(tmp_path, what):
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "a.jsonl"
    path.write_text("{}")
    for above in tmp_path.parents:
        if os.stat(above).st_uid == 0 and above.name.startswith("pytest"):
            above.chmod(0o755)
    tmp_path.chmod(0o755)
    (path if what == "file" else folder).chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # whom permissions bind
    try:
        with pytest.raises(UserError, match=r"^[^\n]*: cannot be read .Permission denied.$"):
            for source in resolve_sources(str(path if what == "parent" else folder), RECORD_SUFFIXES):
                list(read_rows(source))
    finally:
        if user == 0:
            os.seteuid(0)
        folder.chmod(0o755)  # else pytest cannot remove it


def test_what_is_an_import_already_is_not_imported_again(tmp_path):
    (tmp_path / "in" / "out").mkdir(parents=True)
    (tmp_path / "in" / "out" / "rejects.jsonl").write_text("{}\n")
    (tmp_path / "in" / "a.jsonl").write_text("{}\n")
    seal(tmp_path / "in" / "out", "complete", {})
    found = resolve_sources(str(tmp_path / "in"), ROW_SUFFIXES)
    assert found == [Source(str(tmp_path / "in" / "a.jsonl"), tmp_path / "in" / "a.jsonl")]
    with pytest.raises(UserError, match="is an import already"):
        resolve_sources(str(tmp_path / "in" / "out"), ROW_SUFFIXES)

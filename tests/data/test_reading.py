"""Files as rows: a bad line is a reject, a damaged file is refused with its place; which files a setting names."""

import csv
import datetime
import gzip
import json
import os
import socket

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from rlhf.data import rows as module
from rlhf.data.inputs import RECORD_SUFFIXES, ROW_SUFFIXES, Source, resolve_sources
from rlhf.data.reading import load_all
from rlhf.data.rows import read_rows
from rlhf.data.storage import is_import, seal
from rlhf.errors import UserError
from tests.data import sheets


@pytest.fixture
def read(tmp_path):
    """The rows of a file with these bytes, and its note: `read(content, name)`."""

    def run(content, name, **more):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return list(read_rows(Source(name, path, **more)))

    return run


def values(rows):
    assert not any(row.problem for row in rows), rows
    return [row.value for row in rows]


@pytest.mark.parametrize(("line", "said"), [
    (b"{", "not JSON"), (b"[1, 2]", "got [1, 2], want an object"), (b'{"a": 1} {"b": 2}', "not JSON (Extra data"),
    (b'{"a": "\xff"}', "byte 0xff is not UTF-8"), (b'{"a": NaN}', "got NaN, which JSON has not"),
    (b'{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' appears twice in one object"),
    (b'{"a": "\\ud800"}', "lone surrogate"), (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "nested too deeply"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
])  # fmt: skip
def test_a_bad_line_is_a_reject_and_the_next_is_read(read, line, said):
    first, bad, last = read(b'\xef\xbb\xbf{"n": 1}\r\n\n' + line + b'\n{"n": 2}', "a.jsonl")
    assert (first.value, last.value, last.line) == ({"n": 1}, {"n": 2}, 4)
    assert said in bad.problem and (bad.line, bad.raw) == (3, line)


def test_a_line_that_is_too_long_is_skipped(read, monkeypatch):
    monkeypatch.setattr(module, "MAX_RECORD_BYTES", 50)
    bad, good = read(b'{"a": "' + b"x" * 60 + b'"}\n{"n": 2}\n', "a.jsonl")
    assert bad.problem == "got a longer line, want one of at most 0 MB" and good.value == {"n": 2}
    assert good.line == 2


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_gives_its_objects_and_rejects_what_is_none(read, indent):
    items = [{"a": 1, "b": [0.5, None, {"c": "é"}]}, 3, "x", {"a": -2}]
    rows = read("\ufeff" + json.dumps(items, indent=indent), "a.json")
    assert [row.number for row in rows] == [1, 2, 3, 4] and values([rows[0], rows[3]]) == [items[0], items[3]]
    assert [row.problem for row in rows[1:3]] == ["got 3, want an object {…}", "got 'x', want an object {…}"]
    assert read("[]", "a.json") == [] and read("", "a.json") == []
    [bad, good] = read(b'[{"a": "\xff"}, {"a": 2}]', "a.json")
    assert bad.problem.startswith("byte 0xff is not UTF-8") and bad.original() == b'{"a": "\\udcff"}'
    assert good.value == {"a": 2}


def test_a_json_file_can_hold_lines_or_one_object(read):
    assert values(read('{"a": 1}\n{"a": 2}\n', "a.json")) == [{"a": 1}, {"a": 2}]
    assert values(read('{"a":\n 1}', "a.json")) == [{"a": 1}]
    bad, good = read('{"a": 1, "a": NaN}\n{"a": 2}\n', "a.json")
    assert bad.problem and bad.original() == b'{"a": 1, "a": NaN}' and good.value == {"a": 2}


@pytest.mark.parametrize("end", ["", ', {"a": ', ', {"a": NaN}]', ' {"a": 2}]', "] x"])
def test_a_damaged_array_is_refused_with_its_place(read, end):
    with pytest.raises(UserError, match=r"^a\.json: damaged JSON \("):
        read('[{"a": 1}, {"a": 2}' + end, "a.json")


def test_an_array_that_is_too_deep_or_too_long_is_refused(read, monkeypatch):
    for levels in (500, 100_000):
        with pytest.raises(UserError, match=r"a\.json: damaged JSON \(nested too deeply"):
            read('[{"a": 1}, {"a": ' + "[" * levels + "]" * levels + "}]", "a.json")
    monkeypatch.setattr(module, "MAX_ARRAY_BYTES", 10)
    with pytest.raises(UserError, match=r"a\.json: above 0 MB: write it as JSON Lines"):
        read('[{"a": 1}, {"a": 2}]', "a.json")


@pytest.mark.parametrize(("content", "name", "note"), [
    ('q,a\n"1, or 2",\n', "a.csv", "columns divided by a comma"),
    ('q;a\n"1, or 2";\n', "a.csv", "columns divided by a semicolon"),
    ("q\ta\n1, or 2\t\n", "a.tsv", "columns divided by a tab"),
])  # fmt: skip
def test_delimiters(tmp_path, content, name, note):
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    source = Source(name, tmp_path / name)
    assert values(list(read_rows(source))) == [{"q": "1, or 2", "a": None}]
    assert source.note == note


@pytest.mark.parametrize(("bad", "said"), [
    (b"x", "got 1 cells, want 2 as in the header"), (b'"a"b,c', "not CSV"),
    (b"caf\xe9,x", "byte 0xe9 is not utf-8 text: set encoding=cp1252"),
])  # fmt: skip
def test_a_bad_record_is_a_reject_and_the_next_is_read(read, bad, said):
    rows = read(b'q,a\n"two\nlines",x\n' + bad + b"\n3,y\n\n4,z\n", "a.csv")
    reject = next(row for row in rows if row.problem)
    assert said in reject.problem and (reject.line, reject.number, reject.raw.rstrip()) == (4, 2, bad)
    assert values([row for row in rows if row is not reject]) == [
        {"q": "two\nlines", "a": "x"}, {"q": "3", "a": "y"}, {"q": "4", "a": "z"},
    ]  # fmt: skip
    assert [row.line for row in rows] == [2, 4, 5, 7]


def test_encodings_and_packed_files(read):
    assert values(read("q\né\n".encode("cp1252"), "a.csv", encoding="cp1252")) == [{"q": "é"}]
    assert values(read("q\né\n".encode("utf-16"), "a.csv", encoding="utf-16")) == [{"q": "é"}]
    for pack, name in ((gzip.compress, "a.csv.gz"), (zstandard.compress, "a.csv.zst")):
        packed = pack(b"q\n" + b"word\n" * 30_000)
        assert len(read(packed, name)) == 30_000
        with pytest.raises(UserError, match=r"damaged \.(gz|zst) file"):
            read(packed[:-9], name)


def test_tables_of_columns_become_rows_and_damage_is_refused(tmp_path, read):
    path, day = tmp_path / "a.parquet", datetime.datetime(2026, 5, 1, 10)
    typed = pa.table({"n": [1, None], "x": [float("nan"), 0.5], "t": [day, None], "l": [[{"a": "é"}], []]})
    parquet.write_table(typed, path)
    first, second = values(read(None, path.name))
    assert first == {"n": 1, "x": None, "t": "2026-05-01T10:00:00", "l": [{"a": "é"}]} and second["x"] == 0.5
    with pytest.raises(UserError, match=r"a\.parquet: damaged \.parquet file \("):
        read(path.read_bytes()[:-20], path.name)


def write_sheet(path, *lines):
    made = [
        sheets.row(n, *(sheets.text(f"{column}{n}", value) for column, value in zip("ABC", line, strict=False)))
        for n, line in enumerate(lines, 1)
    ]
    sheets.write_xlsx(path, {"First": "".join(made), "Other": sheets.row(1, sheets.text("A1", "only"))})


def test_a_spreadsheet_gives_the_rows_under_its_header(tmp_path, read):
    write_sheet(tmp_path / "a.xlsx", ("q", "a"), ("1", "x"), (), ("2",))
    rows = read(None, "a.xlsx")
    assert values(rows) == [{"q": "1", "a": "x"}, {"q": "2", "a": None}]
    assert [(row.line, row.number) for row in rows] == [(2, 1), (4, 2)]  # an empty line is no row
    assert read(None, "a.xlsx", sheet="Other") == []
    with pytest.raises(UserError, match=r"sheet=Nope: a\.xlsx has no such sheet: it has First, Other"):
        read(None, "a.xlsx", sheet="Nope")


def test_a_spreadsheet_that_is_damaged_or_too_large_is_refused(tmp_path, read, monkeypatch):
    write_sheet(tmp_path / "a.xlsx", ("q", "a"), ("1", "x"))
    content = (tmp_path / "a.xlsx").read_bytes()
    with pytest.raises(UserError, match=r"b\.xlsx: damaged, or protected"):
        read(content[:-40], "b.xlsx")
    with pytest.raises(UserError, match=r"c\.xlsx: damaged, or protected by a password"):
        read(b"\xd0\xcf\x11\xe0" + bytes(600), "c.xlsx")
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(UserError, match=r"a\.xlsx: unpacks to more than 0 MB"):
        read(None, "a.xlsx")
    monkeypatch.undo()
    far = sheets.row(1, sheets.text("A1", "q")) + sheets.row(1_048_576, sheets.text("XFD1048576", "x"))
    sheets.write_xlsx(tmp_path / "far.xlsx", {"S": far})
    with pytest.raises(UserError, match=r"a sheet spans 17,179,869,184 cells, above 20,000,000: delete"):
        read(None, "far.xlsx")


PAIRS = [{"prompt": "Why?", "chosen": "So.", "rejected": "No."}, {"prompt": "Who?", "chosen": "I.", "rejected": "U."}]


def names(given, imports=False) -> list[str]:
    return [source.name for source in resolve_sources(given, RECORD_SUFFIXES, imports)]


def test_owner_and_name_is_a_hub_id_and_what_looks_like_a_path_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("./labels", "../a/b", "data/a.csv", "data/a.txt", "data/a.gz", "a/b/c", "/a/b", "~/b", "a"):
        with pytest.raises(UserError, match=f"^{given}: no such file or folder: want"):
            resolve_sources(given, RECORD_SUFFIXES)
    for given in ("owner/name", "Owner-1/some_data-v1.1", "a.b/c"):
        [source] = resolve_sources(given, RECORD_SUFFIXES)
        assert (source.name, source.path) == (given, None)


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


def test_a_pipe_is_not_waited_for_and_a_link_out_of_a_folder_not_followed(tmp_path):
    os.mkfifo(tmp_path / "dataset.json")
    assert not is_import(tmp_path)
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


def test_what_is_an_import_already_is_not_imported_again(tmp_path):
    (tmp_path / "in" / "out").mkdir(parents=True)
    (tmp_path / "in" / "out" / "rejects.jsonl").write_text("{}\n")
    (tmp_path / "in" / "a.jsonl").write_text("{}\n")
    seal(tmp_path / "in" / "out", "complete", {})
    found = resolve_sources(str(tmp_path / "in"), ROW_SUFFIXES)
    assert found == [Source(str(tmp_path / "in" / "a.jsonl"), tmp_path / "in" / "a.jsonl")]
    with pytest.raises(UserError, match="is an import already"):
        resolve_sources(str(tmp_path / "in" / "out"), ROW_SUFFIXES)


@pytest.mark.parametrize("encoding", ["utf-8", "utf8", "UTF-8"])
def test_a_byte_order_mark_is_no_part_of_the_first_columns_name(tmp_path, imported, encoding):
    path = tmp_path / "a.csv"
    path.write_text("\ufeffprompt,chosen,rejected\nName a colour.,The colour is blue.,A dog.\n", encoding="utf-8")
    [record], rejects, _ = imported(path, f"encoding={encoding}")
    assert record.prompt[0].content == "Name a colour." and not rejects


def test_lines_in_a_json_file_may_be_long(tmp_path, imported):
    rows = [{"prompt": "p " * 40_000 * one + f"{one}?", "chosen": "a", "rejected": "b"} for one in (1, 0)]
    path = tmp_path / "a.json"
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    assert imported(path)[2]["counts"]["accepted"] == 2


def test_a_correction_counts_in_an_array_too(tmp_path, imported):
    first = {"kind": "ranking", "id": "a", "prompt": "p", "labeler": "kim", "ranking": [["a"], ["b"]],
             "responses": [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]}  # fmt: skip
    again = first | {"id": "b", "ranking": [["b"], ["a"]], "metadata": {"replaces": "a"}}
    path = tmp_path / "a.json"
    path.write_text(json.dumps([first, again], indent=1))
    [record], _, report = imported(path)
    assert record.ranking == [["b"], ["a"]] and report["counts"]["filtered"] == 1


def test_text_of_a_csv_is_a_flag_or_a_chat(tmp_path, imported):
    path = tmp_path / "kto.csv"
    path.write_text("prompt,completion,label\np,good,True\nq,bad,false\n")
    assert [list(record.ratings.values()) for record in imported(path)[0]] == [[7], [1]]
    chats = {
        key: json.dumps([{"role": "user", "content": "p"}, {"role": "assistant", "content": key}])
        for key in ("chosen", "rejected")
    }
    path = tmp_path / "trl.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([chats, chats.values()])
    [record] = imported(path, "overwrite=true")[0]
    assert [response.text for response in record.responses] == ["chosen", "rejected"]


@pytest.mark.parametrize(("row", "prompt", "ranking"), [
    ({"system": "Be brief.", "input": "Write a haiku.", "chosen": "Sure, cats.", "rejected": "Sure, dogs."},
     ["Be brief.", "Write a haiku."], [["a"], ["b"]]),
    ({"system": "Be Bob.", "prompt": "Who are you?", "chosen": "Bob.", "rejected": "An AI."}, ["Be Bob.", "Who are you?"],
     [["a"], ["b"]]),
    ({"prompt": "p", "chosen": "x", "rejected": "y", "score_chosen": 7.0, "score_rejected": 7.0}, ["p"], [["a", "b"]]),
    ({"input": "p", "chosen": "x", "rejected": "y", "status": "tie"}, ["p"], [["a", "b"]]),
])  # fmt: skip
def test_a_preference_keeps_its_system_text_its_request_and_its_tie(write_jsonl, imported, row, prompt, ranking):
    [record] = imported(write_jsonl([row]))[0]
    assert [turn.content for turn in record.prompt] == prompt and record.ranking == ranking


def test_a_demonstration_in_messages_keeps_a_rows_system_text_unless_the_turns_have_one(write_jsonl, imported):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [
        {"system": "S", "messages": turns},
        {"system": "S", "messages": [{"role": "system", "content": "T"}, *turns]},
    ]
    assert [record.prompt[0].content for record in imported(write_jsonl(rows))[0]] == ["S", "T"]


def test_a_null_part_is_no_word(write_jsonl, imported):
    part = {"type": "text", "text": None}
    rows = [{"messages": [{"role": "user", "content": [part | {"value": "hello"}]}, {"role": "assistant", "content": "x"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [part]}]}]  # fmt: skip
    [record], rejects, _ = imported(write_jsonl(rows))
    assert record.prompt[0].content == "hello" and len(rejects) == 1


def test_verdicts_that_count_from_0_are_refused(write_jsonl, imported):
    rows = [{"q": "?", "m0": "x", "m1": "y", "winner": said} for said in ("model_1", "model_0", "model_1", "tie")]
    columns = ["format=table", "columns.prompt=q", "columns.responses=[m0,m1]", "columns.winner=winner"]
    with pytest.raises(UserError, match=r"say what each means"):
        imported(write_jsonl(rows), *columns)


def test_answers_named_in_another_order_than_their_letters_are_refused(write_jsonl, imported):
    columns = ["format=table", "columns.prompt=q", "columns.responses=[answer_b,answer_a]", "columns.winner=w"]
    with pytest.raises(UserError, match="want the order answer_a, answer_b"):
        imported(write_jsonl([{"q": "?", "answer_b": "x", "answer_a": "y", "w": "A"}]), *columns)


@pytest.mark.parametrize(("row", "proposed"), [
    ({"post_id": "ab0", "upvote_ratio": 0.9, "human_ref_A": "x"}, "columns.prompt=…"),
    ({"prompt": "p", "prompt_source": "web", "response_0": "x", "response_0_sha256": "f", "response_1": "y", "better": 1},
     r"columns.prompt=prompt columns.responses='\[response_0,response_1\]'"),
    ({"instruction": "p", "input": "q", "a_is_answer": "yes", "answer_a": "x", "answer_b": "y", "annotator": "z", "preference": "a"},
     r"columns.prompt='\[instruction,input\]' columns.responses='\[answer_a,answer_b\]' columns.winner=preference"),
])  # fmt: skip
def test_columns_that_are_not_a_prompt_are_not_proposed_as_one(write_jsonl, row, proposed):
    with pytest.raises(UserError, match=proposed):
        load_all(write_jsonl([row]))

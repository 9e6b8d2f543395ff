import codecs
import gzip
import json

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.reading import readers
from rlhf.data.reading.readers import Reject, Row, read_text
from rlhf.data.reading.rows import read_rows
from rlhf.data.reading.sources import ROW_SUFFIXES, TEXT_SUFFIXES, Source, resolve_sources
from rlhf.errors import UserError

BOTH = (*TEXT_SUFFIXES, *ROW_SUFFIXES)


def rows(path) -> list[Row | Reject]:
    """Rows and rejects without their places, which `places` checks."""
    return [plain(item) for item in read_rows(Source(path.name, path))]


def plain(item: Row | Reject) -> Row | Reject:
    if isinstance(item, Row):
        return Row(item.line, item.value)
    return Reject(item.file, item.line, item.field, item.message)


def values(path) -> list:
    return [row.value if isinstance(row, Row) else row.message for row in rows(path)]


def test_lines_keep_their_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + '{"a": "é"}\r\n\n  \n{"a": 2}'.encode())
    assert rows(path) == [Row(1, {"a": "é"}), Row(4, {"a": 2})]


@pytest.mark.parametrize("form", ["plain", "gz", "zst", "zst in two frames"])
def test_packed_files_read_the_same(tmp_path, form):
    raw = b"".join(json.dumps({"n": n, "x": "y" * 300}).encode() + b"\n" for n in range(500))
    pack = zstandard.ZstdCompressor().compress
    half = len(raw) // 2
    suffix = {"plain": "", "gz": ".gz"}.get(form, ".zst")
    packed = {"plain": raw, "gz": gzip.compress(raw), "zst": pack(raw)}.get(form, pack(raw[:half]) + pack(raw[half:]))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    assert [row.value["n"] for row in rows(path)] == list(range(500))
    if suffix:
        path.write_bytes(packed[:-20])
        with pytest.raises(UserError, match=rf"a.jsonl{suffix}: damaged {suffix} file"):
            rows(path)
        path.write_bytes(b"not packed at all")
        with pytest.raises(UserError, match="damaged"):
            rows(path)


DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b'{"a": 1} {"a": 2}', "got text after the object, want one object per line"),
        (b"[1]", "got a list, want an object {…}"),
        (b"3", "got a number, want an object {…}"),
        (b'{"a": NaN}', "got NaN, which JSON has not: want a number or null"),
        (b'{"a": {"b": 1, "b": 2}}', 'key "b" appears twice in one object: keep one'),
        (b'{"a": "\\ud83d x"}', "got a lone surrogate (half of a character), want text that UTF-8 can hold"),
        (b'{"a": "\xe9"}', "byte 0xe9 at offset 19 is not UTF-8: save the file as UTF-8"),
        (DEEP.encode(), "nested too deeply"),
        (b'{"a": "' + b"x" * 2000 + b'"}', "got a line above 0 MB, want a shorter one"),
    ],
)
def test_a_bad_line_does_not_stop_the_good_ones(tmp_path, monkeypatch, line, message):
    if b"x" * 2000 in line:
        monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"ok": 1}\n\n' + b" " + line + b'\n{"ok": "\\ud83d\\ude00"}\n')
    first, bad, last = rows(path)
    assert (first, last) == (Row(1, {"ok": 1}), Row(4, {"ok": "😀"}))
    assert isinstance(bad, Reject) and message in str(bad) and str(bad).startswith("a.jsonl:3: ")


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_an_array_streams_with_line_numbers(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(readers, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text('\n[{"a":\n 1}\n, {"b": "]é\\u20ac,"},\n\n 3, {"a": {}, "a": 2},\n{"c": [1, {}]}\n]\n', "utf-8")
    assert rows(path) == [
        Row(2, {"a": 1}),
        Row(4, {"b": "]é€,"}),
        Reject("a.json", 6, "", "got a number, want an object {…}"),
        Reject("a.json", 6, "", 'key "a" appears twice in one object: keep one'),
        Row(7, {"c": [1, {}]}),
    ]


def test_json_may_hold_one_object_or_several(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{\n "a": 1\n}\n{"a": 2}\n')
    assert rows(path) == [Row(1, {"a": 1}), Row(4, {"a": 2})]
    path.write_text("[]")
    assert rows(path) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('[{"a": 1},\n{"a": 2}\n', "a.json:3: the array does not end: the file was cut off, copy it again"),
        ('[{"a": 1},\n{"a": \n', "a.json:3: not JSON (Expecting value): want an array of objects"),
        ('[{"a": 1},\nnonsense]', "a.json:2: not JSON (Expecting value): want an array of objects"),
        (
            '[{"a": 1},\n' + DEEP + "]",
            "a.json:2: not JSON (nested too deeply, more than 400 levels): want an array of objects",
        ),
    ],
)
def test_a_damaged_array_keeps_what_came_before(tmp_path, text, where):
    path = tmp_path / "a.json"
    path.write_text(text)
    first, *_, bad = rows(path)
    assert first == Row(1, {"a": 1}) and str(bad) == where


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab{[\\"', max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(st.text("xyz", max_size=2), json_values, max_size=3), max_size=4),
    st.sampled_from([None, 2]),
    st.integers(1, 40),
)
def test_any_array_reads_as_the_json_module_reads_it(tmp_path_factory, objects, indent, chunk):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(objects, indent=indent), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_CHUNK", chunk)
        assert values(path) == objects


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 16])
def test_text_is_decoded_across_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(readers, "_CHUNK", max(chunk, 3))  # a BOM comes in one piece
    path = tmp_path / "a.txt"
    path.write_bytes(codecs.BOM_UTF8 + "é€😀\r\nline\rend".encode())
    assert "".join(read_text(path)) == "é€😀\nline\nend"
    path.write_bytes("né".encode("latin-1") + b"!")
    assert "".join(read_text(path, "latin-1")) == "né!"
    path.write_bytes("naïve".encode("utf-16"))
    assert "".join(read_text(path, "utf-16")) == "naïve"


@pytest.mark.parametrize("chunk", [3, 4, 5, 1 << 16])
@pytest.mark.parametrize("bom", [b"", codecs.BOM_UTF8])
def test_an_undecodable_byte_is_named_with_its_offset(tmp_path, monkeypatch, chunk, bom):
    monkeypatch.setattr(readers, "_CHUNK", chunk)
    path = tmp_path / "a.txt"
    path.write_bytes(bom + "ab€c".encode() + b"\xe9t\xe9")
    with pytest.raises(UserError) as caught:
        list(read_text(path))
    assert str(caught.value) == (
        f"{path}: byte 0xe9 at offset {len(bom) + 6} is not utf-8 text: "
        "set data.encoding=latin-1 (or cp1252, …), or convert the file with iconv"
    )
    with pytest.raises(UserError, match=r"data.encoding=latin-15000: no such encoding"):
        list(read_text(path, "latin-15000"))


def test_a_folder_means_its_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.json.gz", "sub/c.txt", "README.md", ".hidden/d.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    found = resolve_sources(str(tmp_path), BOTH)
    assert [source.name for source in found] == [str(tmp_path / n) for n in ("a.json.gz", "b.jsonl", "sub/c.txt")]
    assert [source.is_text for source in found] == [False, False, True]
    several = resolve_sources([tmp_path / "b.jsonl", str(tmp_path)], ROW_SUFFIXES)
    assert [source.name[len(str(tmp_path)) :] for source in several] == ["/b.jsonl", "/a.json.gz", "/b.jsonl"]
    assert resolve_sources("owner/name", BOTH) == [Source("owner/name", None)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "no data given"),
        ("missing.jsonl", "missing.jsonl: no such file or folder"),
        ("folder/missing.jsonl", "folder/missing.jsonl: no such file or folder"),
        ("a/b/c", "a/b/c: no such file or folder"),
    ],
)
def test_what_is_missing_is_named(given, message):
    with pytest.raises(UserError, match=message):
        resolve_sources(given, BOTH)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(UserError, match=r"a.xlsx: got a file of another kind, want .txt, .jsonl, .json"):
        resolve_sources(tmp_path / "a.xlsx", BOTH)
    with pytest.raises(UserError, match="the folder has no file to read"):
        resolve_sources(tmp_path, BOTH)


def test_a_hub_data_set_is_read_from_its_training_split(monkeypatch):
    monkeypatch.setattr(
        "rlhf.data.reading.rows._load_hub", lambda name: {"test": [{"a": 0}], "train": [{"a": 1}, {"a": 2}]}
    )
    assert list(read_rows(Source("owner/name", None))) == [Row(1, {"a": 1}, 1), Row(2, {"a": 2}, 2)]


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, capfd):
    import datasets
    import huggingface_hub

    nobody = "http://127.0.0.1:9"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nobody)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", nobody)
    with pytest.raises(
        UserError, match=r"owner/name: no such file or folder; taken for a hub id, but .*reach.*: check"
    ):
        list(read_rows(Source("owner/name", None)))
    err = capfd.readouterr().err
    assert err.startswith("rlhf: owner/name: no such file or folder: taken for a hub id") and "Retrying" not in err
    assert not datasets.config.HF_HUB_OFFLINE or huggingface_hub.constants.HF_HUB_OFFLINE

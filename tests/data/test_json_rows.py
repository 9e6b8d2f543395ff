"""Where rows stand in their files, what becomes of broken ones, and that no byte of a line or array is lost."""

import codecs
import hashlib
import io
import json
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.reading import json_rows, readers
from rlhf.data.reading.json_rows import line_blocks, parse_block, read_json_lines, read_json_values
from rlhf.data.reading.readers import Reject, Row


def lines(raw: bytes) -> list[Row | Reject]:
    return list(read_json_lines(io.BytesIO(raw), "f"))


def array(raw: bytes) -> list[Row | Reject]:
    return list(read_json_values(io.BytesIO(raw), "f"))


def test_a_line_knows_its_place_and_its_bytes():
    raw = codecs.BOM_UTF8 + '{"a": "é"}\r\n\n{oops\n\n{"a": 2}'.encode()
    good, bad, last = lines(raw)
    assert (good.line, good.number, good.offset, good.raw) == (1, 1, 3, '{"a": "é"}\r'.encode())
    assert (bad.line, bad.number, bad.offset, bad.raw) == (3, 3, 17, b"{oops")
    assert (last.line, last.number, last.offset) == (5, 5, 24) and raw[24:] == last.raw


def test_an_object_of_an_array_knows_its_place_and_its_bytes():
    raw = codecs.BOM_UTF8 + '[{"a": "é"}, {"b":\n 1},\r\n3, {"c": 1}\n]'.encode()
    found = array(raw)
    assert [(one.line, one.number) for one in found] == [(1, 1), (1, 2), (3, 3), (3, 4)]
    for one, text in zip(found, ['{"a": "é"}', '{"b":\n 1}', "3", '{"c": 1}'], strict=True):
        assert one.raw == text.encode() and raw[one.offset :].startswith(one.raw)


BROKEN = [
    (b"{'a': 1}", "not JSON (Expecting property name"),
    (b'{"a": 1,}', "not JSON ("),
    (b'{"a": [1, 2}', "not JSON ("),
    (b'{"a": {"b": nope}, "s": "} ] , \\" {"}', "not JSON (Expecting value"),
    (b"nonsense", "not JSON (Expecting value"),
    (b'{"a": "two\nlines, } and {"}', "not JSON (Invalid control character"),
    (b'{"a": NaN}', "got NaN, which JSON has not"),
    (b'{"a": "caf\xe9"}', "byte 0xe9 at offset "),
    (b"\xff\xfe{}", "byte 0xff at offset "),
    (b'{"a": "\x00"}', "not JSON (Invalid control character"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not JSON (Exceeds the limit"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN)
@pytest.mark.parametrize("chunk", [1, 50, 1 << 16])
def test_an_array_goes_on_behind_a_broken_object(monkeypatch, broken, message, chunk):
    if chunk < 50 and len(broken) > 1000:
        return  # character by character this takes long, and shows nothing more
    monkeypatch.setattr(readers, "_CHUNK", chunk)
    raw = b'[{"ok": 1},\n ' + broken + b' , {"ok": 2}]'
    found = array(raw)
    assert [one.value for one in found if isinstance(one, Row)] == [{"ok": 1}, {"ok": 2}]
    [bad] = [one for one in found if isinstance(one, Reject)]
    assert message in bad.message and bad.line == 2 and bad.number == 2
    assert raw[bad.offset :].startswith(broken) and bad.raw.strip() == broken
    if "offset" in message:
        at = int(bad.message.split("offset ")[1].split()[0])
        assert raw[at] == int(bad.message[7:9], 16)


def test_a_string_that_never_ends_takes_only_its_line_along():
    found = array(b'[\n  {"ok": 1},\n  {"a": "unfinished},\n  {"ok": 2},\n  {"b": [{},\n  {"ok": 3}\n]')
    assert [one.value if isinstance(one, Row) else one.line for one in found] == [{"ok": 1}, 3, {"ok": 2}, 7, {"ok": 3}]


def test_objects_one_after_another_go_on_in_the_next_line():
    found = array(b'{"a": 1}\n{"b": nope}\n{"c": 3}\n')
    assert [one.value if isinstance(one, Row) else one.line for one in found] == [{"a": 1}, 2, {"c": 3}]


def test_what_follows_an_array_is_read_too():
    assert [one.value for one in array(b'[{"a": 1}]\n[{"b": 2}] {"c": 3}')] == [{"a": 1}, {"b": 2}, {"c": 3}]
    *_, bad = array(b'[{"a": 1}] trailing')
    assert isinstance(bad, Reject) and bad.raw == b"trailing"


def test_a_line_that_is_too_long_is_not_held(monkeypatch):
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(json_rows, "BLOCK_BYTES", 300)
    long = b'{"a": "' + b"x" * 5000 + b'"}'
    first, bad, last = lines(b'{"ok": 1}\n' + long + b'\n{"ok": 2}')
    assert (first.value, last.value) == ({"ok": 1}, {"ok": 2}) and last.line == 3
    assert bad.digest == (hashlib.sha256(long).hexdigest(), len(long) + 1) or bad.raw == long
    assert "got a line above 0 MB" in bad.message and last.offset == 10 + len(long) + 1


def test_memory_is_bounded_by_the_longest_line(monkeypatch):
    """100 MB in one line, and one string of 100 MB in an array: neither is held."""
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 1 << 20)

    class Endless(io.RawIOBase):
        def __init__(self, begin: bytes):
            self.left, self.begin = 100 << 20, begin

        def read(self, size: int = -1) -> bytes:
            if self.begin:
                begin, self.begin = self.begin, b""
                return begin
            size = min(size, self.left)
            self.left -= size
            return b"x" * size

    for read, begin in ((read_json_lines, b'{"a": "'), (read_json_values, b'[{"a": "')):
        tracemalloc.start()
        [bad, *_] = list(read(Endless(begin), "f"))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert isinstance(bad, Reject) and bad.digest[1] > 100 << 20
        assert peak < 24 << 20, read


@given(st.binary(max_size=300), st.integers(1, 64))
def test_no_byte_of_any_lines_is_lost(raw, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "BLOCK_BYTES", block)
        found = lines(raw)
    wanted = [line for line in raw.removeprefix(codecs.BOM_UTF8).split(b"\n")]
    kept = [one.raw for one in found]
    rest = [line for line in wanted if line not in kept]
    assert all(not line.decode("utf-8").strip() for line in rest), "only blank lines are passed over"
    assert all(raw[one.offset :].startswith(one.raw) for one in found)


@given(st.binary(max_size=200) | st.text('{}[],:"\\ \n12a', max_size=80).map(str.encode), st.integers(1, 64))
def test_no_byte_of_any_array_is_lost_and_reading_ends(raw, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_CHUNK", chunk)
        found = array(raw)
    at = 0
    for one in found:
        passed = raw[at : one.offset].removeprefix(codecs.BOM_UTF8).decode("utf-8")
        assert not passed.replace(",", "").replace("[", "").replace("]", "").strip()
        at = one.offset + len(one.raw or b"")
    left = raw[at:].removeprefix(codecs.BOM_UTF8).decode("utf-8")
    assert not left.replace(",", "").replace("[", "").replace("]", "").strip()


@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3), max_size=8))
def test_blocks_of_any_size_give_the_same_rows(objects):
    raw = b"".join(json.dumps(one).encode() + b"\n" for one in objects)
    whole = lines(raw)
    for size in (1, 7, 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_rows, "BLOCK_BYTES", size)
            parts = list(line_blocks(io.BytesIO(raw)))
        assert [row for part in parts for row in parse_block(part, "f")] == whole
    assert [row.value for row in whole] == objects


def mutate(line: bytes, random_: random.Random) -> bytes:
    """A line with some of its bytes changed, cut, doubled or replaced by what hurts."""
    data = bytearray(line)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(data) + 1)
        hurt = random_.choice(
            [
                b"\x00",
                b"\xff",
                b"{",
                b"}",
                b"[" * 50,
                b'"',
                b"\\",
                b"\\ud800",
                b"NaN",
                b"1e999",
                b"null",
                b"true",
                b"9" * 30,
                b"\r",
                b"\xed\xa0\x80",
                b",",
                b":",
            ]
        )
        action = random_.randrange(4)
        if action == 0:
            data[at:at] = hurt
        elif action == 1:
            del data[at : at + random_.randint(1, 20)]
        elif action == 2 and data:
            data[at % len(data)] = random_.randrange(256)
        else:
            data[at : at + random_.randint(0, 10)] = hurt
    return bytes(data).replace(b"\n", b" ")


def test_mutated_lines_are_records_or_rejects_and_the_counts_add_up(tmp_path):
    from rlhf.config.commands import ImportConfig
    from rlhf.data.importing.assignments import Assignments
    from rlhf.data.importing.importer import Importer
    from rlhf.data.reading.sources import ROW_SUFFIXES, resolve_sources
    from rlhf.data.storage import read_records

    seeds = [
        {"kind": "ranking", "prompt": [{"role": "user", "content": "é?"}], "responses": [{"id": "a", "text": "A"},
         {"id": "b", "text": "B"}], "ranking": [["a"], ["b"]], "ratings": {"a": 3}, "flags": {"b": ["x"]},
         "labeler": "ann", "seconds": 3.5, "created": "2026-05-01T10:00:00Z", "metadata": {"n": [1, {"m": None}]}},
        {"kind": "demonstration", "id": "d", "prompt": "Hi", "response": "Hello", "split": "train", "user": "u"},
        {"kind": "prompt", "prompt": "Why?", "user": "u", "metadata": {"group": "g"}},
    ]  # fmt: skip
    originals = [json.dumps(one, ensure_ascii=False).encode() for one in seeds]
    random_ = random.Random(0)
    rows = originals.copy()
    for i in range(3000):
        row = random_.choice(originals).replace(b"?", f" {i}?".encode())
        rows.append(mutate(row, random_) if i % 2 else row)
    (tmp_path / "f.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    (tmp_path / "f.json").write_bytes(b"[" + b",\n".join(rows) + b"]")
    inputs, accepted = {}, {}
    for name in ("f.jsonl", "f.json"):
        out = tmp_path / f"out-{name}"
        out.mkdir()
        importer = Importer(ImportConfig(format="native"), out, Assignments(), lambda done: None)
        report = importer.run(resolve_sources(str(tmp_path / name), ROW_SUFFIXES))
        counts = report["counts"]
        assert counts["input"] == sum(list(counts.values())[1:]) and counts["rejected"] > 300 < counts["accepted"]
        assert len((out / "rejects.jsonl").read_text("utf-8").splitlines()) == report["rejects"] == counts["rejected"]
        assert sum(sum(by.values()) for by in report["records"].values()) == len(list(read_records(out)))
        inputs[name], accepted[name] = counts["input"], counts["accepted"]
    blank = sum(not row.strip() for row in rows)
    assert inputs["f.jsonl"] == len(rows) - blank
    assert accepted["f.json"] > 0.9 * accepted["f.jsonl"], "broken objects do not take the good ones along"

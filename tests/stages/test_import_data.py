import base64
import gzip
import hashlib
import json
from pathlib import Path

import pytest

from rlhf.data.reading import load_all
from rlhf.errors import UserError
from rlhf.runs.sources import hash_sources

from .imports import DEMONSTRATION, PROMPT, RANKING, bytes_of, refused, rejects_of, report_of, run, write


def test_what_an_import_writes(tmp_path, capsys):
    rows = [DEMONSTRATION, RANKING, RANKING | {"labeler": "bob"}, RANKING, PROMPT, DEMONSTRATION | {"id": "e"}]
    path = write(tmp_path / "labels.jsonl", [*rows, b"", RANKING | {"ranking": [["a", "b", "c"]], "labeler": "eve"}])
    said = run(capsys, f"path={path}", f"out={tmp_path / 'out'}")
    assert (
        f"import: {path}: native (key kind (demonstration, ranking, prompt) and the keys of that record): 7 rows"
        in said
    )
    assert "rows: 7 input, 5 accepted, 2 duplicates, 0 filtered, 0 rejected" in said
    assert "labelers" in said
    report = report_of(tmp_path / "out")
    assert report["counts"] == {"input": 7, "accepted": 5, "duplicates": 2, "filtered": 0, "rejected": 0}
    counts = {kind: sum(by.values()) for kind, by in report["records"].items()}
    assert counts == {"demonstration": 1, "ranking": 3, "prompt": 1}
    # ann and bob: b over a and c, a = c; eve: all equal, three ties and no pair
    assert (report["pairs"], report["ties"], report["unpaired"]) == (4, 5, 1)
    assert report["responses_a_ranking"] == {"3": 3} and report["labelers"] == {"ann": 1, "bob": 1, "eve": 1}
    assert report["files"][0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert report["files"][0]["records"] == {"demonstration": 1, "prompt": 1, "ranking": 3}
    assert report["agreement"]["items_shared"] == 1 and report["agreement"]["labelers"] == 3
    # prompts: 3 words (Name a town.), 1 (Who?) three times, 5
    assert report["lengths"]["prompt_words"] == {"median": 1, "p95": 5, "max": 5}
    assert not (tmp_path / "out" / "unsplit.jsonl").exists()
    text = (tmp_path / "out" / "report.json").read_text() + (tmp_path / "out" / "dataset.json").read_text()
    assert str(tmp_path / "out") not in text
    found, _ = load_all(str(tmp_path / "out"))
    assert [record.id for record in found] == [
        "d", "labels.jsonl:2", "labels.jsonl:3", "labels.jsonl:8", "labels.jsonl:5",
    ]  # fmt: skip


BAD = [
    (b'{"kind": "ranking", "prompt": "x"}', 2, "responses", "responses: missing"), (b"{oops", 3, "", "not JSON"),
    ('{"a": "caf\u00e9"}'.encode("latin-1"), 4, "", "byte 0xe9 is not UTF-8"),
    (json.dumps(RANKING | {"ranking": [["d"]]}).encode(), 5, "ranking", 'ranking names "d", responses are a, b, c'),
    (json.dumps(DEMONSTRATION | {"split": "valid"}).encode(), 6, "split", "split: got 'valid', want one of train, dev"),
    (json.dumps(PROMPT | {"metadata": {"n": 1e400}}).replace("Infinity", "1e400").encode(), 7, "metadata",
     "got a value that JSON has not"),
]  # fmt: skip


def test_rejects_say_where_what_came_and_what_was_wanted(tmp_path, capsys):
    path = write(tmp_path / "labels.jsonl", [DEMONSTRATION, *(row for row, *_ in BAD), PROMPT])
    line, said = refused(capsys, f"path={path}", f"out={tmp_path / 'out'}")
    partial = tmp_path / "out.partial"
    assert "6 rejects, max_rejects=0" in line and f"{partial}" in line and "data.allow_partial=true" in line
    assert not (tmp_path / "out").exists()
    entries = rejects_of(partial)
    for entry, (raw, number, field, message) in zip(entries, BAD, strict=True):
        assert (entry["file"], entry["line"], entry["number"], entry["field"]) == (str(path), number, number, field)
        assert message in entry["message"] and f"{path}:{number}: " in said
        assert raw.startswith(entry["original"].encode() if "original" in entry else base64.b64decode(entry["base64"]))
    assert [entry.get("original", "").encode() for entry in entries[:2]] == [BAD[0][0], BAD[1][0]]
    assert base64.b64decode(entries[2]["base64"]) == BAD[2][0] and "original" not in entries[2]
    assert report_of(partial)["counts"] == {"input": 8, "accepted": 2, "duplicates": 0, "filtered": 0, "rejected": 6}
    path_of_one = write(tmp_path / "one.jsonl", [BAD[0][0]])
    assert ": 1 reject, max_rejects=0" in refused(capsys, f"path={path_of_one}", f"out={tmp_path / 'one'}")[0]
    # allowed, the same rows are a complete import
    run(capsys, f"path={path}", f"out={tmp_path / 'out'}", "max_rejects=6")
    assert len(load_all(str(tmp_path / "out"))[0]) == 2 and len(rejects_of(tmp_path / "out")) == 6
    path = write(tmp_path / "c.jsonl", [{"instruction": "?", "output": "2", "split": "valid", "source_split": "own"}])
    run(capsys, f"path={path}", f"out={tmp_path / 'c'}")
    assert load_all(str(tmp_path / "c"))[0][0].metadata == {"source_split": "own"}


def test_the_hash_of_an_import_is_that_of_its_manifest(tmp_path, capsys):
    from rlhf.config import Config

    write(tmp_path / "labels.jsonl", [DEMONSTRATION])
    run(capsys, f"path={tmp_path / 'labels.jsonl'}", f"out={tmp_path / 'out'}")
    config = Config()
    config.data.demonstrations = [str(tmp_path / "out"), str(tmp_path / "labels.jsonl")]
    found = hash_sources(config, "sft")
    manifest = tmp_path / "out" / "dataset.json"
    assert found["demonstrations:out"] == hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert set(found) == {"demonstrations:out", "demonstrations:labels.jsonl"}
    [arrow] = (tmp_path / "out" / "demonstration").iterdir()
    arrow.write_bytes(arrow.read_bytes()[:-1])
    with pytest.raises(UserError, match="changed since it was imported"):
        hash_sources(config, "sft")


def make_files(folder: Path) -> Path:
    """JSON Lines with every fate a row can have, several blocks of them, and an array."""
    folder.mkdir()
    rows: list = []
    for i in range(100):
        rows += [DEMONSTRATION | {"id": f"d{i}", "prompt": f"Town {i}? Mail ann{i % 3}@example.org"}, b'{"kind": 1}']
        rows += [RANKING | {"prompt": f"q {i}", "labeler": name} for name in ("ann", "bob", "ann")]
        rows += [PROMPT | {"prompt": f"Why {i}?", "user": f"u{i % 5}"}, b"", b"\xff\xfe"]
    write(folder / "a.jsonl", rows)
    (folder / "b.json").write_text(json.dumps([{"instruction": f"Add {i}", "output": "x"} for i in range(5)]))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()[:12_000]))
    return folder


def test_importing_twice_is_byte_identical(tmp_path, capsys):
    path = make_files(tmp_path / "in")
    settings = [f"path={path}", "max_rejects=9999", "max_prompts_per_user=15"]
    run(capsys, *settings, f"out={tmp_path / 'one'}")
    run(capsys, *settings, f"out={tmp_path / 'two'}")
    one = bytes_of(tmp_path / "one")
    assert one == bytes_of(tmp_path / "two") and len(one) >= 8
    counts = report_of(tmp_path / "one")["counts"]
    assert counts["input"] == sum(list(counts.values())[1:]) and all(counts.values())
    # and so is replacing an import by itself, which keeps its own assignments
    run(capsys, *settings, f"out={tmp_path / 'one'}", "overwrite=true")
    again = bytes_of(tmp_path / "one")
    changed = {name for name in one if one[name] != again[name]}
    assert changed <= {"report.json", "dataset.json"}, "the report says how many splits it kept"
    assert set(again) == set(one)


def test_what_is_there_is_not_replaced_unasked(tmp_path, capsys):
    path = write(tmp_path / "labels.jsonl", [DEMONSTRATION])
    out = tmp_path / "out"
    run(capsys, f"path={path}", f"out={out}")
    line, _ = refused(capsys, f"path={path}", f"out={out}")
    assert "exists" in line and "overwrite=true" in line
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    line, _ = refused(capsys, f"path={path}", f"out={tmp_path / 'mine'}", "overwrite=true")
    assert "is no import, so it is not replaced" in line and (tmp_path / "mine" / "thesis.txt").exists()
    # a replacement that fails leaves the old import as it was
    before = bytes_of(out)
    refused(capsys, f"path={write(tmp_path / 'bad.jsonl', [DEMONSTRATION, b'{'])}", f"out={out}", "overwrite=true")
    assert bytes_of(out) == before
    write(path, [DEMONSTRATION, PROMPT])
    run(capsys, f"path={path}", f"out={out}", "overwrite=true")
    assert len(load_all(str(out))[0]) == 2 and not [*tmp_path.glob(".*")]


def test_a_replaced_import_keeps_its_splits(tmp_path, capsys):
    rows = [PROMPT | {"prompt": f"Why {i}?", "user": None} for i in range(50)]
    path, out = write(tmp_path / "labels.jsonl", rows), tmp_path / "out"
    run(capsys, f"path={path}", f"out={out}", "dev=0.3", "test=0.3")
    before = {record.id: record.metadata["split"] for record in load_all(str(out))[0]}
    run(capsys, f"path={path}", f"out={out}", "overwrite=true", "seed=9", "dev=0.1", "test=0.1")
    assert {record.id: record.metadata["split"] for record in load_all(str(out))[0]} == before
    run(capsys, f"path={path}", f"out={tmp_path / 'other'}", f"earlier=[{out}]", "seed=5")
    assert {record.id: record.metadata["split"] for record in load_all(str(tmp_path / "other"))[0]} == before
    line, _ = refused(capsys, f"path={path}", f"out={tmp_path / 'x'}", f"earlier=[{path}]")
    assert "no finished import there" in line


def test_cleaning_is_counted(tmp_path, capsys):
    mail = PROMPT | {"prompt": "Write to ann@example.org", "user": "v"}
    rows = [PROMPT | {"prompt": f"Why {i}?"} for i in range(5)]
    rows += [rows[0], mail, PROMPT | {"prompt": "why  0?", "user": "w"}]
    path = write(tmp_path / "labels.jsonl", rows)
    run(capsys, f"path={path}", f"out={tmp_path / 'flag'}", "max_prompts_per_user=3")
    report = report_of(tmp_path / "flag")
    assert report["counts"] == {"input": 8, "accepted": 4, "duplicates": 1, "filtered": 3, "rejected": 0}
    assert report["cleaning"] == {
        "duplicates": 1, "pii": 0, "shared_prefix": 1, "prompts_of_user": 2, "gold_accuracy": 0, "card_found": 0,
        "email_found": 1, "phone_found": 0,
    }  # fmt: skip
    flagged = [record for record in load_all(str(tmp_path / "flag"))[0] if "pii" in record.metadata]
    assert [(record.id, record.metadata["pii"]) for record in flagged] == [("labels.jsonl:7", ["email"])]
    run(capsys, f"path={path}", f"out={tmp_path / 'drop'}", "pii=drop", "duplicates=keep", "filter_prefixes=false")
    report = report_of(tmp_path / "drop")
    assert report["counts"] == {"input": 8, "accepted": 7, "duplicates": 0, "filtered": 1, "rejected": 0}
    assert report["cleaning"]["pii"] == 1
    run(capsys, f"path={path}", f"out={tmp_path / 'keep'}", "pii=keep")
    assert not any("pii" in record.metadata for record in load_all(str(tmp_path / "keep"))[0])

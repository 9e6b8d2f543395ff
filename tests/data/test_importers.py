"""Files of rows read: what is chosen and refused, counted and hashed. What each format does is in `importers/`."""

import pytest

from rlhf.data.reading import load_all, load_comparisons, load_demonstrations
from rlhf.errors import UserError

ALPACA = {"instruction": "Name a colour.", "input": "", "output": "Blue."}
HH = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go away"}
NATIVE = {"kind": "demonstration", "id": "d-1", "prompt": "Hi", "response": "Hello"}


def test_the_wrong_format_is_refused_with_what_it_looks_like(write_jsonl):
    with pytest.raises(UserError, match=r"not of data.format=hh, .* looks like alpaca .*: set data.format=alpaca"):
        load_all(write_jsonl([ALPACA]), "hh")
    with pytest.raises(UserError, match=r"data.format=nope: no such format: want auto, alpaca, .*hh, .*native"):
        load_all(write_jsonl([ALPACA]), "nope")


def test_an_empty_file_and_one_of_another_kind_are_refused(write_jsonl, tmp_path):
    with pytest.raises(UserError, match=r"empty.jsonl: the file is empty"):
        load_all(write_jsonl([], "empty.jsonl"))
    with pytest.raises(UserError, match=r"no ranking record in the data: .* 1 rows: 1 demonstration records"):
        load_comparisons(write_jsonl([ALPACA]))
    with pytest.raises(UserError, match="no demonstration record in the data"):
        load_demonstrations(write_jsonl([HH]))
    (tmp_path / "noise.jsonl").write_bytes(b"\x93NUMPY\nxx\n")
    with pytest.raises(UserError, match=r"noise.jsonl:1: byte 0x93 is not UTF-8"):
        load_all(tmp_path / "noise.jsonl")


def test_bad_rows_are_counted_and_the_first_five_shown(write_jsonl):
    rows = [
        NATIVE,
        *({"kind": "ranking", "prompt": "x"} for _ in range(3)),
        NATIVE | {"response": 3},
        {"kind": "rank", "prompt": "x"},
        NATIVE | {"prompt": ""},
        NATIVE,
    ]
    path = write_jsonl(rows)
    with pytest.raises(UserError) as caught:
        load_all(path)
    assert str(caught.value) == (
        f"6 of 8 rows cannot be used: correct or remove them: {path}:2: responses: missing; "
        f"{path}:3: responses: missing; "
        f"{path}:4: responses: missing; {path}:5: response: got 3, want a valid string; "
        f"{path}:6: kind: got 'rank', want demonstration, ranking, prompt; …"
    )


def test_sources_of_several_formats_are_read_together(write_jsonl, tmp_path):
    write_jsonl([ALPACA, ALPACA], "sub-a.jsonl")
    write_jsonl([HH], "sub-b.jsonl")
    records, info = load_all(str(tmp_path))
    assert [record.kind for record in records] == ["demonstration", "demonstration", "ranking"]
    assert [record.id for record in records] == ["sub-a.jsonl:1", "sub-a.jsonl:2", "sub-b.jsonl:1"]
    assert [file.records for file in info] == [{"demonstration": 2}, {"ranking": 1}] and sum(
        file.rows for file in info
    ) == 3

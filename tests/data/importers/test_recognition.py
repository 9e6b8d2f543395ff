"""Every row shape is recognised, and no row of any shape breaks a format."""

import copy
import json

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from rlhf.config import Config
from rlhf.config.stages import DataConfig
from rlhf.data.formats import FORMATS, recognise
from rlhf.data.inputs import Row
from rlhf.data.reading import convert_row, load_all, load_comparisons
from rlhf.errors import UserError
from rlhf.runs.sources import hash_sources
from tests.data import sheets
from tests.data.importers.samples import SAMPLES, USER

IDS = [f"{format}-{i}" for i, (format, *_) in enumerate(SAMPLES)]


@pytest.mark.parametrize(("format", "row", "kinds"), SAMPLES, ids=IDS)
def test_a_row_is_recognised(write_jsonl, format, row, kinds):
    assert recognise(row) == format
    path = write_jsonl([row])
    records, info = load_all(path)
    assert [record.kind for record in records] == kinds
    assert info[0].format == format and info[0].why == FORMATS[format].wants
    assert load_all(path, format)[1][0].why == "asked for"


def test_every_format_of_rows_has_a_sample():
    of_other_tests = {"table", "label_studio", "tasks_csv"}  # columns that the user names; tasks of a labelling round
    assert {format for format, *_ in SAMPLES} == set(FORMATS) - of_other_tests


def test_samples_do_not_share_ids_by_accident(write_jsonl):
    """Ids come from the row or are made of file and row, so that each record has one of its own."""
    for _, row, kinds in SAMPLES:
        records, _ = load_all(write_jsonl([row]))
        assert len({record.id for record in records}) == len(kinds)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": []},
        {"instruction": "x", "output_1": "y", "output_2": "z"},
        {"prompt": "x", "completions": [{"model": "m", "completion": "y"}]},
        {"question": "x", "answer": "y", "context": "z"},
        {"conversations": [], "chosen": {"from": "gpt"}},
        {"text": ["x", "y"], "score": [1, 0]},
        {"turns": [1, 2]},
    ],
)
def test_a_foreign_shape_is_refused_with_its_keys(write_jsonl, row):
    with pytest.raises(UserError) as caught:
        load_all(write_jsonl([row]))
    message = str(caught.value)
    assert f"no format recognised: rows have the keys {', '.join(row)}. Name the columns, as: format=table" in message


def test_columns_are_proposed_with_the_words_of_the_verdicts(write_jsonl):
    said = [("a", 1), ("b", 2), ("c", 1), ("d", 0)]
    rows = [{"question": f"{q}?", "model_a": "m", "model_b": "n", "answer_a": "A long answer.", "answer_b": "B.", "label": v}
            for q, v in said]  # fmt: skip
    with pytest.raises(UserError) as caught:
        load_all(write_jsonl(rows))
    assert str(caught.value).endswith(
        "Name the columns, as: format=table columns.prompt=question columns.responses='[answer_a,answer_b]' "
        "columns.winner=label words.first=… words.second=… words.tie=… (label: 1 (2x), 2 (1x), 0 (1x))"
    )


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet", "arrow", "xlsx"])
def test_tables_are_read_where_labels_are_named(tmp_path, suffix):
    rows = [
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        {"prompt": "Who?", "chosen": "I.", "rejected": "U."},
    ]
    path = tmp_path / f"labels.{suffix}"
    if suffix in ("parquet", "arrow"):
        table = pyarrow.Table.from_pylist(rows)
        if suffix == "parquet":
            parquet.write_table(table, path)
        else:
            with ipc.new_file(path, table.schema) as file:
                file.write_table(table)
    elif suffix == "xlsx":
        lines = [list(rows[0]), *(list(one.values()) for one in rows)]
        cells = [
            sheets.row(n, *(sheets.text(f"{c}{n}", v) for c, v in zip("ABC", line, strict=True)))
            for n, line in enumerate(lines, 1)
        ]
        sheets.write_xlsx(path, {"S": "".join(cells)})
    else:
        mark = "," if suffix == "csv" else "\t"
        path.write_text("\n".join(mark.join(line) for line in [rows[0], *(one.values() for one in rows)]) + "\n")
    rankings, info = load_comparisons(str(path))
    assert info[0].format == "trl" and [r.prompt[0].content for r in rankings] == ["Why?", "Who?"]
    assert [response.text for response in rankings[1].responses] == ["I.", "U."]
    assert list(hash_sources(Config(data=DataConfig(comparisons=str(path))), "reward")) == [
        f"comparisons:labels.{suffix}"
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "text", "rank", "id"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def places(value, path=()):
    """The path to every value within a row."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*path, key)
        yield from places(one, (*path, key))


def changed(row, path, value, remove):
    new = copy.deepcopy(row)
    holder = new
    for key in path[:-1]:
        holder = holder[key]
    if remove:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return new


@pytest.mark.parametrize(("format", "row"), [(format, row) for format, row, _ in SAMPLES], ids=IDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_row_with_any_value_anywhere_gives_records_or_says_what_is_wrong(format, row, data):
    path = data.draw(st.sampled_from(list(places(row))))
    bad = changed(row, path, data.draw(JSON), data.draw(st.booleans()))
    assert recognise(bad) in (*FORMATS, None)
    made = convert_row(Row(1, bad, 1), FORMATS[format], "f", "f")
    assert made.records or "\n" not in made.reject.message
    assert all(json.loads(record.model_dump_json()) for record in made.records)


def test_a_file_is_of_the_format_of_its_first_row_that_has_one(write_jsonl):
    records, info = load_all(
        write_jsonl([{"instruction": "Hi", "output": "Hello"}, {"instruction": "Hi", "response": "Yes"}])
    )
    assert info[0].format == "alpaca" and len(records) == 2
    with pytest.raises(UserError, match=r"1 of 2 rows cannot be used: .*:1: messages: got None, want a list of turns$"):
        load_all(write_jsonl([{"odd": 1}, {"messages": [USER]}]))

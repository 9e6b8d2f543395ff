"""A line that is a record as it stands is read at once; the result is that of parsing, converting and validating it."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.importers import formats
from rlhf.data.importing.batches import Plan, process
from rlhf.data.reading.json_rows import Block
from rlhf.data.records import Demonstration, Ranking, read_record

TURN = '[{"role": "user", "content": "Hi: \\"you\\""}]'
RESPONSES = '[{"id": "a", "text": "A"}, {"id": "b", "text": ""}]'
# values of each key as JSON text, good and bad
VALUES = {
    "kind": ['"ranking"', '"ranking"', '"ranking"', '"prompt"', '"demonstration"', '"rankin"', "3", "null"],
    "id": ['"r"', '"r"', '"é"', '""', "null", "5"],
    "prompt": [TURN, TURN, '"Hi"', "null", "[]", '[{"role": "user", "role": "user", "content": "x"}]',
               '[{"role": "user", "content": "x", "name": "n", "more": {"k": 1, "k": 2}}]',
               '[{"role": "user", "content": "x", "name": {"k": [{"l": 1}]}}]', '[{"role": "bot", "content": "x"}]'],
    "responses": [RESPONSES, RESPONSES, '[{"id": "a", "text": "A", "score": 1, "score": 1}, {"id": "b", "text": "B"}]',
                  '[{"id": "a", "text": "A", "score": 1, "metadata": null}, {"id": "b", "text": "B", "metadata": {"s": 1}}]',
                  '[{"id": "a", "text": "A", "s": 1, "metadata": {"s": 2}}, {"id": "b", "text": "B"}]', "[]"],
    "response": ['"So."', '" "'],
    "ranking": ['[["a"], ["b"]]', '[["b", "a"]]', "null", '[["a"], ["z"]]', '[["a"], ["a"]]'],
    "ratings": ['{"a": 5}', '{"a": "5"}', '{"a": true}', '{"a": 9}', '{"a": 5, "a": 5}', '{"z": 1}', '{"a": NaN}', "null"],
    "flags": ['{"a": ["bad"]}', "null", '{"a": "bad"}'],
    "labeler": ['"ann"', "null", "3"],
    "seconds": ["3", "3.5", "-1", '"3"', "NaN", "1e999", "true"],
    "created": ['"2026-05-01T10:00:00Z"', '"today"'],
    "split": ['"train"', '"noon"'],
    "metadata": ["{}", "null", '{"n": 1}', '{"n": NaN}', '{"n": {"m": 1, "m": 1}}', '{"split": "dev"}', '{"split": "x"}',
                 '{"n": "\\ud800"}', '{"n": "\\ud83d\\ude00"}', '{"n": ' + "9" * 5000 + "}", '{"n": 123456789012345678901}',
                 '{"n": ' + "[" * 150 + "]" * 150 + "}", '{"n": ' + "[" * 300 + "]" * 300 + "}", '{"a": "\\": 1"}', "[1]",
                 '{"source": "here", "user": "u"}'],
    "topic": ['"x"', '{"y": 1, "y": 2}', "-Infinity"],
}  # fmt: skip
BASE = {"ranking": ["kind", "id", "prompt", "responses"], "prompt": ["kind", "id", "prompt"],
        "demonstration": ["kind", "id", "prompt", "response"]}  # fmt: skip


def result(text: str, exact: bool) -> tuple:
    """The rejects, and all that is kept of the lines, read at once where possible or not."""
    native = formats()["native"]
    assert native.read is not None
    plan = Plan("f", "f", format=native if exact else dataclasses.replace(native, read=None))
    batch = process(plan, Block(1, 0, text.encode("utf-8", "surrogatepass")))
    sizes = {kind: [one.tolist() for one in both] for kind, both in batch.sizes.items()}
    tables = {kind: table.to_pylist() for kind, table in batch.tables.items()}
    return batch.rows, batch.rejects, tables, batch.facts.tolist(), sizes, batch.judgements


@st.composite
def some_lines(draw) -> str:
    written = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(sorted(BASE)))
        keys = draw(st.permutations(BASE[kind] + draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3))))
        pairs = []
        for key in keys:
            odd = draw(st.integers(0, 3)) == 0
            good = json.dumps(kind) if key == "kind" else VALUES[key][0]
            colon = draw(st.sampled_from([": ", ": ", ":", " :", "\t: "]))
            pairs.append(json.dumps(key) + colon + (draw(st.sampled_from(VALUES[key])) if odd else good))
        written.append("{" + ", ".join(pairs) + "}" + draw(st.sampled_from(["", "", "\r", " ", "}"])))
    return "\n".join(written)


@settings(max_examples=400, deadline=None)
@given(some_lines())
def test_reading_at_once_changes_nothing(text):
    assert result(text, exact=True) == result(text, exact=False)


@pytest.mark.parametrize("key", sorted(VALUES))
def test_each_value_alone(key):
    for kind, base in BASE.items():
        for value in VALUES[key]:
            known = {name: json.dumps(kind) if name == "kind" else VALUES[name][0] for name in base} | {key: value}
            text = "{" + ", ".join(f'"{name}": {one}' for name, one in known.items()) + "}"
            assert result(text, exact=True) == result(text, exact=False), text
            twice = text[:-1] + f', "{key}": {value}}}'
            assert result(twice, exact=True) == result(twice, exact=False), twice
            assert not result(twice, exact=True)[2], twice


def test_what_is_read_at_once():
    plain = f'{{"kind": "ranking", "id": "r", "prompt": {TURN.replace(": ", " ", 1)}}}'
    assert read_record(plain.encode()) is None  # no responses
    demonstration = {
        "kind": "demonstration",
        "id": "d",
        "prompt": json.loads(TURN),
        "response": "So.",
        "metadata": {"n": 1},
    }
    record = read_record(json.dumps(demonstration | {"prompt": [{"role": "user", "content": "a: b"}]}).encode())
    assert record == Demonstration(id="d", prompt="a: b", response="So.", metadata={"n": 1})
    # `\":` in a text may stand for a key: the line is parsed
    quoted = demonstration | {"prompt": [{"role": "user", "content": '"a": b'}]}
    assert read_record(json.dumps(quoted).encode()) is None
    ranking = {"kind": "ranking", "id": "r", "prompt": json.loads(TURN), "responses": json.loads(RESPONSES)}
    assert read_record(json.dumps(ranking).encode()) == Ranking.model_validate(ranking)
    for adapted in ({"prompt": "Hi"}, {"topic": "x"}, {"id": None}):
        assert read_record(json.dumps(ranking | adapted).encode()) is None

"""Every row shape is recognised, a bad row says what is wrong, and no row of any shape breaks a format."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.reading import FORMATS, convert_row, load_all, recognise
from rlhf.data.rows import Row
from rlhf.errors import UserError
from tests.data.importers import samples as s
from tests.data.importers.samples import USER, answer, says

IDS = [f"{format}-{i}" for i, (format, *_) in enumerate(s.SAMPLES)]


@pytest.mark.parametrize(("format", "row", "kinds"), s.SAMPLES, ids=IDS)
def test_a_row_is_recognised(write_jsonl, format, row, kinds):
    assert recognise(row) == format
    path = write_jsonl([row])
    records, info = load_all(path)
    assert [record.kind for record in records] == kinds
    assert len({record.id for record in records}) == len(kinds), "ids come from the row, or from file and row"
    assert info[0].format == format and info[0].why == FORMATS[format].wants
    assert load_all(path, format)[1][0].why == "asked for"


def test_every_format_of_rows_has_a_sample():
    of_other_tests = {"table", "label_studio"}  # columns that the user names; tasks of a labelling round
    assert {format for format, *_ in s.SAMPLES} == set(FORMATS) - of_other_tests


@pytest.mark.parametrize("row", [
    {"messages": []}, {"instruction": "x", "output_1": "y", "output_2": "z"},
    {"prompt": "x", "completions": [{"model": "m", "completion": "y"}]}, {"text": ["x", "y"], "score": [1, 0]},
])  # fmt: skip
def test_a_foreign_shape_is_refused_with_its_keys(write_jsonl, row):
    with pytest.raises(UserError) as caught:
        load_all(write_jsonl([row]))
    told = f"no format recognised: rows have the keys {', '.join(row)}. Name the columns, as: `rlhf import path="
    assert told in str(caught.value)


def test_columns_are_proposed(write_jsonl):
    row = {"question": "?", "model_a": "m", "model_b": "n", "answer_a": "A long answer.", "answer_b": "B.", "label": 1}
    with pytest.raises(UserError) as caught:
        load_all(path := write_jsonl([row]))
    assert str(caught.value).endswith(
        f"Name the columns, as: `rlhf import path={path} out=imported format=table columns.prompt=question "
        "columns.responses='[answer_a,answer_b]' columns.winner=label`, then give the folder imported instead"
    )
    with pytest.raises(UserError, match=r"columns\.prompt=q columns\.ranked='\[good answer,bad answer\]'`"):
        load_all(write_jsonl([{"q": "?", "bad answer": "x", "good answer": "y"}]))


KEYS = st.sampled_from(["role", "content", "from", "value", "text", "rank", "id"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
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


@settings(max_examples=300)
@given(sample=st.sampled_from(s.SAMPLES), data=st.data())
def test_a_row_with_any_value_anywhere_gives_records_or_says_what_is_wrong(sample, data):
    format, row, _ = sample
    path = data.draw(st.sampled_from(list(places(row))))
    bad = changed(row, path, data.draw(JSON), data.draw(st.booleans()))
    assert recognise(bad) in (*FORMATS, None)
    made = convert_row(Row("f", 1, 1, bad), FORMATS[format], "f")
    assert made.records or (made.problem and "\n" not in made.problem)
    assert all(json.loads(record.model_dump_json()) for record in made.records)


def test_a_file_is_of_the_format_of_its_first_row_that_has_one_and_another_is_refused(write_jsonl):
    rows = [{"instruction": "Hi", "output": "Hello"}, {"instruction": "Hi", "response": "Yes"}]
    records, info = load_all(write_jsonl(rows))
    assert info[0].format == "alpaca" and len(records) == 2
    with pytest.raises(UserError, match=r"1 of 2 rows cannot be used: .*:1: messages: got None, want a list of turns$"):
        load_all(write_jsonl([{"odd": 1}, {"messages": [USER]}]))
    with pytest.raises(UserError, match=r"1 of 1 rows cannot be used: is data.format=hh right.: .*:1: chosen: missing"):
        load_all(write_jsonl([s.ALPACA]), "hh")
    with pytest.raises(UserError, match=r"data.format=nope: no such format: want auto, alpaca, .*hh, .*native"):
        load_all(write_jsonl([s.ALPACA]), "nope")


TOOL = [says("human", "Hi"), says("tool", "x"), says("gpt", "y")]
NATIVE = {"kind": "prompt", "prompt": "Hi"}
NO_ANSWER = "response: got no text, want the demonstrated answer"
ROLE = "want system, user (human) or assistant (gpt): remove the row"
WEIGHTS = {"messages": [USER, answer("a") | {"loss_weight": 0}]}


@pytest.mark.parametrize(("format", "good", "change", "message"), [
    ("native", NATIVE, {"kind": "rank"}, "kind: got 'rank', want demonstration, ranking, prompt"),
    ("alpaca", s.ALPACA, {"output": ""}, NO_ANSWER),
    ("sharegpt", s.SHAREGPT, {"conversations": TOOL}, f"conversations.1.from: got 'tool', {ROLE}"),
    ("sharegpt", s.COMPARED, {"rejected": says("human", "b")}, "rejected: got ['user'], want one assistant turn"),
    ("messages", s.MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content: got"),
    ("messages", s.MESSAGES, WEIGHTS, "messages: every assistant turn has weight 0, want one to learn"),
    ("self_instruct", s.SEED, {"instances": [{"input": "x"}]}, "output: missing"),
    ("question_answer", s.QUESTION, {"answer": " "}, NO_ANSWER),
    ("hh", s.HH, {"rejected": None}, "rejected: got None, want a string"),
    ("hh", s.HH, {"chosen": "\n\nHuman: Ho\n\nAssistant: x"}, "chosen: the two dialogues part before the last answer"),
    ("hh", s.SCORED, {"text": [s.HH["chosen"]]}, "want two dialogues"),
    ("trl", s.TRL, {"rejected": None}, "rejected: got None, want a string"),
    ("pairs", s.PAIR, {"rejected_response": None}, "rejected_response: got None, want a string"),
    ("choices", s.CHOICES, {"rejected": [3]}, "rejected: got [3], want a list of strings"),
    ("kto", s.KTO, {"label": None}, "label: got None, want true or false: remove rows without a judgement"),
    ("kto", {"messages": [USER, answer("a")], "label": True}, {"messages": [USER]}, "messages: got 'user', want a last turn"),
    ("openai_comparisons", s.COMPARISON, {"choice": None}, "choice: got None, want 0 or 1, the better of two summaries"),
    ("openai_comparisons", s.AXES, {"summary": {"text": "x", "axes": {"overall": None}}}, "summary.axes.overall: got None"),
    ("webgpt", s.WEBGPT, {"score_1": None}, "score_1: got None, want a number"),
    ("ultrafeedback", s.ULTRAFEEDBACK, {"completions": [{"response": "x"}]}, "completions: some have no score"),
    ("nectar", s.NECTAR, {"answers": [{"answer": "x", "rank": 1}]}, "answers: got {'a': 1}, want two ranks or more"),
    ("qa_feedback", s.QA_FEEDBACK, {"preference": [1, 2, 1, 1, 1, 1]}, "pairs go in a circle, 1 over 2 over 3 over 1"),
    ("oasst", s.OASST, {"prompt": s.OASST["prompt"] | {"role": "bot"}}, f"message.0.role: got 'bot', {ROLE}"),
    ("argilla", s.ARGILLA_1, {"responses": {}}, "responses: got none, want one that judges response-1, response-2"),
    ("argilla", s.ARGILLA_1, {"responses": {"comment": [{"value": "Hm."}]}}, "responses: got ['comment'], want one that"),
])  # fmt: skip
def test_a_bad_row_says_what_came_and_what_was_wanted(rejects, format, good, change, message):
    [(field, said)] = rejects(format, good, good | change)
    assert message in said and (not field or field in said)

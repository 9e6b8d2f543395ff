import json
import re

import pytest

from rlhf.config.commands import ColumnsConfig, WordsConfig
from rlhf.data.formats.table import make_table_format
from rlhf.data.reading import convert_row
from rlhf.data.rows import Row
from rlhf.errors import UserError

PAIR = {"prompt": "q", "responses": ["a", "b"]}


def prepared(rows, words=None, **columns):
    return make_table_format(ColumnsConfig(**columns), WordsConfig(**(words or {})))("t.csv", rows)


def convert(rows, words=None, **columns):
    """The records of rows that are all good."""
    chosen = prepared(rows, words, **columns)
    made = [convert_row(Row("t.csv", i, i, row), chosen, "t.csv") for i, row in enumerate(rows, 1)]
    assert not any(one.problem for one in made), made
    return [record for one in made for record in one.records]


def problem(row, among=(), words=None, **columns):
    """What is said of one row that is bad."""
    return convert_row(Row("t.csv", 1, 1, row), prepared([row, *among], words, **columns), "t.csv").problem


def judged(*words, k=2, **more):
    """The ranking that each word of one column gives: "a" and "b" are the responses in their order."""
    names = ["a", "b", "c", "d"][:k]
    rows = [{"q": "?", **{n: f"text {n}" for n in names}, "w": word} for word in words]
    records = convert(rows, prompt="q", responses=names, winner="w", **more)
    return [one.ranking if one.pairs is None else one.pairs for one in records]


A, B, TIE = [["a"], ["b"]], [["b"], ["a"]], [["a", "b"]]


@pytest.mark.parametrize("words", [
    (1, 2, 0), ("1", "2", "0"), (1.0, 2.0, 1.5), ("A", "B", "tie"), ("a", "b", "Draw"),
    ("model_a", "model_b", "tie (bothbad)"), ("left", "right", "same"), ("first", "second", "both good"),
    ("Response 1", "Response 2", "no preference"), ("output_1", "output_2", "equal"), ("A>>B", "A<B", "A=B"),
    ("[[A>B]]", "[[B>A]]", "[[A=B]]"), ("the first one", "Model B", "both are bad"), ("a wins", "b wins", "neither"),
    ("a is much better", "b is slightly better", "about the same"),
    ("text a", "text b", "tied"), ("Response A is slightly better than B", "B better", "a tie"),
])  # fmt: skip
def test_usual_vocabularies(words):
    assert judged(*words) == [A, B, TIE]


@pytest.mark.parametrize(("seen", "said"), [
    ((0, 1, 1), "got 1 (2x), 0 (1x): say what each means, for example with words.first=1 words.second=0"),
    (("1", "1"), "got 1 (2x): say what each means"), ((0.0, None), "got 0 (1x): say"),
    ((1, 2, 3, 4, 5), "got 1 (1x), 2 (1x), 3 (1x), 4 (1x), 5 (1x): say"),
    ((-1, -1, *[1, 2, 0] * 10), "got 1 (10x), 2 (10x), 0 (10x), -1 (2x): say"),
    ((-3, 0, 3), "got -3 (1x), 0 (1x), 3 (1x): say"),
])  # fmt: skip
def test_numbers_that_could_mean_two_things_are_refused(seen, said):
    rows = [{"q": "?", "a": "1st", "b": "2nd", "w": value} for value in seen]
    with pytest.raises(UserError, match=re.escape(f"columns.winner=w: t.csv, first {len(seen)} rows: {said}")):
        prepared(rows, **PAIR, winner="w")


def test_words_of_another_language_are_one_message_with_the_settings_to_copy():
    rows = [{"q": "?", "a": "1st", "b": "2nd", "w": word} for word in ["schlechter", *["viel besser"] * 3, "a"]]
    with pytest.raises(UserError) as refused:
        prepared(rows, **PAIR, winner="w")
    assert str(refused.value) == (
        "columns.winner=w: t.csv, first 5 rows: got viel besser (3x), schlechter (1x): say what each means, for example "
        "with 'words.first=viel besser' words.second=schlechter (and words.tie=… for a tie)"
    )
    words = {"first": "viel besser", "second": "schlechter"}
    assert len(convert(rows[:4], words, **PAIR, winner="w")) == 4


def test_labelers_side_by_side_and_ranked_columns_and_lists():
    rows = [
        {"q": "?", "a": "1st", "b": "2nd", "x": 1, "y": 2, "z": 0, "id": "i"},
        {"q": "?", "a": "3", "b": "4", "x": 2, "y": None, "z": 1, "id": None},
    ]
    made = convert(rows, **PAIR, winner=["x", "y", "z"], id="id")
    assert [(one.id, one.labeler, one.ranking) for one in made] == [
        ("i:x", "x", A), ("i:y", "y", B), ("i:z", "z", TIE), ("t.csv:2.0", "x", B), ("t.csv:2.1", "z", A),
    ]  # fmt: skip
    assert made[0].metadata == made[3].metadata == {}
    row = {"q": "?", "best": "1st", "mid": "", "last": "3rd"}
    [made] = convert([row], prompt="q", ranked=["best", "mid", "last"])
    assert [one.text for one in made.responses] == ["1st", "3rd"] and made.ranking == A
    [made] = convert([{"q": "?", "all": '["x", "y", "z"]'}], prompt="q", ranked="all")
    assert [one.text for one in made.responses] == ["x", "y", "z"] and made.ranking == [["a"], ["b"], ["c"]]
    told = problem(row | {"last": None}, prompt="q", ranked=["best", "mid", "last"])
    assert told == "best: got ['1st'], want 2 or more responses"


def test_scores():
    row = {"q": "?", "a": "x", "b": "y", "c": "", "s": 1, "t": "2.5", "u": ""}
    columns = {"prompt": "q", "responses": ["a", "b", "c"], "scores": ["s", "t", "u"]}
    [made] = convert([row], **columns)
    assert made.ranking == B and len(made.responses) == 2 and made.metadata == {"scores": {"a": 1, "b": 2.5}}
    [made] = convert([row | {"t": "1.0", "u": "0"}], **columns)  # an empty response that was judged is one
    assert made.ranking == [["a", "b"], ["c"]] and made.responses[2].text == ""
    [made] = convert([row | {"t": None}], **columns)
    assert made.ranking == [["a"]]
    assert problem(row | {"t": "x"}, **columns) == "t: got 'x', want a number"
    assert problem(row | {"t": "inf"}, **columns) == "t: got 'inf', want a number"
    assert problem(row | {"s": "", "t": ""}, **columns).startswith("s: got nothing, want a number for each response")


def test_responses_and_scores_in_lists_and_kinds_without_judgement():
    row = {"q": "?", "r": [{"t": "x", "s": 3, "m": "p"}, {"t": "y", "s": 9, "m": "q"}]}
    [made] = convert([row], prompt="q", responses="r.*.t", scores="r.*.s")
    assert made.ranking == B and [one.text for one in made.responses] == ["x", "y"]
    assert made.metadata["scores"] == {"a": 3, "b": 9}
    [made] = convert([{"q": "?", "r": '["x", "y"]', "s": "[1, 2]"}], prompt="q", responses="r", scores="s")
    assert made.ranking == B
    told = problem({"q": "?", "r": ["x", "y"], "s": [1]}, prompt="q", responses="r", scores="s")
    assert "want 2 scores, one per response" in told
    assert "want a list, or one column per response" in problem({"q": "?", "r": "x"}, prompt="q", responses="r")
    row = {"q": " Hi ", "a": "1st", "b": "2nd", "who": "u", "by": "l", "n": 5}
    [prompt] = convert([row], prompt="q", user="who", id="n", labeler="by")
    assert (prompt.kind, prompt.id, prompt.user, prompt.prompt[0].content) == ("prompt", "5", "u", " Hi ")
    assert prompt.metadata == {"labeler": "l", "a": "1st", "b": "2nd"}
    [demo] = convert([row], prompt="q", response="a", labeler="by", user="who", system="b")
    assert (demo.kind, demo.response, demo.labeler, demo.id) == ("demonstration", "1st", "l", "t.csv:1")
    assert [(turn.role, turn.content) for turn in demo.prompt] == [("system", "2nd"), ("user", " Hi ")]
    assert demo.metadata == {"user": "u", "n": 5}
    [task] = convert([row], **PAIR, user="who")
    assert (task.kind, task.ranking, task.pairs, len(task.responses)) == ("ranking", None, None, 2)
    assert task.metadata["user"] == "u"


def test_prompts_of_several_columns_messages_and_paths():
    chat = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}, {"from": "human", "value": "No."}]
    first, second = convert([{"i": " Do it. ", "x": ""}, {"i": "Do it.", "x": "To this\n"}], prompt=["i", "x"])
    assert (first.prompt[0].content, second.prompt[0].content) == ("Do it.", "Do it.\n\nTo this")
    [made] = convert([{"c": json.dumps(chat)}], prompt="c")
    assert [turn.role for turn in made.prompt] == ["user", "assistant", "user"]
    assert problem({"i": " ", "x": "", "n": 1}, prompt=["i", "x"]).startswith("prompt: got no text")
    assert 'its last turn is "assistant"' in problem({"c": chat[:2]}, prompt="c")
    assert problem({"c": {"t": "x"}}, prompt="c") == "c: got {'t': 'x'}, want text"
    row = {"a.b": "dotted", "a": {"b": "nested", "c d": [["x"], {"y": "deep"}]}, "r": "answer"}
    for path, text in {"a.b": "dotted", "a.c d.1.y": "deep", "a.c d.0.0": "x", "a.c d.-1.y": "deep"}.items():
        assert convert([row], prompt=path, response="r")[0].prompt[0].content == text


def test_a_column_that_is_not_there_names_its_neighbours_before_the_first_row(tmp_path, imported):
    rows = [{"question": "?", "answers": [{"text": "x"}], "Response A": "x", "response_b": "y"}]
    with pytest.raises(UserError) as caught:
        prepared(rows, prompt="qestion", responses=["response a", "answer.0.text"])
    assert str(caught.value) == (
        "columns.prompt=qestion: t.csv has no such column (did you mean 'question'?); "
        "columns.responses=response a: t.csv has no such column (did you mean 'response_b'?); "
        "columns.responses=answer.0.text: t.csv has no such column (did you mean 'answers'?)"
    )
    (tmp_path / "t.csv").write_text("q;a;b;w\n1?;x;y;0\n2?;x;y;1\n3?;x\n4?;x;y;2\n")
    columns = ["columns.prompt=q", "columns.responses=[a,b]", "columns.winner=w"]
    records, _, report = imported(tmp_path / "t.csv", "format=table", *columns)
    found = sorted((one.id, one.ranking) for one in records)
    assert found == [("t.csv:1", TIE), ("t.csv:2", A), ("t.csv:4", B)]
    assert report["counts"] == {"input": 4, "accepted": 3, "duplicates": 0, "filtered": 0, "rejected": 1}
    why = "asked for; columns divided by a semicolon; w: numbers: 1 the first, 2 the second, 0 a tie"
    assert report["files"][0]["why"] == why

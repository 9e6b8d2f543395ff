import gzip
import json

import pytest

from rlhf.data.comparisons import load_comparisons
from rlhf.data.demonstrations import load_demonstrations
from rlhf.data.importers import formats, load_all
from rlhf.data.records import Message
from rlhf.errors import UserError

ALPACA = {"instruction": "Name a colour.", "input": "", "output": "Blue."}
HH = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go away"}
NATIVE = {"kind": "demonstration", "id": "d-1", "prompt": "Hi", "response": "Hello"}
QA = {
    "question": "Who?",
    "passages": [["T", "T\n\nFirst.", "Second. "], ["U", "Third."]],
    "gold": "g",
    "prediction 1": "w",
    "prediction 2": "x",
    "prediction 3": "y",
    "prediction 4": "z",
    "feedback": {"errors": []},
    "preference": [1, 1, 0, 0, 2, 2],
}
USER = {"role": "user", "content": "Hi"}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


TRL = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}


def turns(record) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in record.prompt]


def texts(record) -> list[str]:
    return [response.text for response in record.responses]


@pytest.mark.parametrize(
    ("row", "format", "why"),
    [
        (ALPACA, "alpaca", "keys instruction and output"),
        (HH, "hh", 'dialogues of "Human:" and "Assistant:"'),
        (NATIVE, "native", "key kind is 'demonstration'"),
        (QA, "qa_feedback", "prediction 1 … 4"),
        (TRL, "trl", "hold strings, with a prompt"),
        (
            {"chosen": [USER, answer("a")], "rejected": [USER, answer("b")]},
            "trl",
            "hold messages, without a prompt",
        ),
        ({"prompt": [USER], "topic": "x"}, "trl", "key prompt and no answer"),
        ({"prompt": "Hi", "completion": "Hello"}, "trl", "keys prompt and completion"),
    ],
)
def test_a_format_is_recognised_and_said_why(write_jsonl, row, format, why):
    _, info = load_all(write_jsonl([row]))
    assert info.files[0].format == format
    assert why in info.files[0].why and why in info.describe()[0]
    assert sum(f.recognise(row) is not None for f in formats().values()) == 1
    assert load_all(write_jsonl([row]), format)[1].files[0].why == "asked for"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER]},
        {"prompt": "x", "chosen_response": "y", "rejected_response": "z"},
        {"instruction": "x", "output_1": "y", "output_2": "z"},
        {"prompt": {"text": "x"}, "message_tree_id": "y"},
        {"conversations": [], "chosen": {"from": "gpt"}, "rejected": {"from": "gpt"}},
    ],
)
def test_a_foreign_shape_is_refused_with_its_keys_and_the_formats(write_jsonl, row):
    with pytest.raises(UserError) as caught:
        load_all(write_jsonl([row]))
    message = str(caught.value)
    assert f"no format recognised: rows have the keys {', '.join(row)}. Formats are alpaca: keys" in message
    assert "\n" not in message and all(f"{name}: " in message for name in formats())


def test_the_wrong_format_is_refused_with_what_it_looks_like(write_jsonl):
    with pytest.raises(UserError, match=r"not of data.format=hh, .* looks like alpaca .*: set data.format=alpaca"):
        load_all(write_jsonl([ALPACA]), "hh")
    with pytest.raises(UserError, match=r"data.format=nope: no such format: want auto, alpaca, hh, native"):
        load_all(write_jsonl([ALPACA]), "nope")


def test_an_empty_file_and_one_of_another_kind_are_refused(write_jsonl, tmp_path):
    with pytest.raises(UserError, match=r"empty.jsonl: the file is empty"):
        load_all(write_jsonl([], "empty.jsonl"))
    with pytest.raises(UserError, match=r"no ranking record in the data: .* 1 rows: 1 demonstration records"):
        load_comparisons(write_jsonl([ALPACA]))
    with pytest.raises(UserError, match="no demonstration record in the data"):
        load_demonstrations(write_jsonl([HH]))
    (tmp_path / "noise.jsonl").write_bytes(b"\x93NUMPY\nxx\n")
    with pytest.raises(UserError, match=r"noise.jsonl:1: byte 0x93 at offset 0"):
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
        f"6 of 8 rows cannot be used: mend or remove them: {path}:2: responses: missing; "
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
    assert info.records == {"demonstration": 2, "ranking": 1} and info.rows == 3
    assert info.sha256 != load_all(tmp_path / "sub-a.jsonl")[1].sha256


def test_the_hash_is_that_of_the_file(write_jsonl):
    import hashlib

    path = write_jsonl([ALPACA])
    assert load_all(path)[1].files[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_native_records_come_as_they_are(write_jsonl):
    ranking = {
        "kind": "ranking",
        "id": "r",
        "prompt": [USER],
        "responses": [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}],
        "ranking": [["b"], ["a"]],
        "extra": 1,
    }
    records, info = load_all(write_jsonl([NATIVE, ranking, {"kind": "prompt", "prompt": "Yes?", "user": "u"}]))
    assert [r.kind for r in records] == ["demonstration", "ranking", "prompt"]
    assert records[1].metadata == {"extra": 1} and records[1].ranks() == [1, 0]
    assert records[2].id == "data.jsonl:3" and records[2].user == "u"
    assert info.records == {"demonstration": 1, "ranking": 1, "prompt": 1}


def test_alpaca(tmp_path):
    rows = [
        ALPACA | {"source": "s"},
        {"instruction": " Sum up. ", "input": "A text.", "response": "Short."},
        {"instruction": "Who?", "context": "Ann came.", "response": "Ann.", "category": "qa"},
    ]
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(rows).encode()))
    records, _ = load_demonstrations(path)
    assert [turns(record) for record in records] == [
        [("user", "Name a colour.")],
        [("user", "Sum up.\n\nA text.")],
        [("user", "Who?\n\nAnn came.")],
    ]
    assert [record.response for record in records] == ["Blue.", "Short.", "Ann."]
    assert [record.metadata for record in records] == [{"source": "s"}, {}, {"category": "qa"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": ""}, "output: got no text, want the demonstrated answer: remove the row"),
        ({"output": None}, "output: got None, want a string"),
        ({"input": ["x"]}, "input: got ['x'], want a string"),
        ({"instruction": " "}, "prompt: got no text, want at least one turn that says something"),
        ({"response": "x"}, "output: got output and response, want one of output and response"),
    ],
)
def test_a_bad_alpaca_row(write_jsonl, change, message):
    path = write_jsonl([ALPACA, ALPACA | change])
    with pytest.raises(UserError) as caught:
        load_all(path)
    assert str(caught.value).endswith(f"1 of 2 rows cannot be used: mend or remove them: {path}:2: {message}")


def hh(before: str, chosen: str, rejected: str) -> dict:
    return {
        "chosen": f"{before}\n\nAssistant:{chosen}",
        "rejected": f"{before}\n\nAssistant:{rejected}",
        "n": 1,
    }


DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Yes?\nSay.\n\nHuman: Who\n\nare you?"


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        (
            hh(DIALOGUE, " I am Ann", " I am Bob"),
            [("user", "Hi"), ("assistant", "Yes?\nSay."), ("user", "Who\n\nare you?")],
            ["I am Ann", "I am Bob"],
        ),
        (hh("\n\nHuman: Hi", "", " No"), [("user", "Hi")], ["", "No"]),
        (hh("\n\nHuman: Hi", " Yes", " Yes, sure"), [("user", "Hi")], ["Yes", "Yes, sure"]),
        # an answer that goes on after a marker of its own
        (
            hh("\n\nHuman: Hi", " No.\n\nAssistant: Well, yes", " No."),
            [("user", "Hi")],
            ["No.\n\nAssistant: Well, yes", "No."],
        ),
        (
            hh("\n\nHuman: Hi\n\nAssistant: A\n\nAssistant: B\n\nHuman: C", " D", " E"),
            [("user", "Hi"), ("assistant", "A\n\nB"), ("user", "C")],
            ["D", "E"],
        ),
        (hh("Human: Hi", " A", " B"), [("user", "Hi")], ["A", "B"]),
    ],
)
def test_hh(write_jsonl, row, prompt, answers):
    [record], info = load_comparisons(write_jsonl([row]))
    assert info.files[0].format == "hh"
    assert turns(record) == prompt
    assert texts(record) == answers
    assert record.pair_list() == [(0, 1)] and record.metadata == {"n": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {
                "chosen": DIALOGUE + "\n\nAssistant: x",
                "rejected": "\n\nHuman: Hi\n\nAssistant: z\n\nHuman: b\n\nAssistant: c",
            },
            "chosen: chosen and rejected part before the last answer",
        ),
        (
            {"chosen": "\n\nHuman: Hi", "rejected": "\n\nHuman: Hi"},
            'chosen: chosen and rejected share no "Assistant:" turn',
        ),
        (
            {"chosen": "Hello", "rejected": HH["rejected"]},
            "chosen: got 'Hello', want a dialogue that begins with",
        ),
        ({"chosen": HH["chosen"], "rejected": None}, "rejected: got None, want a string"),
        ({"chosen": HH["chosen"]}, "rejected: missing"),
    ],
)
def test_a_bad_hh_row(write_jsonl, row, message):
    path = write_jsonl([HH, row])
    with pytest.raises(UserError) as caught:
        load_all(path)
    assert f"{path}:2: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        (TRL, [("user", "Hi")], ["Hello", "Go away"]),
        (
            {"chosen": "The sky is green.", "rejected": "The sky is grey."},
            [("user", "The sky is")],
            ["green.", "grey."],
        ),
        (
            {"chosen": "Q: hi A: yes", "rejected": "Q: hi A: yes indeed"},
            [("user", "Q: hi A:")],
            ["yes", "yes indeed"],
        ),
        (
            {
                "prompt": [{"role": "system", "content": "S"}, USER],
                "chosen": [answer("a")],
                "rejected": [answer("b")],
            },
            [("system", "S"), ("user", "Hi")],
            ["a", "b"],
        ),
        (
            {
                "chosen": [USER, answer("q"), USER, answer("a")],
                "rejected": [USER, answer("q"), USER, answer("b")],
            },
            [("user", "Hi"), ("assistant", "q"), ("user", "Hi")],
            ["a", "b"],
        ),
        (
            {"prompt": "Hi", "chosen": [USER, answer("a")], "rejected": [USER, answer("b")]},
            [("user", "Hi")],
            ["a", "b"],
        ),
        (
            {"chosen": [USER, answer("same")], "rejected": [USER, answer("same")]},
            [("user", "Hi")],
            ["same", "same"],
        ),
    ],
)
def test_trl(write_jsonl, row, prompt, answers):
    [record], info = load_comparisons(write_jsonl([row | {"score_chosen": 3}]))
    assert info.files[0].format == "trl"
    assert turns(record) == prompt
    assert texts(record) == answers
    assert record.pair_list() == [(0, 1)] and record.metadata == {"score_chosen": 3}


def test_trl_completions_and_prompts(write_jsonl):
    rows = [
        {"prompt": "Hi", "completion": "Hello", "n": 1},
        {"prompt": [USER], "completion": [answer("Yes")]},
    ]
    records, _ = load_demonstrations(write_jsonl(rows))
    assert [(turns(r), r.response, r.metadata) for r in records] == [
        ([("user", "Hi")], "Hello", {"n": 1}),
        ([("user", "Hi")], "Yes", {}),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"chosen": "x", "rejected": "y"},
            "chosen: chosen and rejected share no beginning that could be the prompt",
        ),
        ({"prompt": "x", "chosen": "x", "rejected": [answer("b")]}, "want a string or a list of messages"),
        (
            {"chosen": [USER, answer("a"), USER], "rejected": [USER, answer("b")]},
            "chosen: got turns assistant, user after what both share, want one assistant turn",
        ),
        (
            {"chosen": [USER, answer("a")], "rejected": [USER, USER]},
            "rejected: got turns user after what both share",
        ),
        ({"chosen": [answer("a")], "rejected": [answer("b")]}, "prompt: it has no turns"),
        ({"prompt": "x", "completion": [USER]}, "completion: got turns user, want one assistant turn"),
    ],
)
def test_a_bad_trl_row(write_jsonl, row, message):
    path = write_jsonl([TRL, row])
    with pytest.raises(UserError) as caught:
        load_all(path)
    assert f"{path}:2: " in str(caught.value) and message in str(caught.value)


def test_qa_feedback_joins_six_judgements_into_one_ranking(write_jsonl):
    # 1 over 2, 1 over 3, 1 = 4, 2 = 3, 4 over 2, 4 over 3
    [record], _ = load_comparisons(write_jsonl([QA]))
    assert record.ranking == [["1", "4"], ["2", "3"]]
    assert record.ranks() == [0, 1, 1, 0] and record.pairs is None
    assert turns(record) == [("user", "T: First. Second.\n\nU: Third.\n\nWho?")]
    assert texts(record) == ["w", "x", "y", "z"]
    assert record.metadata == {"gold": "g", "feedback": {"errors": []}}


def test_qa_feedback_keeps_pairs_that_are_no_weak_order(write_jsonl):
    # 1 = 2 and 2 = 3, but 1 over 3; 4 is under all
    [record], _ = load_comparisons(write_jsonl([QA | {"preference": [0, 1, 1, 0, 1, 1], "passages": []}]))
    assert record.ranking is None
    assert record.pairs == [["1", "3"], ["1", "4"], ["2", "4"], ["3", "4"]]
    assert record.metadata["ties"] == [["1", "2"], ["2", "3"]]
    assert record.pair_list() == [(0, 2), (0, 3), (1, 3), (2, 3)]
    assert record.prompt == [Message(role="user", content="Who?")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"preference": [1, 2, 1, 1, 1, 1]},
            "preference: the judgements go in a circle, 1 over 2 over 3 over 1",
        ),
        ({"preference": [1, 1]}, "preference: got [1, 1], want six of 0 (tie), 1 (first), 2 (second)"),
        ({"preference": [1, 1, 1, 1, 1, 3]}, "preference: got [1, 1, 1, 1, 1, 3], want six of"),
        ({"passages": ["x"]}, "passages: got 'x', want lists of a title and sentences"),
        ({"prediction 2": None}, "prediction 2: got None, want a string"),
    ],
)
def test_a_bad_qa_feedback_row(write_jsonl, change, message):
    path = write_jsonl([QA, QA | change])
    with pytest.raises(UserError) as caught:
        load_all(path)
    assert f"{path}:2: {message}" in str(caught.value)

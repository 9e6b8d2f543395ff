"""Formats that demonstrate or ask: what each good row becomes, and what is said of each kind of bad one."""

import gzip
import json

import pytest

from rlhf.data.label_files import FileInfo, load_demonstrations, read
from tests.data.importers.samples import USER, answer, says

ALPACA = {"instruction": "Name a colour.", "input": "", "output": "Blue."}
SHAREGPT = {"id": "x", "conversations": [says("human", "Hi"), says("gpt", "Hello")]}
MESSAGES = {"messages": [USER, answer("Blue.")]}
SEED = {"id": "seed_0", "name": "n", "instruction": " Add. ", "instances": [{"input": "1 2", "output": "3"}]}
QA = {"question": "1 + 1?", "answer": "2\n#### 2"}
DECODED = {"id": 0, "instruction": "Hi", "text": "Hello", "decoded": "Hum"}
TURNS = {"question_id": 81, "category": "c", "turns": ["Say a.", "Say b."], "reference": ["a", "b"]}
NO_ANSWER = "got no text, want the demonstrated answer: remove the row"


def turns(record):
    return [(message.role, message.content) for message in record.prompt]


def test_alpaca(tmp_path):
    rows = [
        ALPACA | {"source": "s", "id": 3},
        {"instruction": " Sum up. ", "input": "A text.", "response": " Short.\n"},
        {"instruction": "Who?", "context": "Ann came.", "response": "Ann.", "category": "qa"},
        {"instruction": "解释。", "input": "", "output": "细胞 &lt;b&gt;", "system": "S", "history": [["Hi", "Yes?"]], "id": "z"},
    ]  # fmt: skip
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(rows).encode()))
    records, _ = load_demonstrations(path)
    assert [turns(record) for record in records] == [
        [("user", "Name a colour.")],
        [("user", "Sum up.\n\nA text.")],
        [("user", "Who?\n\nAnn came.")],
        [("system", "S"), ("user", "Hi"), ("assistant", "Yes?"), ("user", "解释。")],
    ]
    assert [record.response for record in records] == ["Blue.", " Short.\n", "Ann.", "细胞 &lt;b&gt;"]
    assert [record.metadata for record in records] == [{"source": "s", "id": 3}, {}, {"category": "qa"}, {}]
    assert [record.id for record in records] == ["a.json.gz:1", "a.json.gz:2", "a.json.gz:3", "z"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": ""}, "output: got no text, want the demonstrated answer: remove the row"),
        ({"output": None}, "output: got None, want a string"),
        ({"input": ["x"]}, "input: got ['x'], want a string"),
        ({"instruction": " "}, "prompt: got no text, want at least one turn that says something"),
        ({"history": ["x"]}, "history: got ['x'], want a list of [request, answer]"),
        ({"history": [["x", 3]]}, "history.0: got 3, want text or a list of text parts"),
    ],
)
def test_a_bad_alpaca_row(rejects, change, message):
    assert rejects("alpaca", ALPACA, ALPACA | change) == [(message.split(":")[0], message)]


def test_sharegpt_demonstrates_the_last_answer_of_a_dialogue(load):
    dialogue = [
        says("human", "Hi"),
        says("chatgpt", " A\n"),
        says("human", "<div>B</div>"),
        says("gpt", "C &amp; 你好"),
    ]
    [record] = load("sharegpt", {"id": "x-1", "conversations": dialogue, "system": "S", "tools": "none"})
    assert turns(record) == [("system", "S"), ("user", "Hi"), ("assistant", " A\n"), ("user", "<div>B</div>")]
    assert record.response == "C &amp; 你好" and record.id == "x-1" and record.metadata == {"tools": "none"}


def test_what_follows_the_last_answer_is_kept(load):
    [record] = load("sharegpt", {"id": 7, "conversations": [*SHAREGPT["conversations"], says("human", "More")]})
    assert turns(record) == [("user", "Hi")] and record.response == "Hello" and record.id == "data.jsonl:1"
    assert record.metadata == {"id": 7, "later_turns": [{"role": "user", "content": "More"}]}


def test_a_dialogue_without_an_answer_is_a_prompt(load):
    [record] = load("sharegpt", {"conversations": [says("system", "S"), says("human", "Hi")]})
    assert record.kind == "prompt" and turns(record) == [("system", "S"), ("user", "Hi")]


@pytest.mark.parametrize(
    ("conversations", "field", "message"),
    [
        ([], "conversations", "got [], want a list of turns"),
        (
            [says("human", "Hi"), says("tool", "x"), says("gpt", "y")],
            "conversations.1.from",
            "got 'tool', want system, user (human) or assistant (gpt): remove the row",
        ),
        ([says("human", "Hi"), "x"], "conversations.1", "got 'x', want a turn with {role, content} or {from, value}"),
        ([says("human", 3)], "conversations.0.value", "got 3, want text or a list of text parts"),
        ([says("gpt", "x")], "prompt", 'it has no turns: want turns that end with role "user"'),
        (
            [says("human", "x"), says("gpt", "y"), says("gpt", "z")],
            "prompt",
            'its last turn is "assistant": want turns that end with role "user"',
        ),
        ([says("human", "x"), says("gpt", " ")], "conversations", NO_ANSWER),
    ],
)
def test_a_bad_sharegpt_row(rejects, conversations, field, message):
    assert rejects("sharegpt", SHAREGPT, {"conversations": conversations}) == [(field, f"{field}: {message}")]


def test_messages_with_typed_parts_and_weights(load):
    parts = [{"type": "text", "value": "Name "}, {"type": "text", "text": "a colour."}]
    row = {
        "messages": [
            {"role": "user", "content": parts, "loss_weight": 0.0},
            {"role": "assistant", "content": [{"type": "text", "value": "Blue."}], "loss_weight": 1.0},
            {"role": "user", "content": "Why?", "loss_weight": 0.0},
            {"role": "assistant", "content": "Ha.", "loss_weight": 0.0},
        ],
        "topic": "art",
    }
    [record] = load("messages", row)
    assert turns(record) == [("user", "Name a colour.")] and record.response == "Blue."
    assert record.prompt[0].model_extra == {"loss_weight": 0.0}
    assert record.metadata == {
        "topic": "art",
        "answer": {"loss_weight": 1.0},
        "later_turns": [
            {"role": "user", "content": "Why?", "loss_weight": 0.0},
            {"role": "assistant", "content": "Ha.", "loss_weight": 0.0},
        ],
    }


def test_a_part_with_more_than_its_text_is_kept_whole(load):
    part = {"type": "text", "text": "Hi", "cache": True}
    [record] = load("messages", {"messages": [{"role": "user", "content": [part]}, answer("a") | {"weight": 1}]})
    assert record.prompt[0].model_extra == {"parts": [part]} and record.metadata == {"answer": {"weight": 1}}


@pytest.mark.parametrize(
    ("messages", "field", "message"),
    [
        (
            [USER, answer("a") | {"weight": 0}],
            "messages",
            "every assistant turn has weight 0, want one to learn: remove the row",
        ),
        ([{"role": "user", "content": None}], "messages.0.content", "got None, want text or a list of text parts"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "messages.0.content.0",
            "got {'type': 'image'}, want a part of type text: remove the row",
        ),
        (
            [USER, {"role": "function", "content": "x"}],
            "messages.1.role",
            "got 'function', want system, user (human) or assistant (gpt): remove the row",
        ),
        (
            [{"content": "x"}],
            "messages.0.role",
            "got None, want system, user (human) or assistant (gpt): remove the row",
        ),
    ],
)
def test_a_bad_messages_row(rejects, messages, field, message):
    assert rejects("messages", MESSAGES, {"messages": messages}) == [(field, f"{field}: {message}")]


def test_self_instruct_gives_a_demonstration_an_instance(load):
    both = [{"input": "1 2", "output": "3"}, {"input": "", "output": " 7 ", "note": "odd"}]
    first, second = load("self_instruct", SEED | {"instances": both})
    assert turns(first) == [("user", "Add.\n\n1 2")] and first.response == "3" and first.id == "seed_0.0"
    assert turns(second) == [("user", "Add.")] and second.response == " 7 " and second.id == "seed_0.1"
    assert first.metadata == {"name": "n"} and second.metadata == {"name": "n", "note": "odd"}
    [alone] = load("self_instruct", SEED)
    assert alone.id == "seed_0"


@pytest.mark.parametrize(
    ("instances", "field", "message"),
    [
        ([], "instances", "got [], want a list of {input, output}"),
        (["x"], "instances.0", "got 'x', want {input, output}, both strings"),
        ([{"input": "x"}], "instances.0", "got {'input': 'x'}, want {input, output}, both strings"),
        (
            [{"input": "", "output": "3"}, {"input": "", "output": " "}],
            "instances.1.output",
            "got no text, want the demonstrated answer: remove the row",
        ),
    ],
)
def test_a_bad_self_instruct_row(rejects, instances, field, message):
    assert rejects("self_instruct", SEED, SEED | {"instances": instances}) == [(field, f"{field}: {message}")]


def test_a_bad_instance_does_not_take_the_good_ones_with_it(write_jsonl):
    from rlhf.data.inputs import Source

    path = write_jsonl([SEED | {"instances": [{"input": "", "output": ""}, {"input": "", "output": "3"}]}])
    [made] = read(Source(str(path), path), None, FileInfo(""))
    [bad], [good] = made.rejects, made.records
    assert bad.field == "instances.0.output"
    assert good.response == "3" and good.id == "seed_0.1"


@pytest.mark.parametrize(
    ("format", "row", "prompt", "response", "metadata"),
    [
        ("question_answer", QA | {"level": 1}, "1 + 1?", "2\n#### 2", {"level": 1}),
        ("decoded", DECODED, "Hi", "Hello", {"decoded": "Hum", "id": 0}),
        ("trl", {"prompt": "Hi", "completion": "Hello", "n": 1}, "Hi", "Hello", {"n": 1}),
        ("trl", {"prompt": [USER], "completion": [answer("Yes")]}, "Name a colour.", "Yes", {}),
        ("trl", {"prompt": "\n\nHuman: Ho\n\nAssistant:", "completion": " Yes"}, "Ho", " Yes", {}),
    ],
)
def test_a_request_and_its_answer(load, format, row, prompt, response, metadata):
    [record] = load(format, row)
    assert record.kind == "demonstration" and turns(record) == [("user", prompt)]
    assert record.response == response and record.metadata == metadata


@pytest.mark.parametrize(
    ("format", "good", "change", "message"),
    [
        ("question_answer", QA, {"answer": " "}, f"answer: {NO_ANSWER}"),
        ("question_answer", QA, {"question": None}, "question: got None, want a string"),
        ("question_answer", QA, {"question": ""}, "prompt: got no text, want at least one turn that says something"),
        ("decoded", DECODED, {"text": ""}, f"text: {NO_ANSWER}"),
        ("decoded", DECODED, {"instruction": 3}, "instruction: got 3, want a string"),
        ("mt_bench", TURNS, {"turns": []}, "turns: got [], want a list of texts"),
        ("mt_bench", TURNS, {"turns": "Say a."}, "turns: got 'Say a.', want a list of texts"),
        ("mt_bench", TURNS, {"turns": [" "]}, "prompt: got no text, want at least one turn that says something"),
    ],
)
def test_a_bad_row_of_the_plain_formats(rejects, format, good, change, message):
    assert rejects(format, good, good | change) == [(message.split(":")[0], message)]


def test_mt_bench_gives_the_first_turn_as_a_prompt(load):
    [record] = load("mt_bench", TURNS)
    assert record.kind == "prompt" and turns(record) == [("user", "Say a.")]
    assert record.metadata == {
        "question_id": 81,
        "category": "c",
        "reference": ["a", "b"],
        "later_turns": ["Say b."],
    }


def test_a_prompt_alone(load):
    row = {"prompt": "Hi", "user": "u", "id": 3, "metadata": {"a": 1}, "topic": "x"}
    [record] = load("trl", row)
    assert record.kind == "prompt" and record.user == "u" and record.metadata == {"a": 1, "id": 3, "topic": "x"}


def test_native_records_come_as_they_are(load):
    demonstration = {"kind": "demonstration", "id": "d-1", "prompt": "Hi", "response": "Hello"}
    ranking = {
        "kind": "ranking",
        "id": "r",
        "prompt": [USER],
        "responses": [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}],
        "ranking": [["b"], ["a"]],
        "extra": 1,
    }
    records = load("native", demonstration, ranking, {"kind": "prompt", "prompt": "Yes?", "user": "u"})
    assert [record.kind for record in records] == ["demonstration", "ranking", "prompt"]
    assert records[1].metadata == {"extra": 1} and records[1].ranks() == [1, 0]
    assert records[2].id == "data.jsonl:3" and records[2].user == "u"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"kind": "rank", "prompt": "x"}, "kind: got 'rank', want demonstration, ranking, prompt"),
        ({"prompt": "x"}, "kind: missing"),
        ({"kind": "ranking", "prompt": "x"}, "responses: missing"),
    ],
)
def test_a_bad_native_row(rejects, bad, message):
    assert rejects("native", {"kind": "prompt", "prompt": "Hi"}, bad) == [(message.split(":")[0], message)]

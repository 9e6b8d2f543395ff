"""Formats that demonstrate or ask: what each good row becomes, and what is said of each kind of bad one."""

import gzip
import json

import pytest

from rlhf.data.reading import load_demonstrations
from tests.data.importers.samples import ALPACA, DECODED, QUESTION, SEED, USER, answer, says, turns


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


def test_a_dialogue_without_an_answer_is_a_prompt(load):
    [record] = load("sharegpt", {"conversations": [says("system", "S"), says("human", "Hi")]})
    assert record.kind == "prompt" and turns(record) == [("system", "S"), ("user", "Hi")]


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


def test_self_instruct_gives_a_demonstration_an_instance(load):
    both = [{"input": "1 2", "output": "3"}, {"input": "", "output": " 7 ", "note": "odd"}]
    first, second = load("self_instruct", SEED | {"instances": both})
    assert turns(first) == [("user", "Add.\n\n1 2")] and first.response == "3" and first.id == "seed_0.0"
    assert turns(second) == [("user", "Add.")] and second.response == " 7 " and second.id == "seed_0.1"
    assert first.metadata == {"name": "n"} and second.metadata == {"name": "n", "note": "odd"}
    [alone] = load("self_instruct", SEED)
    assert alone.id == "seed_0"


@pytest.mark.parametrize(
    ("format", "row", "prompt", "response", "metadata"),
    [
        ("question_answer", QUESTION | {"level": 1}, "1 + 1?", "2\n#### 2", {"level": 1}),
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

"""Formats of pairs: what each good row becomes, and what is said of each kind of bad one."""

import time

import pytest

from rlhf.data.formats import FORMATS, BadRow
from tests.data.importers.samples import PAIR, SCORED, STACK, TRL, USER, answer, texts, turns

DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Yes?\nSay.\n\nHuman: Who\n\nare you?"


def hh(before, chosen, rejected):
    return {"chosen": f"{before}\n\nAssistant:{chosen}", "rejected": f"{before}\n\nAssistant:{rejected}", "n": 1}


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        (
            hh(DIALOGUE, " I am Ann", " I am Bob"),
            [("user", "Hi"), ("assistant", "Yes?\nSay."), ("user", "Who\n\nare you?")],
            ["I am Ann", "I am Bob"],
        ),
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
    ],
)
def test_hh(load, row, prompt, answers):
    [record] = load("hh", row)
    assert turns(record) == prompt and texts(record) == answers
    assert record.pair_list() == [(0, 1)] and record.metadata == {"n": 1}


@pytest.mark.parametrize(
    ("scores", "ranking"), [([1.0, 0.0], [["a"], ["b"]]), ([-2, 3], [["b"], ["a"]]), ([0.5, 0.5], [["a", "b"]])]
)
def test_hh_with_scores(load, scores, ranking):
    [record] = load("hh", SCORED | {"score": scores, "n": 1})
    assert record.ranking == ranking and texts(record) == ["Go away", "Hello"] and turns(record) == [("user", "Hi")]
    assert record.metadata == {"score": scores, "n": 1} and record.ratings == {}


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
            {"prompt": [{"role": "system", "content": "S"}, USER], "chosen": [answer("a")], "rejected": [answer("b")]},
            [("system", "S"), ("user", "Name a colour.")],
            ["a", "b"],
        ),
        (
            {"chosen": [USER, answer("q"), USER, answer("a")], "rejected": [USER, answer("q"), USER, answer("b")]},
            [("user", "Name a colour."), ("assistant", "q"), ("user", "Name a colour.")],
            ["a", "b"],
        ),
        # a prompt in the form of HH is a dialogue; one that does not end with the marker is text
        (
            TRL | {"prompt": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Go\n\nAssistant:"},
            [("user", "Hi"), ("assistant", "Yes?"), ("user", "Go")],
            ["Hello", "Go away"],
        ),
        (TRL | {"prompt": "\n\nHuman: Hi"}, [("user", "\n\nHuman: Hi")], ["Hello", "Go away"]),
    ],
)
def test_trl(load, row, prompt, answers):
    [record] = load("trl", row | {"score_chosen": 3})
    assert turns(record) == prompt and texts(record) == answers
    assert record.pair_list() == [(0, 1)] and record.metadata == {"score_chosen": 3}


def test_an_implicit_prompt_before_a_run_of_spaces_is_cut_at_once():
    """With a step that grows with the square of the spaces it takes a minute."""
    started = time.process_time()
    with pytest.raises(BadRow, match="share no beginning that could be the prompt"):
        list(FORMATS["trl"].convert({"chosen": "a" + " " * 500_000, "rejected": "a" + " " * 500_000 + "b"}))
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("row", "prompt", "answers", "metadata"),
    [
        (PAIR | {"n": 1}, [("user", "Hi")], ["Hello", "No"], {"n": 1}),
        (STACK, [("user", " Why?\n")], ["So.&nbsp;", "No."], {"qid": 4, "date": "2020"}),
        (
            {"system": "S", "question": "Hi", "chosen": "a", "rejected": "b", "id": 3},
            [("system", "S"), ("user", "Hi")],
            ["a", "b"],
            {"id": 3},
        ),
        (
            {"instruction": "Sum up.", "input": "Text.", "chosen": "a", "rejected": "b", "system": ""},
            [("user", "Sum up.\n\nText.")],
            ["a", "b"],
            {},
        ),
    ],
)
def test_pairs(load, row, prompt, answers, metadata):
    [record] = load("pairs", row)
    assert turns(record) == prompt and texts(record) == answers and record.metadata == metadata
    assert record.ranking == [["a"], ["b"]]

"""Argilla's exports: every annotator's answer."""

import pytest

from tests.data.importers.samples import ARGILLA_1, ARGILLA_2, USER, answer, turns

TWO = {"prompt": "Hi", "response-1": "a", "response-2": "b"}
THREE = TWO | {"response-3": "c"}


def row(fields, **answers):
    """A record with one annotator's answers."""
    values = {question.replace("_", "-"): [{"value": value, "user_id": "u"}] for question, value in answers.items()}
    return {"fields": fields, "responses": values}


def test_rankings_of_several_annotators(load):
    first, second = load("argilla", ARGILLA_1)
    assert turns(first) == turns(second) == [("user", "Name a colour.")]
    assert [(response.id, response.text) for response in first.responses] == [
        ("response-1", "Blue."),
        ("response-2", "Tree."),
    ]
    assert first.ranking == [["response-1"], ["response-2"]] and first.labeler == "u-1"
    assert second.ranking == [["response-2"], ["response-1"]] and second.labeler == "u-2"
    assert (first.id, second.id) == ("rec-1.0", "rec-1.1")
    assert first.metadata["question"] == "ranking" and first.metadata["answers"]["comment"] == "Easy."
    assert first.metadata["record"] == {"metadata": {"batch": 3}}
    assert first.metadata["left_out"] == {"u-3": {"comment": "Hm."}}


def test_ratings_and_flags_of_one_response(load):
    first, second = load("argilla", ARGILLA_2)
    assert first.ratings == {"response": 5} and first.flags == {} and first.labeler == "u-1"
    assert second.ratings == {"response": 2} and second.flags == {"response": ["too short"]}
    assert first.metadata["record"]["suggestions"] == {"quality": {"value": 3, "score": None, "agent": "m-1"}}
    assert first.pair_list() == [] and first.ranking is None


@pytest.mark.parametrize(
    ("fields", "answers", "judged"),
    [
        (TWO, {"rank": ["response-2", "response-1"]}, {"ranking": [["response-2"], ["response-1"]]}),
        # the best of three says nothing about the others
        (THREE, {"label": "response-2"}, {"pairs": [["response-2", "response-1"], ["response-2", "response-3"]]}),
        (TWO, {"preferred": 2}, {"ranking": [["response-2"], ["response-1"]]}),
        (TWO, {"rating_1": 3, "rating_2": 6}, {"ratings": {"response-1": 3, "response-2": 6}}),
        # outside of 1 to 7: the order only
        (TWO, {"score_1": 10, "score_2": 0}, {"ranking": [["response-1"], ["response-2"]], "ratings": {}}),
    ],
)
def test_what_orders_several_responses(load, fields, answers, judged):
    [record] = load("argilla", row(fields, **answers))
    for key, value in judged.items():
        assert getattr(record, key) == value


def test_chats(load):
    chat = [USER, answer("Blue."), USER]
    [record] = load("argilla", row({"chat": chat, "response_a": "x", "response_b": "y", "note": "n"}, label="a"))
    assert turns(record) == [("user", "Name a colour."), ("assistant", "Blue."), ("user", "Name a colour.")]
    assert record.ranking == [["response_a"], ["response_b"]] and record.metadata["fields"] == {"note": "n"}
    [record] = load("argilla", row({"chat": chat[:2]}, rating=7))
    assert turns(record) == [("user", "Name a colour.")] and record.ratings == {"chat": 7}
    assert record.responses[0].text == "Blue."


def test_what_annotators_wrote_are_demonstrations(load):
    [record] = load("argilla", row({"instruction": "Sum up.", "input": " A text. "}, answer="Short.", level="easy"))
    assert record.kind == "demonstration" and turns(record) == [("user", "Sum up.\n\n A text. ")]
    assert record.response == "Short." and record.labeler == "u" and record.metadata["question"] == "answer"

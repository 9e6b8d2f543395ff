"""Formats that judge several answers, or one: what each good row becomes, and what is said of each kind of bad one."""

import pytest

from tests.data.importers.samples import (
    AXES,
    COMPARISON,
    KTO,
    NECTAR,
    QA_FEEDBACK,
    ULTRAFEEDBACK,
    USER,
    WEBGPT,
    answer,
    says,
    texts,
    turns,
)


def test_qa_feedback_joins_six_judgements_into_one_ranking(load):
    # 1 over 2, 1 over 3, 1 = 4, 2 = 3, 4 over 2, 4 over 3
    [record] = load("qa_feedback", QA_FEEDBACK)
    assert record.ranking == [["1", "4"], ["2", "3"]]
    assert record.ranks() == [0, 1, 1, 0] and record.pairs is None
    assert turns(record) == [("user", "T: First. Second.\n\nU: Third.\n\nWho?")]
    assert texts(record) == ["w", "x", "y", "z"]
    assert record.metadata == {"gold": "g", "feedback": {"errors": []}}


def test_openai_comparisons(load):
    [record] = load("openai_comparisons", COMPARISON)
    assert turns(record) == [
        ("user", "SUBREDDIT: r/cats\n\nTITLE: Cat [question]\n\nPOST: My cat sits on the mat.\n\nTL;DR:")
    ]
    assert texts(record) == [" A cat sits.", " Dogs run."]  # the space at the beginning is the file's
    assert [response.policy for response in record.responses] == ["sup2", "ref"]
    assert record.ranking == [["b"], ["a"]] and record.labeler == "w-7"
    assert record.responses[1].metadata == {"note": "Off."}
    assert record.metadata == {"id": "t3_1", "batch": "batch3", "extra": {"confidence": 8}, "original_split": "valid1"}


def test_openai_ratings_on_axes_are_single_rated_responses(load):
    [record] = load("openai_comparisons", AXES)
    assert turns(record) == [("user", "Article:\n\nRain fell on Lima.\n\nTL;DR:")]
    assert record.ratings == {"a": 6} and record.ranking is None and record.pair_list() == []
    assert record.responses[0].policy == "sup4" and record.labeler == "w-8"
    assert record.metadata["axes"] == {"overall": 6, "accuracy": 7, "coverage": 5, "coherence": 7, "compatible": True}


def test_webgpt(load):
    [record] = load("webgpt", WEBGPT)
    assert turns(record) == [("user", "Why is the sky blue?")]
    assert texts(record) == ["Light scatters [1].", "Because of the air."]
    assert record.ranking == [["1"], ["0"]] and record.metadata == {"question": {"dataset": "eli5", "id": "q-1"}}
    assert record.responses[0].metadata == {
        "quotes": {"title": ["Sky"], "extract": ["Light scatters."]},
        "tokens": {"prefix": [1, 2], "completion": [3]},
        "score": -0.5,
    }
    [tie] = load("webgpt", WEBGPT | {"score_0": 0, "score_1": 0.0})
    assert tie.ranking == [["0", "1"]] and tie.pair_list() == []


def test_ultrafeedback(load):
    [record] = load("ultrafeedback", ULTRAFEEDBACK)
    # fine-grained 4.25, 1.5, 4.25; by overall_score the second would be best
    assert record.ranking == [["a", "c"], ["b"]] and record.ratings == {}
    assert [response.policy for response in record.responses] == ["m-1", "m-2", "m-3"]
    assert record.responses[0].metadata["custom_system_prompt"] == "Be brief."
    assert record.responses[0].metadata["overall_score"] == 8.0
    assert record.metadata == {
        "source": "made_up",
        "models": ["m-1", "m-2", "m-3"],
        "correct_answers": ["None"],
        "ranked_by": "fine-grained_score",
    }


@pytest.mark.parametrize(
    ("scores", "ranked_by", "ranking"),
    [
        # means (4 + 2) / 2 = 3 and 5, "N/A" left out
        (
            [
                {"annotations": {"helpfulness": {"Rating": "4"}, "honesty": {"Rating": "2"}}, "overall_score": 9},
                {"annotations": {"helpfulness": {"Rating": "5"}, "honesty": {"Rating": "N/A"}}, "overall_score": 1},
            ],
            "mean of the annotations' ratings",
            [["b"], ["a"]],
        ),
        ([{"overall_score": 9, "annotations": {}}, {"overall_score": "1"}], "overall_score", [["a"], ["b"]]),
        # one completion lacks the finer score, so it cannot order both
        ([{"overall_score": 2, "fine-grained_score": 5}, {"overall_score": 3}], "overall_score", [["b"], ["a"]]),
    ],
)
def test_ultrafeedback_is_ordered_by_the_first_score_that_all_have(load, scores, ranked_by, ranking):
    completions = [{"response": "x", "model": "m"} | score for score in scores]
    [record] = load("ultrafeedback", {"instruction": "Hi", "completions": completions})
    assert record.ranking == ranking and record.metadata == {"ranked_by": ranked_by}


def test_several_chosen_and_rejected(load):
    row = {"id": "7", "prompt": "Hi", "chosen": ["Hello", "Hey"], "rejected": ["No"], "subset": "Chat"}
    [record] = load("choices", row)
    assert record.id == "7" and texts(record) == ["Hello", "Hey", "No"] and record.metadata == {"subset": "Chat"}
    assert record.pair_list() == [(0, 2), (1, 2)]


def test_nectar(load):
    [record] = load("nectar", NECTAR)
    assert turns(record) == [("user", "Hi"), ("assistant", "Yes?"), ("user", "Name a colour.")]
    assert texts(record) == ["Blue.", "Tree.", "Red."] and record.ranking == [["a", "c"], ["b"]]
    assert [response.policy for response in record.responses] == ["m-1", "m-2", "m-3"]
    assert record.metadata == {"turns": 2, "num_responses": 3, "source": ["made_up"], "good_natured": True}
    unranked = NECTAR["answers"] + [{"answer": "Hm.", "model": None, "rank": None}]
    [record] = load("nectar", NECTAR | {"answers": unranked, "prompt": "Hi"})
    assert record.ranks() == [0, 1, 0, -1] and turns(record) == [("user", "Hi")]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (KTO, [("user", "Hi")]),
        (
            {"messages": [USER, answer("q"), USER, answer("Hello")], "label": True},
            [("user", "Name a colour."), ("assistant", "q"), ("user", "Name a colour.")],
        ),
        (
            {"conversations": [says("human", "Hi"), says("gpt", "Hello")], "system": "S", "label": True},
            [("system", "S"), ("user", "Hi")],
        ),
    ],
)
def test_kto(load, row, prompt):
    [record] = load("kto", row | {"n": 1})
    assert turns(record) == prompt and texts(record) == ["Hello"]
    assert record.ratings == {"a": 7} and record.pair_list() == [] and record.ranking is None
    assert record.metadata == {"label": True, "n": 1}


def test_kto_false_is_the_lowest_rating(load):
    [record] = load("kto", {"instruction": "Add.", "input": "1 2", "output": "5", "kto_tag": False})
    assert record.ratings == {"a": 1} and record.metadata == {"kto_tag": False}
    assert turns(record) == [("user", "Add.\n\n1 2")] and texts(record) == ["5"]

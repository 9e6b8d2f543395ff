"""What each good row of the public formats becomes: comparisons, pairs, and demonstrations."""

import gzip
import json
import time

import pytest

from rlhf.data.formats.shapes import BadRow
from rlhf.data.reading import FORMATS, load_demonstrations
from tests.data.importers import samples
from tests.data.importers.samples import USER, answer, says, texts, turns


def test_qa_feedback_joins_six_judgements_into_one_ranking(load):
    # 1 over 2, 1 over 3, 1 = 4, 2 = 3, 4 over 2, 4 over 3
    [record] = load("qa_feedback", samples.QA_FEEDBACK)
    assert record.ranking == [["1", "4"], ["2", "3"]]
    assert record.ranks() == [0, 1, 1, 0] and record.pairs is None
    assert turns(record) == [("user", "T: First. Second.\n\nU: Third.\n\nWho?")]
    assert texts(record) == ["w", "x", "y", "z"]
    assert record.metadata == {"gold": "g", "feedback": {"errors": []}}


def test_openai_comparisons_and_ratings_on_axes(load):
    [record] = load("openai_comparisons", samples.COMPARISON)
    post = "SUBREDDIT: r/cats\n\nTITLE: Cat [question]\n\nPOST: My cat sits on the mat.\n\nTL;DR:"
    assert turns(record) == [("user", post)]
    assert texts(record) == [" A cat sits.", " Dogs run."]  # the space at the beginning is the file's
    assert [response.policy for response in record.responses] == ["sup2", "ref"]
    assert record.ranking == [["b"], ["a"]] and record.labeler == "w-7"
    assert record.responses[1].metadata == {"note": "Off."}
    assert record.metadata == {"id": "t3_1", "batch": "batch3", "extra": {"confidence": 8}, "original_split": "valid1"}
    [record] = load("openai_comparisons", samples.AXES)
    assert turns(record) == [("user", "Article:\n\nRain fell on Lima.\n\nTL;DR:")]
    assert record.ratings == {"a": 6} and record.ranking is None and record.pair_list() == []
    assert record.responses[0].policy == "sup4" and record.labeler == "w-8"
    assert record.metadata["axes"] == {"overall": 6, "accuracy": 7, "coverage": 5, "coherence": 7, "compatible": True}


def test_webgpt(load):
    [record] = load("webgpt", samples.WEBGPT)
    assert turns(record) == [("user", "Why is the sky blue?")]
    assert texts(record) == ["Light scatters [1].", "Because of the air."]
    assert record.ranking == [["1"], ["0"]] and record.metadata == {"question": {"dataset": "eli5", "id": "q-1"}}
    said = {
        "quotes": {"title": ["Sky"], "extract": ["Light scatters."]},
        "tokens": {"prefix": [1, 2], "completion": [3]},
    }
    assert record.responses[0].metadata == said | {"score": -0.5}
    [tie] = load("webgpt", samples.WEBGPT | {"score_0": 0, "score_1": 0.0})
    assert tie.ranking == [["0", "1"]] and tie.pair_list() == []


def test_ultrafeedback(load):
    [record] = load("ultrafeedback", samples.ULTRAFEEDBACK)
    # fine-grained 4.25, 1.5, 4.25; by overall_score the second would be best
    assert record.ranking == [["a", "c"], ["b"]] and record.ratings == {}
    assert [response.policy for response in record.responses] == ["m-1", "m-2", "m-3"]
    assert record.responses[0].metadata["custom_system_prompt"] == "Be brief."
    assert record.responses[0].metadata["overall_score"] == 8.0
    assert [response.metadata.get("qualities") for response in record.responses] == [{"helpfulness": 4.0}, None, None]
    about = {"source": "made_up", "models": ["m-1", "m-2", "m-3"], "correct_answers": ["None"]}
    assert record.metadata == about | {"ranked_by": "fine-grained_score"}


@pytest.mark.parametrize(("scores", "ranked_by", "ranking"), [
    # means (4 + 2) / 2 = 3 and 5, "N/A" left out
    ([{"annotations": {"helpfulness": {"Rating": "4"}, "honesty": {"Rating": "2"}}, "overall_score": 9},
      {"annotations": {"helpfulness": {"Rating": "5"}, "honesty": {"Rating": "N/A"}}, "overall_score": 1}],
     "mean of the annotations' ratings", [["b"], ["a"]]),
    ([{"overall_score": 9, "annotations": {}}, {"overall_score": "1"}], "overall_score", [["a"], ["b"]]),
    # one completion lacks the finer score, so it cannot order both
    ([{"overall_score": 2, "fine-grained_score": 5}, {"overall_score": 3}], "overall_score", [["b"], ["a"]]),
])  # fmt: skip
def test_ultrafeedback_is_ordered_by_the_first_score_that_all_have(load, scores, ranked_by, ranking):
    completions = [{"response": "x", "model": "m"} | score for score in scores]
    [record] = load("ultrafeedback", {"instruction": "Hi", "completions": completions})
    assert record.ranking == ranking and record.metadata == {"ranked_by": ranked_by}


def test_several_chosen_and_rejected_and_nectar(load):
    row = {"id": "7", "prompt": "Hi", "chosen": ["Hello", "Hey"], "rejected": ["No"], "subset": "Chat"}
    [record] = load("choices", row)
    assert record.id == "7" and texts(record) == ["Hello", "Hey", "No"] and record.metadata == {"subset": "Chat"}
    assert record.pair_list() == [(0, 2), (1, 2)]
    [record] = load("nectar", samples.NECTAR)
    assert turns(record) == [("user", "Hi"), ("assistant", "Yes?"), ("user", "Name a colour.")]
    assert texts(record) == ["Blue.", "Tree.", "Red."] and record.ranking == [["a", "c"], ["b"]]
    assert [response.policy for response in record.responses] == ["m-1", "m-2", "m-3"]
    assert record.metadata == {"turns": 2, "num_responses": 3, "source": ["made_up"], "good_natured": True}
    unranked = samples.NECTAR["answers"] + [{"answer": "Hm.", "model": None, "rank": None}]
    [record] = load("nectar", samples.NECTAR | {"answers": unranked, "prompt": "Hi"})
    assert record.ranks() == [0, 1, 0, -1] and turns(record) == [("user", "Hi")]


@pytest.mark.parametrize(("row", "prompt"), [
    (samples.KTO, [("user", "Hi")]),
    ({"messages": [USER, answer("q"), USER, answer("Hello")], "label": True},
     [("user", "Name a colour."), ("assistant", "q"), ("user", "Name a colour.")]),
    ({"conversations": [says("human", "Hi"), says("gpt", "Hello")], "system": "S", "label": True},
     [("system", "S"), ("user", "Hi")]),
])  # fmt: skip
def test_kto(load, row, prompt):
    [record] = load("kto", row | {"n": 1})
    assert turns(record) == prompt and texts(record) == ["Hello"]
    assert record.ratings == {"a": 7} and record.pair_list() == [] and record.ranking is None
    assert record.metadata == {"label": True, "n": 1}


def test_kto_false_is_the_lowest_rating(load):
    [record] = load("kto", {"instruction": "Add.", "input": "1 2", "output": "5", "kto_tag": False})
    assert record.ratings == {"a": 1} and record.metadata == {"kto_tag": False}
    assert turns(record) == [("user", "Add.\n\n1 2")] and texts(record) == ["5"]


DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Yes?\nSay.\n\nHuman: Who\n\nare you?"


def hh(before, chosen, rejected):
    return {"chosen": f"{before}\n\nAssistant:{chosen}", "rejected": f"{before}\n\nAssistant:{rejected}", "n": 1}


@pytest.mark.parametrize(("row", "prompt", "answers"), [
    (hh(DIALOGUE, " I am Ann", " I am Bob"), [("user", "Hi"), ("assistant", "Yes?\nSay."), ("user", "Who\n\nare you?")],
     ["I am Ann", "I am Bob"]),
    (hh("\n\nHuman: Hi", " Yes", " Yes, sure"), [("user", "Hi")], ["Yes", "Yes, sure"]),
    # an answer that goes on after a marker of its own
    (hh("\n\nHuman: Hi", " No.\n\nAssistant: Well, yes", " No."), [("user", "Hi")], ["No.\n\nAssistant: Well, yes", "No."]),
    (hh("\n\nHuman: Hi\n\nAssistant: A\n\nAssistant: B\n\nHuman: C", " D", " E"),
     [("user", "Hi"), ("assistant", "A\n\nB"), ("user", "C")], ["D", "E"]),
])  # fmt: skip
def test_hh(load, row, prompt, answers):
    [record] = load("hh", row)
    assert turns(record) == prompt and texts(record) == answers
    assert record.pair_list() == [(0, 1)] and record.metadata == {"n": 1}


@pytest.mark.parametrize(
    ("scores", "ranking"), [([1.0, 0.0], [["a"], ["b"]]), ([-2, 3], [["b"], ["a"]]), ([0.5, 0.5], [["a", "b"]])]
)
def test_hh_with_scores(load, scores, ranking):
    [record] = load("hh", samples.SCORED | {"score": scores, "n": 1})
    assert record.ranking == ranking and texts(record) == ["Go away", "Hello"] and turns(record) == [("user", "Hi")]
    assert record.metadata == {"score": scores, "n": 1} and record.ratings == {}


@pytest.mark.parametrize(("row", "prompt", "answers"), [
    (samples.TRL, [("user", "Hi")], ["Hello", "Go away"]),
    ({"chosen": "The sky is green.", "rejected": "The sky is grey."}, [("user", "The sky is")], ["green.", "grey."]),
    ({"prompt": [{"role": "system", "content": "S"}, USER], "chosen": [answer("a")], "rejected": [answer("b")]},
     [("system", "S"), ("user", "Name a colour.")], ["a", "b"]),
    ({"chosen": [USER, answer("q"), USER, answer("a")], "rejected": [USER, answer("q"), USER, answer("b")]},
     [("user", "Name a colour."), ("assistant", "q"), ("user", "Name a colour.")], ["a", "b"]),
    # a prompt in the form of HH is a dialogue; one that does not end with the marker is text
    (samples.TRL | {"prompt": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Go\n\nAssistant:"},
     [("user", "Hi"), ("assistant", "Yes?"), ("user", "Go")], ["Hello", "Go away"]),
    (samples.TRL | {"prompt": "\n\nHuman: Hi"}, [("user", "\n\nHuman: Hi")], ["Hello", "Go away"]),
])  # fmt: skip
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


@pytest.mark.parametrize(("row", "prompt", "answers", "metadata"), [
    (samples.PAIR | {"n": 1}, [("user", "Hi")], ["Hello", "No"], {"n": 1}),
    (samples.STACK, [("user", " Why?\n")], ["So.&nbsp;", "No."], {"qid": 4, "date": "2020"}),
    ({"system": "S", "question": "Hi", "chosen": "a", "rejected": "b", "id": 3}, [("system", "S"), ("user", "Hi")],
     ["a", "b"], {"id": 3}),
    ({"instruction": "Sum up.", "input": "Text.", "chosen": "a", "rejected": "b", "system": ""},
     [("user", "Sum up.\n\nText.")], ["a", "b"], {}),
])  # fmt: skip
def test_pairs(load, row, prompt, answers, metadata):
    [record] = load("pairs", row)
    assert turns(record) == prompt and texts(record) == answers and record.metadata == metadata
    assert record.ranking == [["a"], ["b"]]


def test_alpaca(tmp_path):
    rows = [
        samples.ALPACA | {"source": "s", "id": 3},
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


def test_sharegpt_demonstrates_the_last_answer_of_a_dialogue_and_one_without_is_a_prompt(load):
    dialogue = [
        says("human", "Hi"), says("chatgpt", " A\n"), says("human", "<div>B</div>"), says("gpt", "C &amp; 你好"),
    ]  # fmt: skip
    [record] = load("sharegpt", {"id": "x-1", "conversations": dialogue, "system": "S", "tools": "none"})
    assert turns(record) == [("system", "S"), ("user", "Hi"), ("assistant", " A\n"), ("user", "<div>B</div>")]
    assert record.response == "C &amp; 你好" and record.id == "x-1" and record.metadata == {"tools": "none"}
    [record] = load("sharegpt", {"conversations": [says("system", "S"), says("human", "Hi")]})
    assert record.kind == "prompt" and turns(record) == [("system", "S"), ("user", "Hi")]


def test_messages_with_typed_parts_and_weights(load):
    parts = [{"type": "text", "value": "Name "}, {"type": "text", "text": "a colour."}]
    row = {"messages": [
        {"role": "user", "content": parts, "loss_weight": 0.0},
        {"role": "assistant", "content": [{"type": "text", "value": "Blue."}], "loss_weight": 1.0},
        {"role": "user", "content": "Why?", "loss_weight": 0.0},
        {"role": "assistant", "content": "Ha.", "loss_weight": 0.0},
    ], "topic": "art"}  # fmt: skip
    [record] = load("messages", row)
    assert turns(record) == [("user", "Name a colour.")] and record.response == "Blue."
    assert record.prompt[0].model_extra == {"loss_weight": 0.0}
    assert record.metadata == {"topic": "art", "answer": {"loss_weight": 1.0}, "later_turns": row["messages"][2:]}


def test_self_instruct_gives_a_demonstration_an_instance(load):
    both = [{"input": "1 2", "output": "3"}, {"input": "", "output": " 7 ", "note": "odd"}]
    first, second = load("self_instruct", samples.SEED | {"instances": both})
    assert turns(first) == [("user", "Add.\n\n1 2")] and first.response == "3" and first.id == "seed_0.0"
    assert turns(second) == [("user", "Add.")] and second.response == " 7 " and second.id == "seed_0.1"
    assert first.metadata == {"name": "n"} and second.metadata == {"name": "n", "note": "odd"}
    [alone] = load("self_instruct", samples.SEED)
    assert alone.id == "seed_0"


@pytest.mark.parametrize(("format", "row", "prompt", "response", "metadata"), [
    ("question_answer", samples.QUESTION | {"level": 1}, "1 + 1?", "2\n#### 2", {"level": 1}),
    ("decoded", samples.DECODED, "Hi", "Hello", {"decoded": "Hum", "id": 0}),
    ("trl", {"prompt": "Hi", "completion": "Hello", "n": 1}, "Hi", "Hello", {"n": 1}),
    ("trl", {"prompt": [USER], "completion": [answer("Yes")]}, "Name a colour.", "Yes", {}),
    ("trl", {"prompt": "\n\nHuman: Ho\n\nAssistant:", "completion": " Yes"}, "Ho", " Yes", {}),
])  # fmt: skip
def test_a_request_and_its_answer(load, format, row, prompt, response, metadata):
    [record] = load(format, row)
    assert record.kind == "demonstration" and turns(record) == [("user", prompt)]
    assert record.response == response and record.metadata == metadata


def test_answers_that_repeat_the_end_of_the_prompt_or_go_on_from_it_keep_its_beginning(load):
    system, first = {"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}
    judged = {key: [first, answer(key)] for key in ("chosen", "rejected")}
    [record] = load("trl", {"prompt": [system, first], **judged})
    assert turns(record) == [("system", "Be terse."), ("user", "Hi")] and texts(record) == ["chosen", "rejected"]
    later = [answer("Ho"), {"role": "user", "content": "Why?"}]
    for prompt in ("Hi", [first]):
        [record] = load("trl", {"prompt": prompt, **{key: [*later, answer(key)] for key in ("chosen", "rejected")}})
        assert turns(record) == [("user", "Hi"), ("assistant", "Ho"), ("user", "Why?")]


def test_a_request_under_another_name_is_not_taken_from_the_answers(rejects):
    row = {"chosen": "The capital is Lima.", "rejected": "The capital is Oslo."}
    [(field, problem)] = rejects("trl", {"prompt": "?", **row}, {"query": "Where?", **row})
    assert field == "prompt" and "query" in problem

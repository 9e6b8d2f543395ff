"""Small rows of our own in the shape of each public format, and the records' kind that each gives."""

from typing import Any

USER = {"role": "user", "content": "Name a colour."}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def says(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


def turns(record: Any) -> list[tuple[str, str]]:
    """The prompt of a record that was imported."""
    return [(message.role, message.content) for message in record.prompt]


def texts(record: Any) -> list[str]:
    """The responses of a record that was imported."""
    return [response.text for response in record.responses]


ALPACA = {"instruction": "Name a colour.", "input": "", "output": "Blue."}
SHAREGPT = {"conversations": [says("human", "Hi"), says("gpt", "Hello")]}
COMPARED = {"conversations": [says("human", "Hi")], "chosen": says("gpt", "a"), "rejected": says("gpt", "b")}
MESSAGES = {"messages": [USER, answer("Blue.")]}
SEED = {"id": "seed_0", "name": "n", "instruction": " Add. ", "instances": [{"input": "1 2", "output": "3"}]}
QUESTION = {"question": "1 + 1?", "answer": "2\n#### 2"}
DECODED = {"id": 0, "instruction": "Hi", "text": "Hello", "decoded": "Hum"}
MT_BENCH = {"question_id": 81, "category": "c", "turns": ["Say a.", "Say b."], "reference": ["a", "b"]}
TRL = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}
PAIR = {"prompt": "Hi", "chosen_response": "Hello", "rejected_response": "No"}
STACK = {"qid": 4, "question": " Why?\n", "response_j": "So.&nbsp;", "response_k": "No.", "date": "2020"}
CHOICES = {"id": "7", "prompt": "Hi", "chosen": ["Hello"], "rejected": ["No", "Bah"]}
KTO = {"prompt": "Hi", "completion": "Hello", "label": True}
HH = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go away"}
SCORED = {"text": [HH["rejected"], HH["chosen"]], "score": [0.0, 1.0]}
QA_FEEDBACK = {
    "question": "Who?", "passages": [["T", "T\n\nFirst.", "Second. "], ["U", "Third."]], "gold": "g",
    "prediction 1": "w", "prediction 2": "x", "prediction 3": "y", "prediction 4": "z", "feedback": {"errors": []},
    "preference": [1, 1, 0, 0, 2, 2],
}  # fmt: skip
COMPARISON = {
    "info": {
        "id": "t3_1", "post": "My cat sits on the mat.", "title": "Cat [question]", "subreddit": "cats", "site": None,
    }, "split": "valid1",
    "summaries": [
        {"text": " A cat sits.", "policy": "sup2", "note": None},
        {"text": " Dogs run.", "policy": "ref", "note": "Off."},
    ], "choice": 1, "worker": "w-7", "batch": "batch3", "extra": {"confidence": 8},
}  # fmt: skip
AXES = {
    "info": {"id": "n-1", "article": "Rain fell on Lima.", "title": None, "site": "news", "post": None},
    "split": "test",
    "summary": {
        "text": "It rained.", "policy": "sup4", "note": None,
        "axes": {"overall": 6, "accuracy": 7, "coverage": 5, "coherence": 7, "compatible": True},
    }, "worker": "w-8", "batch": "batch22",
}  # fmt: skip
WEBGPT = {
    "question": {"dataset": "eli5", "id": "q-1", "full_text": "Why is the sky blue?"},
    "quotes_0": {"title": ["Sky"], "extract": ["Light scatters."]}, "answer_0": "Light scatters [1].",
    "tokens_0": {"prefix": [1, 2], "completion": [3]}, "score_0": -0.5, "quotes_1": {"title": [], "extract": []},
    "answer_1": "Because of the air.", "tokens_1": {"prefix": [1, 2], "completion": [4]}, "score_1": 0.5,
}  # fmt: skip
ULTRAFEEDBACK = {
    "source": "made_up", "instruction": "Name a colour.", "models": ["m-1", "m-2", "m-3"],
    "completions": [
        {
            "annotations": {"helpfulness": {"Rating": "4", "Rationale": "Fine."}},
            "custom_system_prompt": "Be brief.", "model": "m-1", "principle": "helpfulness", "response": "Blue.",
            "critique": "Good.", "overall_score": 8.0, "fine-grained_score": 4.25,
        }, {"model": "m-2", "response": "Tree.", "overall_score": 10, "fine-grained_score": 1.5, "annotations": {}},
        {"model": "m-3", "response": "Red.", "overall_score": 7, "fine-grained_score": 4.25, "annotations": {}},
    ], "correct_answers": ["None"],
}  # fmt: skip
NECTAR = {
    "prompt": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Name a colour.\n\nAssistant: ",
    "answers": [
        {"answer": "Blue.", "model": "m-1", "rank": 1.0}, {"answer": "Tree.", "model": "m-2", "rank": 3.0},
        {"answer": "Red.", "model": "m-3", "rank": 1.0},
    ], "turns": 2, "num_responses": 3, "source": ["made_up"], "good_natured": True,
}  # fmt: skip
OASST = {
    "message_tree_id": "m-0", "tree_state": "ready_for_export",
    "prompt": {
        "message_id": "m-0", "text": "Name a colour.", "role": "prompter", "lang": "en",
        "replies": [
            {
                "message_id": "m-1", "parent_id": "m-0", "text": "Red.", "role": "assistant", "rank": 1,
                "model_name": "m-x",
                "replies": [
                    {
                        "message_id": "m-4", "text": "Another?", "role": "prompter",
                        "replies": [
                            {"message_id": "m-5", "text": "Green.", "role": "assistant", "rank": 0, "replies": []},
                            {"message_id": "m-6", "text": "No.", "role": "assistant", "rank": 0, "replies": []},
                        ],
                    },
                ],
            }, {"message_id": "m-2", "text": "Blue.", "role": "assistant", "rank": 0, "replies": []},
            {"message_id": "m-3", "text": "Tree.", "role": "assistant", "rank": None, "replies": []},
        ],
    },
}  # fmt: skip
ARGILLA_1 = {
    "id": "rec-1", "fields": {"prompt": "Name a colour.", "response-1": "Blue.", "response-2": "Tree."},
    "metadata": {"batch": 3},
    "responses": {
        "ranking": [
            {"value": ["response-1", "response-2"], "user_id": "u-1"},
            {"value": ["response-2", "response-1"], "user_id": "u-2"},
        ], "comment": [{"value": "Easy.", "user_id": "u-1"}, {"value": "Hm.", "user_id": "u-3"}],
    }, "suggestions": {}, "vectors": {},
}  # fmt: skip
ARGILLA_2 = {
    "id": "rec-2", "fields": {"instruction": "Name a colour.", "response": "Blue."}, "metadata": {},
    "suggestions": {"quality": {"value": 3, "score": None, "agent": "m-1"}},
    "responses": {
        "quality": [{"value": 5, "user_id": "u-1"}, {"value": 2, "user_id": "u-2"}],
        "problems": [{"value": ["too short"], "user_id": "u-2"}],
    }, "vectors": {}, "_server_id": "s-2",
}  # fmt: skip

SAMPLES: list[tuple[str, dict[str, Any], list[str]]] = [  # format, row, kinds of its records
    ("native", {"kind": "demonstration", "prompt": "Hi", "response": "Hello"}, ["demonstration"]),
    ("native", {"kind": "prompt", "prompt": "Hi"}, ["prompt"]),
    ("hh", HH, ["ranking"]),
    ("hh", SCORED, ["ranking"]),
    ("trl", TRL, ["ranking"]),
    ("trl", {"chosen": "It is blue.", "rejected": "It is red."}, ["ranking"]),
    ("trl", {"chosen": [USER, answer("a")], "rejected": [USER, answer("b")]}, ["ranking"]),
    ("trl", {"prompt": [USER], "topic": "x"}, ["prompt"]),
    ("trl", {"prompt": "Hi", "completion": "Hello"}, ["demonstration"]),
    (
        "trl",
        {
            "prompt": "Name a colour.",
            "prompt_id": "f00",
            "chosen": [USER, answer("Blue.")],
            "rejected": [USER, answer("Tree.")],
            "messages": [USER, answer("Blue.")],
            "score_chosen": 8.0,
            "score_rejected": 3.0,
        },
        ["ranking"],
    ),
    ("pairs", PAIR, ["ranking"]),
    ("pairs", STACK, ["ranking"]),
    ("pairs", {"system": "S", "question": "Hi", "chosen": "Hello", "rejected": "No"}, ["ranking"]),
    ("pairs", {"instruction": "Hi", "input": "", "chosen": "a", "rejected": "b"}, ["ranking"]),
    ("alpaca", ALPACA, ["demonstration"]),
    ("alpaca", {"instruction": "Hi", "context": "", "response": "Yes"}, ["demonstration"]),
    ("sharegpt", SHAREGPT, ["demonstration"]),
    ("sharegpt", COMPARED, ["ranking"]),
    ("messages", MESSAGES, ["demonstration"]),
    ("messages", MESSAGES | {"prompt": "Name a colour.", "prompt_id": "f00"}, ["demonstration"]),
    ("openai_comparisons", COMPARISON, ["ranking"]),
    ("openai_comparisons", AXES, ["ranking"]),
    ("webgpt", WEBGPT, ["ranking"]),
    ("oasst", OASST, ["ranking", "ranking"]),
    ("oasst_messages", {"message_id": "m", "parent_id": None, "text": "Hi", "role": "prompter"}, ["prompt"]),
    ("ultrafeedback", ULTRAFEEDBACK, ["ranking"]),
    ("nectar", NECTAR, ["ranking"]),
    ("choices", CHOICES, ["ranking"]),
    ("kto", KTO, ["ranking"]),
    ("kto", {"messages": [USER, answer("Tree.")], "label": False}, ["ranking"]),
    ("kto", {"conversations": [says("human", "Hi"), says("gpt", "No")], "kto_tag": False}, ["ranking"]),
    ("kto", {"instruction": "Hi", "input": "", "output": "No", "kto_tag": False}, ["ranking"]),
    ("self_instruct", SEED, ["demonstration"]),
    ("qa_feedback", QA_FEEDBACK, ["ranking"]),
    ("question_answer", QUESTION, ["demonstration"]),
    ("decoded", DECODED, ["demonstration"]),
    ("mt_bench", MT_BENCH, ["prompt"]),
    ("argilla", ARGILLA_1, ["ranking", "ranking"]),
    ("argilla", ARGILLA_2, ["ranking", "ranking"]),
]  # fmt: skip

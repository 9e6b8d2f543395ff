"""Small rows of our own in the shape of each public format, and the records' kind that each gives."""

import json
from pathlib import Path
from typing import Any

USER = {"role": "user", "content": "Name a colour."}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def says(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


def turns(record: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in record.prompt]


def texts(record: Any) -> list[str]:
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
with Path(__file__).with_name("samples.json").open(encoding="utf-8") as file:
    ROWS = json.load(file)
QA_FEEDBACK, COMPARISON, AXES, WEBGPT, ULTRAFEEDBACK, NECTAR, OASST, ARGILLA_1, ARGILLA_2 = ROWS.values()

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
    ("trl", {"prompt": "Name a colour.", "prompt_id": "f00", "chosen": [USER, answer("Blue.")], "rejected": [USER, answer("Tree.")],
             "messages": [USER, answer("Blue.")], "score_chosen": 8.0, "score_rejected": 3.0}, ["ranking"]),
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

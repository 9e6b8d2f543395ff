"""Foreign formats: their table, and the choice of a file's format (`format=auto`).

A format converts a row into records as plain dicts; it reads no files and validates nothing. A format outside the table
is a function that gives the records of one row, named as `module:name` or `file.py:name`.
"""

import inspect
import shlex
from collections.abc import Sequence
from typing import Any

from rlhf.data.formats import dialogues, scored, tools
from rlhf.data.formats.shapes import BadRow, Format, Values, require_text
from rlhf.data.formats.table import WANTS, propose_columns
from rlhf.data.records import KINDS
from rlhf.errors import UserError
from rlhf.system.plugins import load_named
from rlhf.system.terminal import one_line

__all__ = ["FORMATS", "BadRow", "Format", "choose_format", "require_text"]

LOOK_AHEAD = 20  # rows used for recognition
_KEYS = 12  # keys of a row that a message shows


# The formats and the shapes of their rows, by the module that contains their functions: `from_<name>` and, if the rows of
# a file belong together, `gather_<name>`.
_TABLE: dict[Any, dict[str, str]] = {
    dialogues: {
        "alpaca": "keys instruction, input and output or response",
        "sharegpt": "key conversations with turns of from and value, and perhaps chosen and rejected",
        "messages": "key messages with turns of role and content",
        "self_instruct": "keys instruction and instances of input and output",
        "question_answer": "keys question and answer",
        "decoded": "keys instruction, text (a person's answer) and decoded (a model's)",
        "mt_bench": "key turns with a list of texts",
        "hh": "keys chosen and rejected with dialogues of Human: and Assistant:, or text with two of them and score",
        "trl": "keys chosen and rejected, or prompt and completion (strings or messages); or prompt",
        "pairs": "a prompt (prompt, question or instruction) and chosen_response and rejected_response, "
        "response_j and response_k, or chosen and rejected",
        "choices": "keys prompt, and chosen and rejected, each a list of strings",
        "kto": "prompt and completion, or messages or conversations, and key label (true or false)",
    },
    scored: {
        "ultrafeedback": "keys instruction and completions with response and scores",
        "nectar": "keys prompt and answers, a list of answer, model and rank",
        "webgpt": "keys question with full_text, answer_0, answer_1, score_0 and score_1",
        "openai_comparisons": "keys info, and summaries and choice or a summary with axes",
        "qa_feedback": "keys question, passages, prediction 1 … 4, preference",
        "oasst": "the first message of a tree, or key prompt with it: text, role and replies",
        "oasst_messages": "keys message_id, parent_id, text, role, rank: one message of a tree per row; "
        "rows are counted as trees",
    },
    tools: {
        "argilla": "keys fields and responses (an export of version 2)",
        "label_studio": "keys data and annotations (an export), or data (a task)",
    },
}
FORMATS = {
    "native": Format("native", f"key kind ({', '.join(KINDS)}) and the keys of that record", lambda row: [dict(row)]),
    "table": Format("table", WANTS, lambda row: []),
}
for _module, _wants in _TABLE.items():
    for _name, _shape in _wants.items():
        _gather = getattr(_module, f"gather_{_name}", None)
        FORMATS[_name] = Format(_name, _shape, getattr(_module, f"from_{_name}"), _name == "label_studio", _gather)


def recognise(row: Values) -> str | None:
    """The format of a row: the first of these shapes that it has. A row with an unknown `kind` counts as native."""
    match row:
        case {"kind": str(), "prompt": _}:
            return "native"
        case {"data": dict()} if "annotations" in row or row.keys() <= {"data", "id", "meta", "predictions"}:
            return "label_studio"
        case {"fields": dict(), "responses": dict()}:
            return "argilla"
        case {"prompt": {"text": _, "replies": _}} | {"text": str(), "role": _, "replies": list()}:
            return "oasst"
        case {"message_id": _, "text": _, "role": _}:
            return "oasst_messages"
        case {"info": dict(), "summaries": list(), "choice": _} | {"info": dict(), "summary": {"axes": _}}:
            return "openai_comparisons"
        case {"question": _, "preference": _} if row.keys() >= {f"prediction {i}" for i in range(1, 5)}:
            return "qa_feedback"
        case {"question": _, "answer_0": _, "answer_1": _, "score_0": _, "score_1": _}:
            return "webgpt"
        case {"instruction": _, "completions": [{"response": _}, *_]}:
            return "ultrafeedback"
        case {"prompt": _, "answers": [{"answer": _, "rank": _}, *_]}:
            return "nectar"
        case {"chosen": str(a), "rejected": str(b)} if "prompt" not in row and all(map(dialogues.is_dialogue, (a, b))):
            return "hh"
        case {"text": [str(first), *_], "score": _} if dialogues.is_dialogue(first):
            return "hh"
        case {"prompt": str(), "chosen": [str(), *_], "rejected": [str(), *_]}:
            return "choices"
        case _ if row.keys() & {"label", "kto_tag"} and dialogues.has_one_answer(row):
            return "kto"
        case _ if dialogues.pair_keys(row):
            return "pairs"
        case {"chosen": str() | [{"role": _}, *_], "rejected": str() | [{"role": _}, *_]} | {
            "prompt": _,
            "completion": _,
        }:
            return "trl"
        case {"conversations": [{}, *_]} if ("chosen" in row) == ("rejected" in row):
            return "sharegpt"
        case {"messages": [{"role": _, "content": _}, *_]}:
            return "messages"
        case {"instruction": _, "instances": list()}:
            return "self_instruct"
        case {"instruction": str(), "text": str(), "decoded": str()}:
            return "decoded"
        case {"instruction": _, "output": str() | None} | {"instruction": _, "response": str() | None}:
            return "alpaca"
        case {"question": str(), "answer": str()} if not row.keys() & {"context", "passages", "choices", "options"}:
            return "question_answer"  # a question about one of these columns would be incomplete without it
        case {"turns": [str(), *_]}:
            return "mt_bench"
        case {"prompt": str() | [{"role": _}, *_]} if dialogues.is_prompt_alone(row):
            return "trl"
    return None


def find_format(name: str, setting: str) -> Format | None:
    """The format of a name; None for auto. Raises: UserError if there is none."""
    if name == "auto":
        return None
    if ":" in name:
        convert = inspect.unwrap(load_named("format", name, ("row",)))  # a row that it cannot read is a reject
        return Format(name, "what the function reads", convert)
    if name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise UserError(f"{setting}={name}: no such format: want auto, {known}, or a function as file.py:name")
    return FORMATS[name]


def choose_format(name: str, rows: Sequence[Values], setting: str) -> Format:
    """The format of the first of a file's rows that has one. For messages: the file's name, and the setting that chooses a format.

    Raises: UserError that proposes columns, if there is none.
    """
    found = next((format for row in rows[:LOOK_AHEAD] if (format := recognise(row)) is not None), None)
    if found is not None:
        return FORMATS[found]
    keys = ", ".join(one_line(key, 60) for key in list(rows[0])[:_KEYS])
    how = f"format=table {propose_columns(rows)}"
    if setting != "format":
        how = f"`rlhf import path={shlex.quote(name)} out=imported {how}`, then give the folder imported instead"
    raise UserError(f"{name}: no format recognised: rows have the keys {keys}. Name the columns, as: {how}")

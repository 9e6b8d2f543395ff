"""Foreign formats: the table of them, and which one a file is of (`format=auto`).

A format recognises a row and converts it into records as plain dicts, without reading files or validating. One that is not
in the table is named as `module:name` or `file.py:name`: a function that gives the records of one row.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from rlhf.data.formats import argilla, dialogues, label_studio, preferences, scored
from rlhf.data.formats.shapes import BadRow, Format, Values, require_text
from rlhf.data.formats.table import WANTS, propose_columns
from rlhf.data.records import KINDS, shown
from rlhf.errors import UserError
from rlhf.system.plugins import load_named

__all__ = ["FORMATS", "BadRow", "Format", "choose_format", "require_text"]

LOOK_AHEAD = 20  # rows used for recognition
_KEYS = 12  # of a row, in a message


def _is_native(row: Values) -> bool:
    """A kind that is spelt wrong counts too: such a row is a native one with a mistake."""
    return isinstance(row.get("kind"), str) and "prompt" in row


def _unnamed(row: Values) -> list[dict[str, Any]]:
    raise BadRow("columns", "got none, want the columns named: set columns.prompt=… and what else the file holds")


# By file: the formats and the shapes of their rows. Their functions are `is_<name>`, `from_<name>` and, if a file's rows belong
# together, `gather_<name>`.
_TABLE: dict[Any, dict[str, str]] = {
    dialogues: {
        "alpaca": "keys instruction, input and output or response",
        "sharegpt": "key conversations with turns of from and value, and perhaps chosen and rejected",
        "messages": "key messages with turns of role and content",
        "self_instruct": "keys instruction and instances of input and output",
        "question_answer": "keys question and answer",
        "decoded": "keys instruction, text (a person's answer) and decoded (a model's)",
        "mt_bench": "key turns with a list of texts",
    },
    preferences: {
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
    argilla: {"argilla": "keys fields and responses, or questions with user_id, value and status"},
    label_studio: {
        "label_studio": "keys data and annotations (an export), or data (a task)",
        "tasks_csv": "a table of rlhf sample: item, prompt, labeler, ids, about, and winner or score_1 …",
    },
}
_NATIVE = f"key kind ({', '.join(KINDS)}) and the keys of that record"
FORMATS = {
    "native": Format("native", _NATIVE, _is_native, lambda row: [dict(row)]),
    "table": Format("table", WANTS, lambda row: False, _unnamed),
}
for _module, _wants in _TABLE.items():
    for _name, _shape in _wants.items():
        _is, _from = getattr(_module, f"is_{_name}"), getattr(_module, f"from_{_name}")
        _gather, _joins = getattr(_module, f"gather_{_name}", None), _module is label_studio
        FORMATS[_name] = Format(_name, _shape, _is, _from, _joins, _gather)


def _fits(format: Format, row: Values) -> bool:
    try:
        return bool(format.recognise(row))
    except Exception:  # a foreign row can contain values of any type: this one is not of this format
        return False


def find_format(name: str, setting: str) -> Format | None:
    """The format of a name; None for auto. Raises: UserError if there is none."""
    if name == "auto":
        return None
    if ":" in name:
        convert = inspect.unwrap(load_named("format", name, 1))  # a row that it cannot read is a reject
        return Format(name, "what the function reads", lambda row: True, convert)
    if name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise UserError(f"{setting}={name}: no such format: want auto, {known}, or a function as file.py:name")
    return FORMATS[name]


def choose_format(name: str, rows: Sequence[Values], asked: Format | None, setting: str) -> tuple[Format, str]:
    """A file's format and why: the one asked for, if one of the first rows has its shape, or the recognised one.

    `name` is the file's, `setting` what the user sets a format with; both for messages.

    Raises: UserError if no format, or more than one, fits.
    """
    if asked is None:
        return _recognise(name, rows, setting)
    if asked.prepare or any(_fits(asked, row) for row in rows[:LOOK_AHEAD]):
        return asked, "asked for"
    try:
        other, why = _recognise(name, rows, setting)
        instead = f"it looks like {other.name} ({why}): set {setting}={other.name} or auto"
    except UserError:
        instead = f"it has the keys {', '.join(map(str, list(rows[0])[:_KEYS]))}"
    raise UserError(f"{name}: not of {setting}={asked.name}, which wants {asked.wants}: {instead}")


def _recognise(name: str, rows: Sequence[Values], setting: str) -> tuple[Format, str]:
    for row in rows[:LOOK_AHEAD]:
        matches = [one for one in FORMATS.values() if _fits(one, row)]
        if FORMATS["argilla"] in matches:  # a flat row of it can have the keys of others
            matches = [FORMATS["argilla"]]
        if len(matches) == 1:
            return matches[0], matches[0].wants
        if matches:
            names = " and ".join(one.name for one in matches)
            raise UserError(f"{name}: could be {names}: set {setting} to one of them")
    keys = ", ".join(shown(str(key))[1:-1] for key in list(rows[0])[:_KEYS])
    raise UserError(f"{name}: no format recognised: rows have the keys {keys}. {propose_columns(rows)}")

"""What formats share: the shape of a format, chat turns, ids, numbers, and scores as an order.

Text is never changed: no white space is stripped, no HTML entity decoded. A format that joins or cuts strings says so.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.data.inputs import Reject, Row
from rlhf.data.reading import is_deep
from rlhf.data.records import shown
from rlhf.system.terminal import one_line

ROLES = dict.fromkeys(("user", "human", "prompter"), "user") | {"system": "system"}
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant")
RATINGS = {True: 7, False: 1}  # of an answer that is only good or bad: the ends of the scale
_WEIGHTS = ("loss_weight", "weight")  # of a turn; 0: context, not to be learned
_NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d{1,20})?")

Turns = list[dict[str, Any]]
Values = Mapping[str, Any]


class BadRow(Exception):
    """A row that a format cannot convert: the field, and a message `got …, want …`."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = one_line(field, 200)
        self.message = one_line(f"{field}: {message}" if field else message)


@dataclass(frozen=True, slots=True)
class Format:
    """One foreign format: what a row looks like, and how it becomes records."""

    name: str
    wants: str  # the shape of a row as a short text, for messages
    recognise: Callable[[Values], str | None]  # why a row is of this format; None if it is not
    # records as plain dicts, each with its `kind`; a BadRow for each part of the row that cannot be converted
    convert: Callable[[Values], Iterable[dict[str, Any] | BadRow]]
    joins: bool = False  # judgements with the same `metadata.item` become one ranking per labeler
    # Rows of a whole file that belong together, as the rows that are converted; with the file's name, for messages.
    gather: Callable[[Iterable[Row | Reject], str], Iterator[Row | Reject]] | None = None
    # The format for one file, after a look at its name and first rows, if the columns' values matter.
    prepare: Callable[[str, Sequence[Values]], "Format"] | None = None


# --- values ----------------------------------------------------------------------------------------------------------


def require(fits: bool, field: str, value: Any, wanted: str) -> None:
    """Raises: BadRow if the value of a field does not fit."""
    if not fits:
        raise BadRow(field, f"got {shown(value)}, want {wanted}")


def require_text(row: Values, key: str) -> str:
    """A row's string under `key`. Raises: BadRow if it is missing or no string."""
    if key not in row:
        raise BadRow(key, "missing")
    require(isinstance(row[key], str), key, row[key], "a string")
    return row[key]


def other_keys(row: Values, *used: str) -> dict[str, Any]:
    """The keys that a format does not use, for `metadata`, so that nothing is dropped."""
    return {key: value for key, value in row.items() if key not in used}


def without_empty(values: Values) -> dict[str, Any]:
    """The entries that are not null or empty."""
    return {key: value for key, value in values.items() if value is not None and value not in ([], {}, "")}


def id_and_rest(row: Values, *used: str, ids: Sequence[str] = ("id",)) -> tuple[str | None, dict[str, Any]]:
    """The row's id if it is a text, and all other keys that are not `used`, for `metadata`. A number means nothing
    outside of its file and stays there.
    """
    key = next((key for key in ids if isinstance(row.get(key), str) and row[key]), None)
    return (None if key is None else row[key]), other_keys(row, *used, *([] if key is None else [key]))


def is_list(value: Any, of: type = object) -> bool:
    """Whether a value is a list that is not empty, each item of type `of`."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, of) for one in value)


def is_text(value: Any) -> bool:
    """Whether there is text other than white space."""
    return isinstance(value, str) and bool(value.strip())


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def is_number(value: Any) -> bool:
    """Whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_number(value: Any) -> float | None:
    """A number, or text that is one; true and false are not numbers."""
    if is_number(value):
        return float(value) if abs(value) < 1e300 else None
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) else None


def number(value: Any, field: str, wanted: str = "a number") -> float:
    """A finite number. Raises: BadRow if it is something else, null and true included."""
    require(is_number(value) and math.isfinite(value), field, value, wanted)
    return value


def as_json(value: Any) -> Any:
    """The list or object in a JSON text; every other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if is_deep(parsed) else parsed


# --- chats -----------------------------------------------------------------------------------------------------------


def is_chat(value: Any) -> bool:
    """Whether a value is a list of turns with roles."""
    return is_list(value, dict) and all("role" in turn for turn in value)


def chat_text(value: Any, field: str) -> str:
    """The text of a turn: a string, or typed parts, whose texts are joined without a gap.

    Raises: BadRow if it is neither, or if a part is not text (an image, a tool call).
    """
    if isinstance(value, str):
        return value
    require(isinstance(value, list), field, value, "text or a list of text parts")
    texts = []
    for i, part in enumerate(value):
        typed = isinstance(part, dict) and part.get("type") == "text"
        text: Any = part.get("text", part.get("value")) if typed else part
        require(isinstance(text, str), f"{field}.{i}", part, "a part of type text: remove the row")
        texts.append(text)
    return "".join(texts)


def _turn(turn: Any, field: str) -> dict[str, Any]:
    require(isinstance(turn, dict), field, turn, "a turn with {role, content} or {from, value}")
    role_key, text_key = ("from", "value") if "from" in turn else ("role", "content")
    came = turn.get(role_key)
    role = ROLES.get(came.strip().lower()) if isinstance(came, str) else None
    wanted = "system, user (human) or assistant (gpt): remove the row"
    require(role is not None, f"{field}.{role_key}", came, wanted)
    content, more = turn.get(text_key), other_keys(turn, role_key, text_key)
    if isinstance(content, list) and any(isinstance(p, dict) and p.keys() - {"type", "text", "value"} for p in content):
        more["parts"] = content
    return {"role": role, "content": chat_text(content, f"{field}.{text_key}"), **more}


def chat_turns(value: Any, field: str) -> Turns:
    """Turns as {role, content} or {from, value}, with the roles system, user, assistant; other keys are kept.

    Raises: BadRow if it is no list of turns, or if a turn has another role (a tool, a function).
    """
    require(is_list(value), field, value, "a list of turns")
    return [_turn(turn, f"{field}.{i}") for i, turn in enumerate(value)]


def user_turn(text: str) -> Turns:
    return [{"role": "user", "content": text}]


def with_system(system: Any, turns: Turns) -> Turns:
    """The turns after a system turn, if a row gives that text separately."""
    if system is None or system == "":
        return turns
    return [{"role": "system", "content": chat_text(system, "system")}, *turns]


def is_learned(turn: Values) -> bool:
    """Whether a turn is the assistant's and has no weight of 0."""
    return turn["role"] == "assistant" and all(turn.get(key) is None or turn[key] != 0 for key in _WEIGHTS)


def last_answer(turns: Turns, field: str) -> tuple[Turns, dict[str, Any]]:
    """A dialogue's prompt and its last turn, which is the judged answer. Raises: BadRow if the last turn is no answer."""
    if turns[-1]["role"] != "assistant":
        raise BadRow(field, f'the last turn is "{turns[-1]["role"]}", want the assistant\'s answer')
    return turns[:-1], turns[-1]


def one_answer(value: Any, field: str) -> dict[str, Any]:
    """The turn of a judged answer without a prompt, given alone or in a list of one. Raises: BadRow if it is something else."""
    turns = chat_turns(value, field) if isinstance(value, list) else [_turn(value, field)]
    if len(turns) != 1 or turns[0]["role"] != "assistant":
        raise BadRow(field, f"got turns {', '.join(turn['role'] for turn in turns)}, want one assistant turn")
    return turns[0]


# --- records ---------------------------------------------------------------------------------------------------------


def demonstration(prompt: Any, response: str, metadata: dict[str, Any], field: str = "response") -> dict[str, Any]:
    """The fields of a demonstration. Raises: BadRow if the answer says nothing."""
    if not response.strip():
        raise BadRow(field, "got no text, want the demonstrated answer: remove the row")
    return {"kind": "demonstration", "prompt": prompt, "response": response, "metadata": metadata}


def response_of(name: str, turn: Values) -> dict[str, Any]:
    """An answer's turn as a response; the turn's other keys go into its metadata."""
    return {"id": name, "text": turn["content"], "metadata": other_keys(turn, "role", "content")}


def answer_of(name: str, answer: Any, field: str, wanted: str, text: str, policy: str, *used: str) -> dict[str, Any]:
    """One of several answers as a response, given as an object with its text and its policy under these keys.

    The keys that are not `used` either go into its metadata. Raises: BadRow if it has no text.
    """
    require(isinstance(answer, dict) and isinstance(answer.get(text), str), field, answer, wanted)
    more = other_keys(answer, text, policy, *used)
    return {"id": name, "text": answer[text], "policy": answer.get(policy), "metadata": more}


def letters(n: int) -> list[str]:
    """Names for n responses that have none: a, b, c, …, then r27, r28, …"""
    return [chr(ord("a") + i) if i < 26 else f"r{i + 1}" for i in range(n)]


def ranking_of(scores: Mapping[str, float], *, best: str) -> list[list[str]]:
    """Responses by score, `best` = highest or lowest first; equal scores are a tie, which keeps the order of `scores`."""
    order = sorted(set(scores.values()), reverse=best == "highest")
    return [[name for name, score in scores.items() if score == level] for level in order]


def preference(better: Values, worse: Values) -> dict[str, Any]:
    """The fields of a ranking of two answers, each given as its turn: "a" is the better one."""
    responses = [response_of("a", better), response_of("b", worse)]
    return {"kind": "ranking", "responses": responses, "ranking": [["a"], ["b"]]}


def best_of(best: str, names: Sequence[str]) -> dict[str, Any]:
    """What naming the best of several responses says: `ranking` of two, `pairs` of more, since the others have no order."""
    others = [name for name in names if name != best]
    if len(others) > 1:
        return {"pairs": [[best, other] for other in others]}
    return {"ranking": [[best], *([other] for other in others)]}

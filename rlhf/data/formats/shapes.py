"""What formats share: the shape of a format, chat turns, ids, numbers, scores as an order, and the words of a verdict.

Text is never changed: no white space is stripped, no HTML entity decoded. A format that joins or cuts strings says so.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.config.setting import is_text
from rlhf.data.rows import Row, is_deep
from rlhf.system.schemas import shown
from rlhf.system.terminal import one_line

ROLES = dict.fromkeys(("user", "human", "prompter"), "user") | {"system": "system"}
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant")
TIE = -1
_WEIGHTS = ("loss_weight", "weight")  # of a turn; 0: context, not to be learned
_NUMBER = re.compile(r"[+-]?(?:\d{1,15}(?:\.\d{1,20})?|\.\d{1,20})(?:[eE][+-]?\d{1,2})?")

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
    # Records as plain dicts, each with its `kind`. The records validate themselves, and a missing key is a reject, so a
    # function checks only what would be read wrongly. Without an `id` the row's own is used, see `reading.convert_row`.
    convert: Callable[[Values], Iterable[dict[str, Any]]]
    # Rows of a whole file that belong together, as the rows that are converted.
    gather: Callable[[Iterable[Row]], Iterator[Row]] | None = None
    why: str = ""  # of a file that is read so, if it is not that its rows have this shape
    note: str = ""  # how the file is read


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


def is_list(value: Any, of: type = object) -> bool:
    """Whether a value is a list that is not empty, each item of type `of`."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, of) for one in value)


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def as_number(value: Any) -> float | None:
    """A finite number, or text that is one; true and false are not numbers."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if abs(value) < 1e300 else None
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) else None


def number(value: Any, field: str) -> float:
    """A finite number. Raises: BadRow if it is something else, null and true included."""
    found = as_number(value)
    if found is None:
        raise BadRow(field, f"got {shown(value)}, want a number")
    return found


def as_json(value: Any) -> Any:
    """The list or object in a JSON text; every other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if is_deep(parsed) else parsed


def as_flag(value: Any) -> Any:
    """True or false, also as the text that a CSV has of it; every other value unchanged."""
    return {"true": True, "false": False}.get(value.strip().casefold(), value) if isinstance(value, str) else value


def is_chat(value: Any) -> bool:
    """Whether a value is a list of turns, each with a role or, as in sharegpt, from whom it is."""
    return is_list(value, dict) and all("role" in turn or "from" in turn for turn in value)


def _turn(turn: Any, field: str) -> dict[str, Any]:
    """A turn whose text is a string, or typed parts that are joined without a gap; an image or a tool call is none."""
    require(isinstance(turn, dict), field, turn, "a turn with {role, content} or {from, value}")
    role_key, text_key = ("from", "value") if "from" in turn else ("role", "content")
    came = turn.get(role_key)
    role = ROLES.get(came.strip().lower()) if isinstance(came, str) else None
    require(role is not None, f"{field}.{role_key}", came, "system, user (human) or assistant (gpt): remove the row")
    content, more = turn.get(text_key), other_keys(turn, role_key, text_key)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        if any(part.keys() - {"type", "text", "value"} for part in content):
            more["parts"] = content
        texts = [part["text"] if part.get("text") is not None else part.get("value") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    require(isinstance(content, str), f"{field}.{text_key}", content, "text or a list of text parts: remove the row")
    return {"role": role, "content": content, **more}


def chat_turns(value: Any, field: str) -> Turns:
    """Turns as {role, content} or {from, value}, with the roles system, user, assistant; other keys are kept. Raises:
    BadRow if it is no list of turns, or if a turn has another role (a tool, a function).
    """
    require(is_list(value), field, value, "a list of turns")
    return [_turn(turn, f"{field}.{i}") for i, turn in enumerate(value)]


def with_system(system: Any, prompt: Any) -> Any:
    """The prompt, a text or turns, after a system turn if a row gives that text separately and the turns have none."""
    if not is_text(system) or (isinstance(prompt, list) and prompt and prompt[0]["role"] == "system"):
        return prompt
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": system}, *turns]


def is_learned(turn: Values) -> bool:
    """Whether a turn is the assistant's and has no weight of 0."""
    return turn["role"] == "assistant" and all(turn.get(key) is None or turn[key] != 0 for key in _WEIGHTS)


def one_answer(value: Any, field: str) -> dict[str, Any]:
    """The turn of a judged answer without a prompt, given alone or in a list of one. Raises: BadRow if it is something else."""
    turns = chat_turns(value if isinstance(value, list) else [value], field)
    roles = [turn["role"] for turn in turns]
    require(roles == ["assistant"], field, roles, "one assistant turn")
    return turns[0]


def response_of(name: str, turn: Values) -> dict[str, Any]:
    """An answer's turn as a response; the turn's other keys go into its metadata."""
    return {"id": name, "text": turn["content"], "metadata": other_keys(turn, "role", "content")}


def judged_record(prompt: Any, responses: list[Any], metadata: Values, **said: Any) -> dict[str, Any]:
    """A ranking as a plain dict. said: `ranking`, `pairs`, `ratings`, `labeler`, …"""
    return {"kind": "ranking", "prompt": prompt, "responses": responses, "metadata": metadata, **said}


def letters(n: int) -> list[str]:
    """Names for n responses that have none: a, b, c, …, then r27, r28, …"""
    return [chr(ord("a") + i) if i < 26 else f"r{i + 1}" for i in range(n)]


def ranking_of(scores: Mapping[str, float], *, best: str) -> list[list[str]]:
    """Responses by score, `best` = highest or lowest first; equal scores are a tie, which keeps the order of `scores`."""
    order = sorted(set(scores.values()), reverse=best == "highest")
    return [[name for name, score in scores.items() if score == level] for level in order]


def preference(prompt: Any, answers: Iterable[Values], metadata: dict[str, Any]) -> dict[str, Any]:
    """A ranking of two answers, each given as its turn: "a" is the better one, unless the row states a tie or equal scores."""
    responses = [response_of(name, turn) for name, turn in zip("ab", answers, strict=True)]
    scores = [metadata.get("score_chosen"), metadata.get("score_rejected")]
    tie = metadata.get("status") == "tie" or (scores[0] is not None and scores[0] == scores[1])
    return judged_record(prompt, responses, metadata, ranking=[["a", "b"]] if tie else [["a"], ["b"]])


def judged(winner: int, names: Sequence[str]) -> dict[str, Any]:
    """What a verdict says: `ranking` of two responses or of a tie, `pairs` of more, since the others have no order."""
    if winner == TIE:
        return {"ranking": [list(names)]}
    others = [name for i, name in enumerate(names) if i != winner]
    if len(others) > 1:
        return {"pairs": [[names[winner], other] for other in others]}
    return {"ranking": [[names[winner]], others]}


def name_end(name: str) -> str:
    """The number or letter at the end of a name; empty without one."""
    match = re.search(r"(?:^|[-_ .])?(\d+|(?<![a-z])[a-z])$", name.strip(), re.I)
    return match[1].lower() if match else ""


_SIDES = {"left": 0, "first": 0, "one": 0, "right": 1, "second": 1, "two": 1, "third": 2, "three": 2}
_NOUN = "(?:model|response|assistant|completion|answer|output|option|candidate|text|summary|system|choice)"
_PHRASE = re.compile(
    rf"(?:the )?(?:{_NOUN} ?)?(?P<side>[a-z]|[1-9]|{'|'.join(_SIDES)})(?: one| {_NOUN})?"
    r"(?:(?: is)?(?: slightly| somewhat| a bit| much| far| significantly| clearly| strongly)?"
    r" (?:better|preferred|best|wins)(?: than .*)?)?"
)
_SIGNS = re.compile("([ab12]) ?([><=]+) ?([ab12])")
_TIES = re.compile(
    "(?:a )?tied?|draw|equal|equally (?:good|bad)|both|neither|(?:the |about the )?same|about equal|no preference|"
    "no difference|(?:tie )?both ?(?:are )?(?:good|bad)"
)


def read_phrase(text: str, k: int) -> int | None:
    """Which of K responses, from 0, a phrase calls better, or TIE; None for any other phrase, and for a bare number."""
    words = re.sub(r"[\s_\-/,;:.!?()\[\]\"'*]+", " ", text.casefold()).strip()
    if _TIES.fullmatch(words):
        return TIE
    if match := _SIGNS.fullmatch(words):
        first, second = (int(side in "b2") for side in (match[1], match[3]))
        if first == second:
            return None
        return {">": first, "<": second, "=": TIE}[match[2][0]]
    match = _PHRASE.fullmatch(words)
    if match is None or words.isdecimal():
        return None
    name = match["side"]
    side = _SIDES[name] if name in _SIDES else int(name) - 1 if name.isdecimal() else ord(name) - ord("a")
    return side if side < k else None

"""Shared by foreign formats: chat turns, ids, numbers, and scores as an order. It depends on no format.

Text is never changed: no white space is stripped, no HTML entity decoded. If a format does so, because it joins
or cuts strings, its file documents that.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.data.importers import BadRow, other_keys
from rlhf.data.records import shown

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
_WEIGHTS = ("loss_weight", "weight")  # of a turn; 0: context, not to be learned

Turns = list[dict[str, Any]]


def require(fits: bool, field: str, value: Any, wanted: str) -> None:
    """Raises: BadRow if the value of a field does not fit."""
    if not fits:
        raise BadRow(field, f"got {shown(value)}, want {wanted}")


def is_list(value: Any, of: type = object) -> bool:
    """Whether a value is a list that is not empty, each item of type `of`."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, of) for one in value)


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
        text: Any = (
            part.get("text", part.get("value")) if isinstance(part, dict) and part.get("type") == "text" else part
        )
        require(isinstance(text, str), f"{field}.{i}", part, "a part of type text: remove the row")
        texts.append(text)
    return "".join(texts)


def _turn(turn: Any, field: str) -> dict[str, Any]:
    require(isinstance(turn, dict), field, turn, "a turn with {role, content} or {from, value}")
    role_key, text_key = ("from", "value") if "from" in turn else ("role", "content")
    came = turn.get(role_key)
    role = ROLES.get(came.strip().lower()) if isinstance(came, str) else None
    if role is None:
        wanted = "system, user (human) or assistant (gpt): remove the row"
        raise BadRow(f"{field}.{role_key}", f"got {shown(came)}, want {wanted}")
    content = turn.get(text_key)
    more = {key: value for key, value in turn.items() if key not in (role_key, text_key)}
    if isinstance(content, list) and any(isinstance(p, dict) and p.keys() - {"type", "text", "value"} for p in content):
        more["parts"] = content
    return {"role": role, "content": chat_text(content, f"{field}.{text_key}"), **more}


def chat_turns(value: Any, field: str) -> Turns:
    """Turns as {role, content} or {from, value}, with the roles system, user, assistant; other keys are kept.

    Raises: BadRow if it is no list of turns, or if a turn has another role (a tool, a function).
    """
    require(is_list(value), field, value, "a list of turns")
    return [_turn(turn, f"{field}.{i}") for i, turn in enumerate(value)]


def with_system(system: Any, turns: Turns) -> Turns:
    """The turns after a system turn, if a row gives that text separately.

    Raises: BadRow if it is neither text nor null.
    """
    if system is None or system == "":
        return turns
    return [{"role": "system", "content": chat_text(system, "system")}, *turns]


def is_learned(turn: Mapping[str, Any]) -> bool:
    """Whether a turn is the assistant's and has no weight of 0."""
    return turn["role"] == "assistant" and all(turn.get(key) is None or turn[key] != 0 for key in _WEIGHTS)


def _more(turn: Mapping[str, Any]) -> dict[str, Any]:
    return other_keys(turn, "role", "content")


def demonstration(prompt: Any, response: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """The fields of a demonstration."""
    return {"kind": "demonstration", "prompt": prompt, "response": response, "metadata": metadata}


def dialogue_record(turns: Turns, field: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """One record of a dialogue: a demonstration of its last answer, or a prompt if it has no answer.

    Earlier answers are turns of its prompt, which SFT learns too (sft.turns). If turns have a `loss_weight` (or `weight`),
    an answer of weight 0 is context. Turns after the answer are kept as `metadata.later_turns`; other keys of its turn as
    `metadata.answer`.

    Raises: BadRow if every answer has weight 0.
    """
    learned = [i for i, turn in enumerate(turns) if is_learned(turn)]
    if not learned:
        if any(turn["role"] == "assistant" for turn in turns):
            raise BadRow(field, "every assistant turn has weight 0, want one to learn: remove the row")
        return {"kind": "prompt", "prompt": turns, "metadata": metadata}
    at = learned[-1]
    more = {"answer": _more(turns[at]), "later_turns": turns[at + 1 :]}
    kept = {key: value for key, value in more.items() if value}
    return demonstration(turns[:at], turns[at]["content"], metadata | kept)


def last_answer(turns: Turns, field: str) -> tuple[Turns, dict[str, Any]]:
    """A dialogue's prompt and its last turn, which is the judged answer.

    Raises: BadRow if the last turn is no answer.
    """
    if turns[-1]["role"] != "assistant":
        raise BadRow(field, f'the last turn is "{turns[-1]["role"]}", want the assistant\'s answer')
    return turns[:-1], turns[-1]


def one_answer(value: Any, field: str) -> dict[str, Any]:
    """The turn of a judged answer without a prompt.

    Raises: BadRow if it is no turn of the assistant.
    """
    turn = _turn(value, field)
    if turn["role"] != "assistant":
        raise BadRow(field, f'got a turn of "{turn["role"]}", want one of the assistant')
    return turn


def response_of(name: str, turn: Mapping[str, Any]) -> dict[str, Any]:
    """An answer's turn as a response; the turn's other keys go into its metadata."""
    return {"id": name, "text": turn["content"], "metadata": _more(turn)}


def answer_of(name: str, answer: Any, field: str, wanted: str, text: str, policy: str, *used: str) -> dict[str, Any]:
    """One of several answers as a response, given as an object with its text and its policy under these keys.

    The keys that are not `used` either go into its metadata. Raises: BadRow if it has no text.
    """
    require(isinstance(answer, dict) and isinstance(answer.get(text), str), field, answer, wanted)
    more = other_keys(answer, text, policy, *used)
    return {"id": name, "text": answer[text], "policy": answer.get(policy), "metadata": more}


def id_and_rest(row: Mapping[str, Any], *used: str, ids: Sequence[str] = ("id",)) -> tuple[str | None, dict[str, Any]]:
    """The row's id if it is a text, and all other keys that are not `used`, for `metadata`.

    A number means nothing outside of its file: it is not used as an id and stays in the metadata.
    """
    key = next((key for key in ids if isinstance(row.get(key), str) and row[key]), None)
    return (None if key is None else row[key]), other_keys(row, *used, *([] if key is None else [key]))


def is_text(value: Any) -> bool:
    """Whether there is text other than white space."""
    return isinstance(value, str) and bool(value.strip())


def is_number(value: Any) -> bool:
    """Whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any, field: str, wanted: str = "a number") -> float:
    """A finite number.

    Raises: BadRow if it is something else, null and true included.
    """
    require(is_number(value) and math.isfinite(value), field, value, wanted)
    return value


def ranking_of(scores: Mapping[str, float], *, best: str) -> list[list[str]]:
    """Responses by score, `best` = highest or lowest first; equal scores are a tie.

    `scores` maps response ids to numbers; ties keep its order.
    """
    order = sorted(set(scores.values()), reverse=best == "highest")
    return [[name for name, score in scores.items() if score == level] for level in order]


def preference(better: Mapping[str, Any], worse: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ranking of two answers, each given as its turn: "a" is the better one."""
    return {
        "kind": "ranking",
        "responses": [response_of("a", better), response_of("b", worse)],
        "ranking": [["a"], ["b"]],
    }


def best_of(best: str, names: Sequence[str]) -> dict[str, Any]:
    """What naming the best of several responses says: `ranking` of two, `pairs` of more, since the others have no order."""
    others = [name for name in names if name != best]
    if len(others) > 1:
        return {"pairs": [[best, other] for other in others]}
    return {"ranking": [[best], *([other] for other in others)]}


def letters(n: int) -> Sequence[str]:
    """Names for n responses that have none: a, b, c, …, then r27, r28, …"""
    return [chr(ord("a") + i) if i < 26 else f"r{i + 1}" for i in range(n)]

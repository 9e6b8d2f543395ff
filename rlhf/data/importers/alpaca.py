"""Alpaca's demonstrations: instruction, input (may be empty), and output or response.

Rows may have a `system` text and a `history` of [request, answer] pairs, which come before the instruction. The
instruction and the input are stripped where they are joined, a blank line apart; the answer stays as it is.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import Turns, chat_text, demonstration, id_and_rest, require, with_system
from rlhf.data.importers import BadRow, Format, argilla, require_text

_INPUTS = ("input", "context")  # Dolly's name for the input is context
_ANSWERS = ("output", "response")


def recognise(row: Mapping[str, Any]) -> str | None:
    answers = [key for key in _ANSWERS if key in row]
    if "instruction" not in row or len(answers) != 1 or "kto_tag" in row or argilla.recognise(row) is not None:
        return None
    return f"keys instruction and {answers[0]}"


def request(row: Mapping[str, Any]) -> str:
    """The instruction and, after a blank line, the input if any."""
    inputs = [require_text(row, key) for key in _INPUTS if row.get(key) is not None]
    parts = [part.strip() for part in (require_text(row, "instruction"), *inputs)]
    return "\n\n".join(part for part in parts if part)


def _history(value: Any) -> Turns:
    fits = isinstance(value, list) and all(isinstance(two, list) and len(two) == 2 for two in value)
    require(fits, "history", value, "a list of [request, answer]")
    return [
        {"role": role, "content": chat_text(said, f"history.{i}")}
        for i, two in enumerate(value)
        for role, said in zip(("user", "assistant"), two, strict=True)
    ]


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One demonstration."""
    answers = [key for key in _ANSWERS if key in row]
    if len(answers) != 1:
        raise BadRow("output", f"got {' and '.join(answers) or 'neither'}, want one of output and response")
    response = require_text(row, answers[0])
    if not response.strip():
        raise BadRow(answers[0], "got no text, want the demonstrated answer: remove the row")
    turns = [*_history(row.get("history") or []), {"role": "user", "content": request(row)}]
    name, rest = id_and_rest(row, "instruction", "system", "history", *_INPUTS, answers[0])
    yield {"id": name, **demonstration(with_system(row.get("system"), turns), response, rest)}


FORMAT = Format("alpaca", "keys instruction, input and output or response", recognise, convert)

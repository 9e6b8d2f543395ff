"""Alpaca's demonstrations: instruction, input (may be empty), and output or response."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.importers import BadRow, Format, other_keys, require_text

_INPUTS = ("input", "context")  # Dolly's name for the input is context
_ANSWERS = ("output", "response")


def recognise(row: Mapping[str, Any]) -> str | None:
    answers = [key for key in _ANSWERS if key in row]
    return f"keys instruction and {answers[0]}" if "instruction" in row and len(answers) == 1 else None


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One demonstration; the prompt is the instruction and, after a blank line, the input if any."""
    answers = [key for key in _ANSWERS if key in row]
    if len(answers) != 1:
        raise BadRow("output", f"got {' and '.join(answers) or 'neither'}, want one of output and response")
    response = require_text(row, answers[0])
    if not response.strip():
        raise BadRow(answers[0], "got no text, want the demonstrated answer: remove the row")
    inputs = [require_text(row, key) for key in _INPUTS if row.get(key) is not None]
    parts = [part.strip() for part in (require_text(row, "instruction"), *inputs)]
    yield {
        "kind": "demonstration",
        "prompt": "\n\n".join(part for part in parts if part),
        "response": response,
        "metadata": other_keys(row, "instruction", *_INPUTS, answers[0]),
    }


FORMAT = Format("alpaca", "keys instruction, input and output or response", recognise, convert)

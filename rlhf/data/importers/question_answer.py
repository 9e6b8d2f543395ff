"""A question and its answer, as GSM8K: one demonstration, both texts as they are.

Rows that also have passages or choices are refused, since a prompt without these could not be answered.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import demonstration
from rlhf.data.importers import Format, argilla, other_keys, require_text

_OTHERS = ("kind", "context", "passages", "choices", "options", "chosen", "rejected", "conversations", "messages")


def recognise(row: Mapping[str, Any]) -> str | None:
    if any(key in row for key in _OTHERS) or argilla.recognise(row) is not None:
        return None
    both = all(isinstance(row.get(key), str) for key in ("question", "answer"))
    return "keys question and answer" if both else None


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One demonstration."""
    question, answer = require_text(row, "question"), require_text(row, "answer")
    yield demonstration(question, answer, other_keys(row, "question", "answer"))


FORMAT = Format("question_answer", "keys question and answer", recognise, convert)

"""ShareGPT's form: conversations of {from, value}; alone, or with a chosen and a rejected answer to them.

Turns of {role, content} under the same key are read as well. Text stays as it is, HTML included.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import chat_turns, dialogue_record, id_and_rest, one_answer, preference, with_system
from rlhf.data.importers import Format

_JUDGED = ("chosen", "rejected")


def recognise(row: Mapping[str, Any]) -> str | None:
    turns = row.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    if any(key in row for key in ("kind", "label", "kto_tag", "messages")):
        return None
    if any(key in row for key in _JUDGED):
        return "key conversations, with chosen and rejected" if all(key in row for key in _JUDGED) else None
    return "key conversations with turns"


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking with K = 2, response "a" the chosen one; or, without judgement, what `dialogue_record` says."""
    turns = with_system(row.get("system"), chat_turns(row.get("conversations"), "conversations"))
    name, rest = id_and_rest(row, "system", "conversations", *_JUDGED)
    if not any(key in row for key in _JUDGED):
        yield {"id": name, **dialogue_record(turns, "conversations", rest)}
        return
    judged = preference(*(one_answer(row.get(key), key) for key in _JUDGED))
    yield {"id": name, "prompt": turns, **judged, "metadata": rest}


FORMAT = Format(
    "sharegpt",
    "key conversations with turns of from and value, and perhaps chosen and rejected",
    recognise,
    convert,
)

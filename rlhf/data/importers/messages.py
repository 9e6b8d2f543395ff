"""Chats as `messages` of {role, content}, as fine-tuning services take them; content may be typed text parts.

A turn's other keys are kept; its `loss_weight` (or `weight`) decides which answer is learned.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import chat_turns, dialogue_record, id_and_rest, is_chat
from rlhf.data.importers import Format

_OTHERS = ("kind", "chosen", "rejected", "completion", "label", "kto_tag", "fields")


def recognise(row: Mapping[str, Any]) -> str | None:
    turns: Any = row.get("messages")
    fits = is_chat(turns) and all("content" in turn for turn in turns) and not any(key in row for key in _OTHERS)
    return "key messages with turns of role and content" if fits else None


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One demonstration of the dialogue's last learned answer, or one prompt: see `dialogue_record`."""
    name, rest = id_and_rest(row, "messages", ids=("id", "prompt_id"))
    yield {"id": name, **dialogue_record(chat_turns(row.get("messages"), "messages"), "messages", rest)}


FORMAT = Format("messages", "key messages with turns of role and content", recognise, convert)

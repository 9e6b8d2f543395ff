"""KTO's forms: one answer with a label true or false; there is no pair.

It becomes a ranking of one response with a rating, 7 for true and 1 for false: the ends of the scale. The label
itself stays under `metadata`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import chat_turns, last_answer, one_answer, require, response_of, with_system
from rlhf.data.importers import BadRow, Format, alpaca, hh, other_keys, require_text

_LABELS = ("label", "kto_tag")
_CHATS = ("messages", "conversations")
RATINGS = {True: 7, False: 1}


def recognise(row: Mapping[str, Any]) -> str | None:
    label = next((key for key in _LABELS if key in row), None)
    if label is None or "kind" in row:
        return None
    if "prompt" in row and "completion" in row:
        return f"keys prompt, completion and {label}"
    if label == "kto_tag" and "instruction" in row and "output" in row:
        return "keys instruction, output and kto_tag"
    chat = next((key for key in _CHATS if isinstance(row.get(key), list)), None)
    return f"keys {chat} and {label}" if chat else None


def _prompt_and_answer(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
    """The prompt, the turn of the answer, and the keys that they are under."""
    chat = next((key for key in _CHATS if key in row), None)
    if chat is not None:
        prompt, answer = last_answer(with_system(row.get("system"), chat_turns(row[chat], chat)), chat)
        return prompt, answer, (chat, "system")
    if "instruction" in row:
        turns = with_system(row.get("system"), [{"role": "user", "content": alpaca.request(row)}])
        used = ("instruction", "input", "context", "output", "system")
        return turns, {"content": require_text(row, "output")}, used
    if isinstance(row.get("prompt"), list):
        prompt = chat_turns(row["prompt"], "prompt")
    else:
        prompt = hh.prompt_turns(require_text(row, "prompt")) or row["prompt"]
    completion = row.get("completion")
    if not isinstance(completion, list):
        answer = {"content": require_text(row, "completion")}
    elif len(completion) == 1:
        answer = one_answer(completion[0], "completion")
    else:
        raise BadRow("completion", f"got {len(completion)} turns, want one assistant turn")
    return prompt, answer, ("prompt", "completion")


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking with K = 1."""
    key = next((key for key in _LABELS if key in row), "label")
    label: Any = row.get(key)
    require(isinstance(label, bool), key, label, "true or false: remove rows without a judgement")
    prompt, answer, used = _prompt_and_answer(row)
    yield {
        "kind": "ranking",
        "prompt": prompt,
        "responses": [response_of("a", answer)],
        "ratings": {"a": RATINGS[label]},
        "metadata": other_keys(row, *used),
    }


FORMAT = Format(
    "kto", "prompt and completion, or messages or conversations, and key label (true or false)", recognise, convert
)

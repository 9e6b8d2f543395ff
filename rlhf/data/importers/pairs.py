"""A prompt and two answers whose keys say which is better, as sets of several makers have them.

The prompt is `prompt`, `question`, or `instruction` and `input` (a blank line apart), after a `system` text if
there is one; the answers are chosen and rejected, chosen_response and rejected_response, or response_j (better)
and response_k. Texts stay as they are, a maker's special tokens included. Rows with `prompt`, `chosen` and
`rejected` are those of `trl`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import id_and_rest, is_text, preference, with_system
from rlhf.data.importers import BadRow, Format, hh, require_text

_PROMPTS = ("prompt", "question", "instruction")
_ANSWERS = (("chosen_response", "rejected_response"), ("response_j", "response_k"), ("chosen", "rejected"))


def _keys(row: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Which keys hold the prompt, the better and the worse answer."""
    prompt = next((key for key in _PROMPTS if isinstance(row.get(key), str)), None)
    answers = next((pair for pair in _ANSWERS if all(key in row for key in pair)), None)
    if prompt is None or answers is None or (prompt == "prompt" and answers[0] == "chosen"):
        return None
    return prompt, *answers


def recognise(row: Mapping[str, Any]) -> str | None:
    keys = _keys(row)
    if keys is None or "kind" in row or hh.recognise(row) is not None:
        return None
    if not all(isinstance(row[key], str) for key in keys):
        return None
    return f"keys {keys[0]}, {keys[1]} (better) and {keys[2]}"


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking with K = 2: response "a" is the better one."""
    keys = _keys(row)
    if keys is None:
        raise BadRow("prompt", f"missing: want one of {', '.join(_PROMPTS)}, and two answers as in the rows before")
    prompt_key, better, worse = keys
    parts = [require_text(row, prompt_key)]
    used = [*keys, "system"]
    if prompt_key == "instruction":
        used.append("input")
        if row.get("input") is not None and is_text(require_text(row, "input")):
            parts.append(row["input"])
    name, rest = id_and_rest(row, *used)
    prompt = with_system(row.get("system"), [{"role": "user", "content": "\n\n".join(parts)}])
    judged = preference({"content": require_text(row, better)}, {"content": require_text(row, worse)})
    yield {"id": name, "prompt": prompt, **judged, "metadata": rest}


FORMAT = Format(
    "pairs",
    "a prompt (prompt, question or instruction) and chosen_response and rejected_response, "
    "response_j and response_k, or chosen and rejected",
    recognise,
    convert,
)

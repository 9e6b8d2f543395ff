"""TRL's forms: chosen and rejected, prompt and completion, or a prompt; as strings or lists of messages."""

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from rlhf.data.importers import BadRow, Format, hh, other_keys
from rlhf.data.records import shown

Messages = list[dict[str, Any]]
_NOT_A_PROMPT_ALONE = ("kind", "chosen", "rejected", "completion", "response", "answer", "output")


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def recognise(row: Mapping[str, Any]) -> str | None:
    both = (row.get("chosen"), row.get("rejected"))
    if hh.recognise(row) is not None:
        return None
    if "prompt" in row and "completion" in row and "kind" not in row:
        return "keys prompt and completion"
    has_prompt = isinstance(row.get("prompt"), str) or _is_messages(row.get("prompt"))
    if has_prompt and not any(word in key for key in row for word in _NOT_A_PROMPT_ALONE):
        return "key prompt and no answer"
    prompt = "with" if "prompt" in row else "without"
    if all(isinstance(value, str) for value in both):
        return f"keys chosen and rejected hold strings, {prompt} a prompt"
    if all(_is_messages(value) for value in both):
        return f"keys chosen and rejected hold messages, {prompt} a prompt"
    return None


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (a.get("role"), a.get("content")) == (b.get("role"), b.get("content"))


def _split_messages(chosen: Messages, rejected: Messages) -> tuple[Messages, list[Any]]:
    """The turns that both share, and the answer of each; an equal last turn is still an answer."""
    shared = sum(1 for _ in takewhile(lambda pair: _same(*pair), zip(chosen[:-1], rejected[:-1], strict=False)))
    answers = []
    for key, messages in (("chosen", chosen), ("rejected", rejected)):
        rest = messages[shared:]
        if len(rest) != 1 or rest[0].get("role") != "assistant":
            roles = ", ".join(str(message.get("role")) for message in rest)
            raise BadRow(key, f"got turns {roles} after what both share, want one assistant turn")
        answers.append(rest[0].get("content"))
    return chosen[:shared], answers


def _split_strings(chosen: str, rejected: str) -> tuple[str, list[str]]:
    """An implicit prompt: what both strings share, up to the last white space that leaves both an answer."""
    at = hh.shared_length(chosen, rejected)
    while at and not (chosen[at - 1].isspace() and chosen[at:].strip() and rejected[at:].strip()):
        at -= 1
    if not chosen[:at].strip():
        raise BadRow("chosen", "chosen and rejected share no beginning that could be the prompt: give the key prompt")
    return chosen[:at].strip(), [chosen[at:].strip(), rejected[at:].strip()]


def _demonstration(row: Mapping[str, Any]) -> dict[str, Any]:
    answer = row["completion"]
    if _is_messages(answer):
        if len(answer) != 1 or answer[0]["role"] != "assistant":
            roles = ", ".join(str(message["role"]) for message in answer)
            raise BadRow("completion", f"got turns {roles}, want one assistant turn")
        answer = answer[0].get("content")
    metadata = other_keys(row, "prompt", "completion")
    return {"kind": "demonstration", "prompt": row.get("prompt"), "response": answer, "metadata": metadata}


def _ranking(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt: Any = row.get("prompt")
    chosen, rejected = row.get("chosen"), row.get("rejected")
    answers: list[Any]
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            prompt, answers = _split_strings(chosen, rejected)
        else:
            answers = [chosen, rejected]
    elif _is_messages(chosen) and _is_messages(rejected):
        shared, answers = _split_messages(chosen, rejected)  # type: ignore[arg-type]
        # Some sets give the prompt and repeat it before both answers: those turns are the fuller ones.
        prompt = shared if shared or prompt is None else prompt
    else:
        key = "rejected" if isinstance(chosen, str) or _is_messages(chosen) else "chosen"
        raise BadRow(key, f"got {shown(row.get(key))}, want a string or a list of messages, as its counterpart")
    return {
        "kind": "ranking",
        "prompt": prompt,
        "responses": [{"id": name, "text": text} for name, text in zip("ab", answers, strict=True)],
        "ranking": [["a"], ["b"]],
        "metadata": other_keys(row, "prompt", "chosen", "rejected"),
    }


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking with K = 2, response "a" the chosen one; or one demonstration; or one prompt."""
    if "chosen" in row or "rejected" in row:
        yield _ranking(row)
    elif "completion" in row:
        yield _demonstration(row)
    else:
        yield {"kind": "prompt", **row}


FORMAT = Format(
    "trl",
    "keys chosen and rejected, or prompt and completion (strings or messages); or prompt",
    recognise,
    convert,
)

"""TRL's forms: chosen and rejected, prompt and completion, or a prompt; as strings or lists of messages.

A prompt given as a string in HH's form, "Human: … Assistant:", becomes turns; other strings stay as they are,
and only an implicit prompt is stripped where it is cut off the answers. UltraFeedback's binarised form is one of these.
"""

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from rlhf.data.conversion.foreign import Turns, chat_turns, demonstration, id_and_rest, is_chat, preference
from rlhf.data.importers import BadRow, Format, argilla, hh, other_keys
from rlhf.data.records import shown

_NOT_A_PROMPT_ALONE = ("chosen", "rejected", "completion", "response", "answer", "output")  # in any key's name
_OF_OTHERS = (
    "kind", "messages", "conversations", "label", "kto_tag", "fields", "turns", "text", "annotation_id", "winner",
)  # fmt: skip


def recognise(row: Mapping[str, Any]) -> str | None:
    both = (row.get("chosen"), row.get("rejected"))
    if hh.recognise(row) is not None or "kind" in row or "conversations" in row:
        return None
    if "prompt" in row and "completion" in row and "label" not in row and "kto_tag" not in row:
        return "keys prompt and completion"
    has_prompt = isinstance(row.get("prompt"), str) or is_chat(row.get("prompt"))
    alone = not any(word in key for key in row for word in _NOT_A_PROMPT_ALONE)
    if has_prompt and alone and not any(key in row for key in _OF_OTHERS):
        return "key prompt and no answer" if argilla.recognise(row) is None else None
    prompt = "with" if "prompt" in row else "without"
    if all(isinstance(value, str) for value in both) and (
        "prompt" in row or not row.keys() & {"question", "instruction"}
    ):
        return f"keys chosen and rejected hold strings, {prompt} a prompt"
    if all(is_chat(value) for value in both):
        return f"keys chosen and rejected hold messages, {prompt} a prompt"
    return None


def _prompt(value: Any) -> Any:
    """A prompt as turns if it contains some; anything else as it came, for the record to judge."""
    if is_chat(value):
        return chat_turns(value, "prompt")
    return (hh.prompt_turns(value) or value) if isinstance(value, str) else value


def _split_messages(chosen: Turns, rejected: Turns) -> tuple[Turns, list[dict[str, Any]]]:
    """The turns that both share, and the answer's turn of each; an equal last turn is still an answer."""
    alike = takewhile(
        lambda two: (two[0]["role"], two[0]["content"]) == (two[1]["role"], two[1]["content"]),
        zip(chosen[:-1], rejected[:-1], strict=False),
    )
    shared = sum(1 for _ in alike)
    answers = []
    for key, turns in (("chosen", chosen), ("rejected", rejected)):
        rest = turns[shared:]
        if len(rest) != 1 or rest[0]["role"] != "assistant":
            roles = ", ".join(turn["role"] for turn in rest)
            raise BadRow(key, f"got turns {roles} after what both share, want one assistant turn")
        answers.append(rest[0])
    return chosen[:shared], answers


def _split_strings(chosen: str, rejected: str) -> tuple[str, list[str]]:
    """An implicit prompt: what both strings share, up to the last white space that leaves both an answer."""
    at = min(hh.shared_length(chosen, rejected), len(chosen.rstrip()) - 1, len(rejected.rstrip()) - 1)
    while at > 0 and not chosen[at - 1].isspace():
        at -= 1
    if at < 1 or not chosen[:at].strip():
        raise BadRow("chosen", "chosen and rejected share no beginning that could be the prompt: give the key prompt")
    return chosen[:at].strip(), [chosen[at:].strip(), rejected[at:].strip()]


def _demonstration(row: Mapping[str, Any]) -> dict[str, Any]:
    answer = row["completion"]
    metadata = other_keys(row, "prompt", "completion")
    if is_chat(answer):
        turns = chat_turns(answer, "completion")
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            roles = ", ".join(turn["role"] for turn in turns)
            raise BadRow("completion", f"got turns {roles}, want one assistant turn")
        answer = turns[0]["content"]
        metadata |= {"answer": more} if (more := other_keys(turns[0], "role", "content")) else {}
    return demonstration(_prompt(row.get("prompt")), answer, metadata)


def _ranking(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt: Any = row.get("prompt")
    chosen, rejected = row.get("chosen"), row.get("rejected")
    answers: list[dict[str, Any]]
    if isinstance(chosen, str) and isinstance(rejected, str):
        texts = [chosen, rejected]
        if prompt is None:
            prompt, texts = _split_strings(chosen, rejected)
        answers = [{"content": text} for text in texts]
    elif is_chat(chosen) and is_chat(rejected):
        shared, answers = _split_messages(chat_turns(chosen, "chosen"), chat_turns(rejected, "rejected"))
        # Some sets give the prompt and repeat it before both answers: those turns are the fuller ones.
        prompt = shared if shared or prompt is None else prompt
    else:
        key = "rejected" if isinstance(chosen, str) or is_chat(chosen) else "chosen"
        raise BadRow(key, f"got {shown(row.get(key))}, want a string or a list of messages, as its counterpart")
    metadata = other_keys(row, "prompt", "chosen", "rejected")
    return {"prompt": _prompt(prompt), **preference(*answers), "metadata": metadata}


def _known(rest: dict[str, Any]) -> dict[str, Any]:
    """What else a prompt's row has: its user and its metadata as they are, all other keys under metadata."""
    metadata = rest.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        return {"user": rest.get("user"), "metadata": other_keys(rest, "user")}
    return {"user": rest.get("user"), "metadata": (metadata or {}) | other_keys(rest, "user", "metadata")}


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking with K = 2, response "a" the chosen one; or one demonstration; or one prompt."""
    if "chosen" in row or "rejected" in row:
        yield _ranking(row)
    elif "completion" in row:
        yield _demonstration(row)
    else:
        name, rest = id_and_rest(row, "prompt", ids=("id", "prompt_id"))
        yield {"kind": "prompt", "id": name, "prompt": _prompt(row.get("prompt")), **_known(rest)}


FORMAT = Format(
    "trl",
    "keys chosen and rejected, or prompt and completion (strings or messages); or prompt",
    recognise,
    convert,
)

"""Anthropic's HH: two whole dialogues, chosen and rejected, that share everything up to the last answer.

The prompt ends at the last "Assistant:" that both dialogues share, not at each dialogue's own last one: an
answer may itself contain that marker, and two answers may begin with the same words. An empty answer is a
legal response.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.importers import BadRow, Format, other_keys, require_text

_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def _dialogue(text: str) -> str:
    return "\n\n" + text.lstrip()


def shared_length(a: str, b: str) -> int:
    """How many characters two strings share from the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def recognise(row: Mapping[str, Any]) -> str | None:
    both = (row.get("chosen"), row.get("rejected"))
    if "prompt" not in row and all(isinstance(t, str) and _dialogue(t).startswith(_HUMAN) for t in both):
        return 'chosen and rejected are dialogues of "Human:" and "Assistant:"'
    return None


def _turns(text: str) -> list[dict[str, str]]:
    """The turns of a dialogue; one speaker's turns in a row are one turn, its parts a blank line apart."""
    _, *parts = _TURN.split(text)  # role, text, role, text, …
    turns: list[dict[str, str]] = []
    for speaker, said in zip(parts[::2], parts[1::2], strict=True):
        if turns and turns[-1]["role"] == _ROLES[speaker]:
            turns[-1]["content"] += "\n\n" + said.strip()
        else:
            turns.append({"role": _ROLES[speaker], "content": said.strip()})
    return turns


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking with K = 2: response "a" is the chosen one."""
    chosen, rejected = (_dialogue(require_text(row, key)) for key in ("chosen", "rejected"))
    for key, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.startswith(_HUMAN):
            raise BadRow(key, f'got {text.strip()[:30]!r}, want a dialogue that begins with "Human:"')
    at = chosen.rfind(_ASSISTANT, 0, shared_length(chosen, rejected))
    if at < 0:
        raise BadRow("chosen", 'chosen and rejected share no "Assistant:" turn: want dialogues that differ at the end')
    answers = [text[at + len(_ASSISTANT) :] for text in (chosen, rejected)]
    if any(_HUMAN in answer for answer in answers):
        raise BadRow("chosen", "chosen and rejected part before the last answer: want the same dialogue up to it")
    yield {
        "kind": "ranking",
        "prompt": _turns(chosen[:at]),
        "responses": [{"id": name, "text": answer.strip()} for name, answer in zip("ab", answers, strict=True)],
        "ranking": [["a"], ["b"]],
        "metadata": other_keys(row, "chosen", "rejected"),
    }


FORMAT = Format("hh", "keys chosen and rejected with dialogues of Human: and Assistant:", recognise, convert)

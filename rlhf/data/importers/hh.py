"""Anthropic's HH: two whole dialogues that share everything up to the last answer.

Either {chosen, rejected}, or {text: [a, b], score: [x, y]}, where the higher score wins and equal is a tie. The turns
begin with "Human:" and "Assistant:" after a blank line, or with "## Human:" and "## Assistant:".
The prompt ends at the last "Assistant:" that both dialogues share, not at each dialogue's own last one: an
answer may itself contain that marker, and two answers may begin with the same words. White space around each
turn belongs to the markers and is stripped. An empty answer is a legal response.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from rlhf.data.conversion.foreign import ROLES, is_list, number, preference, ranking_of, require
from rlhf.data.importers import BadRow, Format, other_keys, require_text

_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_BEGINS_WITH_HEADING = re.compile(r"\s*#{2,3} ?Human:")
_HEADING = re.compile(r"(?:\A|\n)\s*#{2,3} ?(Human|Assistant):")


def _dialogue(text: str) -> str:
    """The text with HH's own markers; some sets write them as headings, "## Human:"."""
    if _BEGINS_WITH_HEADING.match(text):
        text = _HEADING.sub(r"\n\n\1:", text)
    return "\n\n" + text.lstrip()


def _is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and _dialogue(value).startswith(_HUMAN)


def shared_length(a: str, b: str) -> int:
    """How many characters two strings share from the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def recognise(row: Mapping[str, Any]) -> str | None:
    if "prompt" not in row and all(_is_dialogue(row.get(key)) for key in ("chosen", "rejected")):
        return 'chosen and rejected are dialogues of "Human:" and "Assistant:"'
    texts: Any = row.get("text")
    if "score" in row and is_list(texts) and all(map(_is_dialogue, texts)):
        return 'text holds dialogues of "Human:" and "Assistant:", score a number each'
    return None


def _turns(text: str) -> list[dict[str, str]]:
    """The turns of a dialogue; one speaker's turns in a row are one turn, its parts a blank line apart."""
    _, *parts = _TURN.split(text)  # role, text, role, text, …
    spoken = zip(parts[::2], parts[1::2], strict=True)
    return [
        {"role": ROLES[speaker.lower()], "content": "\n\n".join(said.strip() for _, said in group)}
        for speaker, group in groupby(spoken, key=itemgetter(0))
    ]


def prompt_turns(text: str) -> list[dict[str, str]] | None:
    """The turns of a prompt that is a dialogue and ends with "Assistant:"; None if a text is no such thing."""
    whole = _dialogue(text).rstrip()
    if not _is_dialogue(text) or not whole.endswith(_ASSISTANT):
        return None
    return _turns(whole.removesuffix(_ASSISTANT))


def _split(first: tuple[str, str], second: tuple[str, str]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The shared turns of two dialogues, each given with its field, and the turn of each one's answer."""
    texts = []
    for field, text in (first, second):
        if not _is_dialogue(text):
            raise BadRow(field, f'got {text.strip()[:30]!r}, want a dialogue that begins with "Human:"')
        texts.append(_dialogue(text))
    both = f"{first[0]} and {second[0]}"
    at = texts[0].rfind(_ASSISTANT, 0, shared_length(*texts))
    if at < 0:
        raise BadRow(first[0], f'{both} share no "Assistant:" turn: want dialogues that differ at the end')
    answers = [text[at + len(_ASSISTANT) :] for text in texts]
    if any(_HUMAN in answer for answer in answers):
        raise BadRow(first[0], f"{both} part before the last answer: want the same dialogue up to it")
    return _turns(texts[0][:at]), [{"content": answer.strip()} for answer in answers]


def _scored(row: Mapping[str, Any]) -> dict[str, Any]:
    """The scores have no known scale, so they give the order and stay under `metadata.score`."""
    texts = row["text"]
    scores: Any = row.get("score")
    require(is_list(texts, str) and len(texts) == 2, "text", texts, "two dialogues")
    require(is_list(scores) and len(scores) == 2, "score", scores, "two numbers")
    a, b = (number(score, f"score.{i}") for i, score in enumerate(scores))
    prompt, answers = _split(("text.0", texts[0]), ("text.1", texts[1]))
    ranking = ranking_of({"a": a, "b": b}, best="highest")
    return {"prompt": prompt, **preference(*answers), "ranking": ranking, "metadata": other_keys(row, "text")}


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking with K = 2: response "a" is the chosen one, or the first text."""
    if "text" in row and "chosen" not in row:
        yield _scored(row)
        return
    chosen, rejected = ((key, require_text(row, key)) for key in ("chosen", "rejected"))
    prompt, answers = _split(chosen, rejected)
    yield {"prompt": prompt, **preference(*answers), "metadata": other_keys(row, "chosen", "rejected")}


FORMAT = Format(
    "hh",
    "keys chosen and rejected with dialogues of Human: and Assistant:, or text with two of them and score",
    recognise,
    convert,
)

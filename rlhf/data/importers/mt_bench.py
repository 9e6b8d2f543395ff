"""MT-Bench's questions: what a user says in several turns, without answers. Prompts for rollouts.

The first turn is the prompt. The later ones only make sense after the model's own answer, so they stay under
`metadata.later_turns`, and reference answers under `metadata.reference`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.importers import BadRow, Format, other_keys
from rlhf.data.records import shown


def recognise(row: Mapping[str, Any]) -> str | None:
    turns = row.get("turns")
    fits = isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) for turn in turns)
    return "key turns with what a user says" if fits and "prompt" not in row and "kind" not in row else None


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One prompt."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise BadRow("turns", f"got {shown(turns)}, want a list of texts")
    later = {"later_turns": turns[1:]} if turns[1:] else {}
    yield {"kind": "prompt", "prompt": turns[0], "metadata": other_keys(row, "turns") | later}


FORMAT = Format("mt_bench", "key turns with a list of texts", recognise, convert)

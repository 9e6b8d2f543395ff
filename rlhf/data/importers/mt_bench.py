"""MT-Bench's questions: what a user says in several turns, without answers. Prompts for rollouts.

The first turn is the prompt. The later ones only make sense after the model's own answer, so they stay under
`metadata.later_turns`, and reference answers under `metadata.reference`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import is_list, require
from rlhf.data.importers import Format, other_keys


def recognise(row: Mapping[str, Any]) -> str | None:
    fits = is_list(row.get("turns"), str)
    return "key turns with what a user says" if fits and "prompt" not in row and "kind" not in row else None


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One prompt."""
    turns: Any = row.get("turns")
    require(is_list(turns, str), "turns", turns, "a list of texts")
    later = {"later_turns": turns[1:]} if turns[1:] else {}
    yield {"kind": "prompt", "prompt": turns[0], "metadata": other_keys(row, "turns") | later}


FORMAT = Format("mt_bench", "key turns with a list of texts", recognise, convert)

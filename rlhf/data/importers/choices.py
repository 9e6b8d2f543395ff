"""A prompt with several chosen and several rejected answers, as reward benchmarks have them (RewardBench 2, RM-Bench).

Every chosen answer beats every rejected one; among the chosen, and among the rejected, nothing is said.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import id_and_rest, is_list, letters, require, with_system
from rlhf.data.importers import Format, hh, require_text


def recognise(row: Mapping[str, Any]) -> str | None:
    if "kind" in row or not isinstance(row.get("prompt"), str):
        return None
    both = all(is_list(row.get(key), str) for key in ("chosen", "rejected"))
    return "keys prompt, chosen and rejected, the latter two lists of strings" if both else None


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking of two levels.

    Raises: BadRow if chosen or rejected is no list of strings.
    """
    for key in ("chosen", "rejected"):
        require(is_list(row.get(key), str), key, row.get(key), "a list of strings")
    chosen, rejected, prompt = row["chosen"], row["rejected"], require_text(row, "prompt")
    names = letters(len(chosen) + len(rejected))
    name, rest = id_and_rest(row, "prompt", "chosen", "rejected", "system")
    yield {
        "kind": "ranking",
        "id": name,
        "prompt": with_system(row.get("system"), hh.prompt_turns(prompt) or [{"role": "user", "content": prompt}]),
        "responses": [{"id": i, "text": text} for i, text in zip(names, [*chosen, *rejected], strict=True)],
        "ranking": [list(names[: len(chosen)]), list(names[len(chosen) :])],
        "metadata": rest,
    }


FORMAT = Format("choices", "keys prompt, and chosen and rejected, each a list of strings", recognise, convert)

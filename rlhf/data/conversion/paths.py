"""Dotted paths into a row: `answers.0.text`, `answers.*.text` for every item of a list, and keys that contain dots.

A key that equals the whole path takes precedence over the path; of several keys with dots, the longest does. Text that is
itself JSON, such as a list in a table's cell, is parsed. The caller interprets the values.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.data.reading.json_rows import is_deep

MISSING = object()  # no such path; an existing null is None


def as_json(value: Any) -> Any:
    """The list or object in a JSON text; every other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if is_deep(parsed) else parsed


def lookup(value: Any, path: str) -> Any:
    """The value at a path, or `MISSING`."""
    value = as_json(value)
    if isinstance(value, Mapping):
        for key, rest in _splits(path):
            if key in value:
                inner = value[key] if rest is None else lookup(value[key], rest)
                if inner is not MISSING:
                    return inner
        return MISSING
    if not isinstance(value, Sequence) or isinstance(value, str):
        return MISSING
    step, _, rest_of_path = path.partition(".")
    if step == "*":
        items = [lookup(one, rest_of_path) for one in value] if rest_of_path else list(value)
        found_any = not items or any(one is not MISSING for one in items)
        return [None if one is MISSING else one for one in items] if found_any else MISSING
    index = _index(step, len(value))
    if index is None:
        return MISSING
    return lookup(value[index], rest_of_path) if rest_of_path else value[index]


def without(value: Any, path: str) -> Any:
    """A copy of a row without the value at the path; objects and lists that become empty are removed too, as None."""
    if isinstance(value, Mapping):
        for key, rest in _splits(path):
            if key in value and (rest is None or lookup(value[key], rest) is not MISSING):
                left = None if rest is None else without(value[key], rest)
                kept = {k: left if k == key else v for k, v in value.items()}
                if left is None:
                    del kept[key]
                return kept or None
    elif isinstance(value, list):
        step, _, rest_of_path = path.partition(".")
        index = _index(step, len(value))
        chosen = range(len(value)) if step == "*" else [] if index is None else [index]
        items = [
            (without(one, rest_of_path) if rest_of_path else None) if i in chosen else one
            for i, one in enumerate(value)
        ]
        return items if any(one is not None for one in items) else None
    return value


def _splits(path: str) -> list[tuple[str, str | None]]:
    """The ways to read a path as a key and the rest, longest key first."""
    parts = path.split(".")
    return [(path, None), *((".".join(parts[:i]), ".".join(parts[i:])) for i in range(len(parts) - 1, 0, -1))]


def _index(step: str, length: int) -> int | None:
    """A list's index, from the end if negative; None if it is not a number or there is no such item."""
    if not step.removeprefix("-").isdecimal() or not step.isascii() or len(step) > 9:
        return None
    index = int(step)
    return index % length if -length <= index < length else None

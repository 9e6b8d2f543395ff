"""JSON Lines files of a run: read with tolerance for damage, truncated for a resume, written as valid JSON."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.system.terminal import say


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file; a torn or foreign line is skipped, a missing file is empty."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if (row := parse_line(line)) is not None:
                yield row


def count_unreadable(path: Path) -> int:
    """Complete lines of a JSON Lines file without an object; a last one without a line end may be incomplete."""
    if not path.is_file():
        return 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        return sum(line.endswith("\n") and parse_line(line) is None for line in lines)


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """The object of one line; None if it is torn or contains something else. NaN and Infinity are read as null."""
    try:
        row = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def truncate_jsonl(path: Path, key: str, last: int) -> dict[str, Any]:
    """Keeps the lines of `path` whose integer `row[key]` is at most `last`, and returns the newest of them.

    A run that stopped has written some steps after its last checkpoint, and perhaps half a line; the resumed run
    writes those steps again. The file is replaced atomically.
    """
    newest: dict[str, Any] = {}
    if not path.is_file():
        return newest
    if lost := count_unreadable(path):
        say(f"{path}: {lost} lines cannot be read and are left out: the curves have gaps there")
    temporary = path.with_name(path.name + ".kept")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as out:
        for row in read_jsonl(path):
            if isinstance(row.get(key), int) and row[key] <= last:
                out.write(encode_line(row))
                newest = row
    os.replace(temporary, path)
    return newest


def encode_line(row: Mapping[str, Any]) -> str:
    # A lone surrogate cannot be UTF-8: the file's `backslashreplace` writes it as JSON's own escape.
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def is_number(value: object) -> bool:
    """Whether a value read from JSON is a number that can be shown."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30

"""Records that a labeler corrected later: `metadata.replaces` is the id of the record that no longer counts.

Files of labels are only appended to, so that nothing is lost when a program is killed; the reader leaves out replaced records. A record
replaces one of the same labeler in the same file.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rlhf.data.reading.json_rows import BLOCK_BYTES, line_blocks
from rlhf.data.reading.readers import open_bytes
from rlhf.data.records import Record
from rlhf.errors import UserError

MARK = b'"replaces"'
Replaced = frozenset[tuple[str, str | None]]  # ids of records, and their labelers
RecordType = TypeVar("RecordType", bound=Record)


def identity(record: Any) -> tuple[str, str | None]:
    return record.id, getattr(record, "labeler", None)


def without_replaced(records: Iterable[RecordType]) -> list[RecordType]:
    """The records that count, in their order."""
    known = list(records)
    replaced = {
        (old, getattr(record, "labeler", None))
        for record in known
        if (old := record.metadata.get("replaces")) is not None
    }
    return [record for record in known if identity(record) not in replaced] if replaced else known


def find_replaced(path: Path) -> Replaced:
    """The records that lines of a file replace; only lines with that key are parsed."""
    replaced: set[tuple[str, str | None]] = set()
    with suppress(UserError):  # reading the rows reports how the file is damaged
        for line in _lines_with_mark(path) if _has_mark(path) else ():
            try:
                row = json.loads(line)
                metadata = {**row, **(row.get("metadata") or {})}
            except (ValueError, TypeError, AttributeError, RecursionError):
                continue
            if isinstance(metadata.get("replaces"), str):
                replaced.add((metadata["replaces"], row.get("labeler")))
    return frozenset(replaced)


def _has_mark(path: Path) -> bool:
    """Whether MARK is anywhere in a file. In most it is not, and to know that takes less time than to find the lines."""
    end = b""
    with open_bytes(path) as file:
        while chunk := file.read(BLOCK_BYTES):
            if MARK in chunk or MARK in end + chunk[: len(MARK)]:
                return True
            end = (end + chunk[-len(MARK) :])[-len(MARK) :]  # the parts of packed files can be short
    return False


def _lines_with_mark(path: Path) -> Iterator[bytes]:
    with open_bytes(path) as file:
        for block in line_blocks(file):
            if MARK in block.data:
                yield from (line for line in block.data.split(b"\n") if MARK in line)

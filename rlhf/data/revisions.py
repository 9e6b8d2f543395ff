"""Records that a labeler corrected later: `metadata.replaces` is the id of the record that no longer counts.

Files of labels are only appended to, so that nothing is lost when a program is killed; the reader leaves out replaced records. A record
replaces one of the same labeler in the same file.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from rlhf.data.reading.json_rows import line_blocks
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
    replaced = set()
    with suppress(UserError), open_bytes(path) as file:  # reading the rows reports how the file is damaged
        marked = (block.data.split(b"\n") for block in line_blocks(file) if MARK in block.data)
        for line in chain.from_iterable(marked):
            if MARK not in line:
                continue
            try:
                row = json.loads(line)
                metadata = {**row, **(row.get("metadata") or {})}
            except (ValueError, TypeError, AttributeError, RecursionError):
                continue
            if isinstance(metadata.get("replaces"), str):
                replaced.add((metadata["replaces"], row.get("labeler")))
    return frozenset(replaced)

"""A file in parts that become batches. Their bounds depend only on the file, and so does the output."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from rlhf.data.importers import LOOK_AHEAD, row_bytes
from rlhf.data.reading.json_rows import Block, line_blocks, parse_block
from rlhf.data.reading.readers import Meter, Reject, Row, open_bytes
from rlhf.data.reading.rows import TableOptions, read_rows
from rlhf.data.reading.sources import TABLE_SUFFIXES, Source, has_suffix
from rlhf.errors import UserError
from rlhf.system.files import sha256_file

BATCH_ROWS = 1000
BATCH_BYTES = 4 << 20
Unit = Block | list[Row | Reject]


def file_units(source: Source, options: TableOptions, meter: Meter) -> Iterator[Unit]:
    """A file in parts that become batches; their bounds depend on the file alone."""
    if source.path is not None and has_suffix(source.path, (".jsonl",)):
        with open_bytes(source.path, meter) as file:
            yield from line_blocks(file)
        return
    yield from row_units(read_rows(source, options, meter))


def row_units(rows: Iterable[Row | Reject]) -> Iterator[list[Row | Reject]]:
    """Rows in parts that become batches."""
    part: list[Row | Reject] = []
    size = 0
    for row in rows:
        part.append(row)
        size += len(row.raw or b"") if isinstance(row, Reject) else len(row_bytes(row))
        if len(part) == BATCH_ROWS or size >= BATCH_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def table_note(source: Source, options: TableOptions) -> str:
    """How a table is read: its delimiter, or which of its sheets."""
    from rlhf.data.reading.tables import describe_table

    if source.path is None or not has_suffix(source.path, TABLE_SUFFIXES):
        return ""
    return describe_table(source.path, source.name, encoding=options.encoding, sheet=options.sheet) + "; "


def first_rows(unit: Unit, name: str, count: int = LOOK_AHEAD) -> list[Row]:
    """The rows for recognising the format; empty if the unit has only rejects and blank lines."""
    return list(islice((item for item in rows_of(unit, name) if isinstance(item, Row)), count))


def rows_of(unit: Unit, name: str, read: Callable[[bytes], Any] | None = None) -> Iterable[Row | Reject]:
    """The rows of a unit; `read` as in `parse_block`."""
    return parse_block(unit, name, read) if isinstance(unit, Block) else unit


def last_line(unit: Unit) -> int:
    """The line of the file at which the unit ends."""
    if isinstance(unit, Block):
        return unit.line + max(1, unit.data.count(b"\n")) - 1
    return unit[-1].line if unit else 0


class Digest:
    """The sha256 of a source: of the file on disk, hashed while its rows are read, or of the rows of a data set from the hub."""

    def __init__(self, source: Source):
        self._path = source.path
        self._rows = hashlib.sha256()
        self._sha256 = ""
        self._error: UserError | None = None
        # A daemon, so that an import that is stopped does not wait for it.
        self._thread = threading.Thread(target=self._hash_file, daemon=True)
        if self._path is not None:
            self._thread.start()

    def _hash_file(self) -> None:
        assert self._path is not None
        try:
            self._sha256 = sha256_file(self._path)
        except OSError as error:
            self._error = UserError(f"{self._path}: cannot be read ({error.strerror or error})")
        except UserError as error:
            self._error = error

    def watch(self, units: Iterator[Unit]) -> Iterator[Unit]:
        for unit in units:
            if self._path is None and isinstance(unit, list):
                for row in unit:
                    if isinstance(row, Row):
                        self._rows.update(row_bytes(row))
            yield unit

    def hexdigest(self) -> str:
        """Raises: UserError if the file cannot be read."""
        if self._path is None:
            return self._rows.hexdigest()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._sha256

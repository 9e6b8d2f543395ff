"""Tables of typed cells as rows: Parquet and Arrow through pyarrow, spreadsheets (.xlsx, .xls, .ods) through calamine.

Calamine stores a sheet as one dense block from its first to its last value, so a file of a kilobyte with two cells far
apart can use all memory. A workbook is therefore measured before it is opened: its unpacked size, and the block of its
cells. Formulas give the value that was saved.
"""

import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import IO, Any

from rlhf.data.inputs import MAX_RECORD_BYTES, Reading, Reject, Row
from rlhf.data.records import first_repeat
from rlhf.errors import UserError
from rlhf.system.terminal import one_line

_BATCH = 64  # rows of Parquet and Arrow converted at a time
MAX_UNPACKED_BYTES = 1 << 29  # of all parts of one file together
MAX_CELLS = 20_000_000  # of the block of a sheet's cells
_CHUNK = 1 << 20
_CELL = re.compile(rb'<(?:\w+:)?c [^>]*?\br="([A-Z]{1,3})(\d{1,7})"')
_REPEATED = re.compile(rb'number-(?:rows|columns)-repeated="(\d{1,9})"')


def check_header(cells: Sequence[Any], place: str) -> list[str]:
    """The names of the columns, without white space around them. Raises: UserError if one is empty or appears twice."""
    names = ["" if cell is None else str(cell).strip() for cell in cells]
    empty = [str(i) for i, one in enumerate(names, start=1) if not one]
    if empty:
        where = ", ".join(empty[:5]) + (", …" if len(empty) > 5 else "")
        raise UserError(f"{place}: column {where} without a name in the header: want a name for each column")
    if (twice := first_repeat(names)) is not None:
        raise UserError(f'{place}: the header names "{twice}" twice: rename one of these columns')
    if any("\0" in one for one in names):
        raise UserError(f"{place}: the header contains NUL bytes: if the file is UTF-16, set encoding=utf-16")
    return names


def plain(value: Any) -> Any:
    """A cell as a JSON value; NaN, which means an empty cell, is None. Raises: ValueError for one that JSON has not."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if math.isinf(value):
                raise ValueError("got an infinite number, want a finite one")
            return None if math.isnan(value) else value
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return plain(int(value) if value == value.to_integral_value() else float(value))
        case bytes():
            return value.decode("utf-8")
        case dict():
            return {str(key): plain(one) for key, one in value.items()}
        case list() | tuple():
            return [plain(one) for one in value]
    raise ValueError(f"got a {type(value).__name__}, want text, a number, a list or an object")


# --- Parquet and Arrow ----------------------------------------------------------------------------------------------


def _arrow_batches(path: Path, name: str, suffix: str) -> Iterator[Any]:
    """Record batches of at most _BATCH rows, after a check of the header."""
    import pyarrow
    from pyarrow import ipc, parquet

    if suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            check_header(file.schema_arrow.names, name)
            yield from file.iter_batches(batch_size=_BATCH)
        return
    with pyarrow.memory_map(str(path)) as mapped:
        try:
            opened = ipc.open_stream(mapped)
            batches = iter(opened)
        except pyarrow.ArrowInvalid:  # not the form for streams: the one for files
            mapped.seek(0)
            opened = ipc.open_file(mapped)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        check_header(opened.schema.names, name)
        for batch in batches:
            batch.validate(full=True)  # Arrow trusts the offsets in a file, and would read outside of it
            for start in range(0, batch.num_rows, _BATCH):
                yield batch.slice(start, _BATCH)


def read_arrow_file(path: Path, name: str, suffix: str) -> Iterator[Row | Reject]:
    """The rows of a file, a few at a time. Raises: UserError where the file is damaged."""
    import pyarrow

    number = 0
    try:
        for batch in _arrow_batches(path, name, suffix):
            if batch.nbytes > 4 * MAX_RECORD_BYTES:
                raise UserError(f"{name}: rows {number + 1} to {number + _BATCH} hold too much text: make them shorter")
            try:
                rows: list[Any] = batch.to_pylist()
            except (pyarrow.ArrowException, ValueError, OverflowError):  # find the row
                rows = [batch.slice(i, 1) for i in range(batch.num_rows)]
            for row in rows:
                number += 1
                try:
                    yield Row(number, plain(row if isinstance(row, dict) else row.to_pylist()[0]), number)
                except (ValueError, OverflowError, RecursionError) as error:
                    yield Reject(name, number, "", one_line(error), number)
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, NotImplementedError) as error:
        reason = one_line(error, 200)
        raise UserError(
            f"{name}: damaged {suffix} file after row {number} ({reason}): copy or download it again"
        ) from error


# --- spreadsheets ---------------------------------------------------------------------------------------------------


def _tags(file: IO[bytes]) -> Iterator[bytes]:
    """The tags of an XML part, as it streams by."""
    rest = b""
    while chunk := file.read(_CHUNK):
        *tags, rest = re.split(rb"(?=<)", rest + chunk)
        yield from tags
    yield rest


def _block(tags: Iterator[bytes]) -> tuple[int, int, list[int]]:
    """The last row and column of a part's cells, and in .xlsx all rows that have cells, with a value or without.

    In .ods rows and cells that repeat count as often as they say, up to the last value; all sheets count as one.
    """
    rows: dict[int, None] = {}
    row = column = last_row = last_column = 0
    for tag in tags:
        if match := _CELL.match(tag):
            last_column = max(last_column, reduce(lambda n, letter: n * 26 + letter - 64, match[1], 0))
            rows[int(match[2])] = None
        elif tag.startswith((b"<table:table-row", b"<table:table-cell", b"<table:covered-table-cell")):
            repeats = int(match[1]) if (match := _REPEATED.search(tag)) else 1
            row, column = (row + repeats, 0) if tag.startswith(b"<table:table-row") else (row, column + repeats)
            if b"value-type" in tag:
                last_row, last_column = row, max(last_column, column)
    return max(last_row, *rows, 0), last_column, list(rows)


def _measure(path: Path, name: str) -> dict[str, list[int]]:
    """Check the sizes of a packed file, since a small one can unpack to any size; the rows with cells of each part.

    Raises: UserError.
    """
    with path.open("rb") as file:
        if file.read(4) == b"\xd0\xcf\x11\xe0":
            raise UserError(f"{name}: protected by a password, or an .xls file by another name: save it as .xlsx")
    stored: dict[str, list[int]] = {}
    with zipfile.ZipFile(path) as archive:
        if sum(part.file_size for part in archive.infolist()) > MAX_UNPACKED_BYTES:
            raise UserError(f"{name}: unpacks to more than {MAX_UNPACKED_BYTES >> 20} MB: export the sheet as CSV")
        if (part_name := archive.testzip()) is not None:  # also one that is larger than it says
            raise zipfile.BadZipFile(f"{part_name} is damaged")
        for part in archive.infolist():
            if part.filename == "content.xml" or part.filename.startswith("xl/worksheets/"):
                with archive.open(part) as opened:
                    rows, columns, stored[part.filename] = _block(_tags(opened))
                if rows * columns > MAX_CELLS:
                    span = f"{rows} rows x {columns} columns, above {MAX_CELLS} cells"
                    raise UserError(f"{name}: its cells span {span}: delete stray cells or export it as CSV")
    return stored


def read_sheet(path: Path, name: str, reading: Reading) -> Iterator[Row]:
    """The rows of one sheet, the named or the first one, under its first row that is not empty.

    Raises: UserError if the file is none, is too large or protected, or has no such sheet.
    """
    from python_calamine import CalamineError, CalamineWorkbook, PasswordError

    damaged = (CalamineError, zipfile.BadZipFile, zlib.error, EOFError, LookupError, ValueError, RuntimeError, OSError)
    try:
        stored = {} if path.suffix.lower() == ".xls" else _measure(path, name)
        with CalamineWorkbook.from_path(str(path)) as book:
            names = list(book.sheet_names)
            chosen = reading.sheet if reading.sheet is not None else names[0] if names else None
            if chosen not in names:
                raise UserError(f"sheet={chosen}: {name} has no such sheet: it has {', '.join(names) or 'none'}")
            reading.note = f'sheet "{chosen}" of {len(names)}'
            part = f"xl/worksheets/sheet{names.index(chosen) + 1}.xml"
            rows = _filled_rows(book.get_sheet_by_name(chosen), stored.get(part, []))
            yield from _under_header(rows, f'{name}, sheet "{chosen}"')
    except PasswordError as error:
        raise UserError(f"{name}: protected by a password: save it without one") from error
    except damaged as error:
        reason = one_line(error, 200) or type(error).__name__
        raise UserError(f"{name}: damaged {path.suffix} file ({reason}): save it again or export it as CSV") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by the Rust library when one of its assertions fails
            raise
        raise UserError(f"{name}: damaged {path.suffix} file: save it again or export it as CSV") from error


def _filled_rows(sheet: Any, stored: list[int]) -> Iterator[tuple[int, list[Any]]]:
    """(number as the program shows it, cells); a cell merged over several rows appears in each of them.

    After the last value, rows count that the file stores cells for, such as formatted ones.
    """
    left = (sheet.start or (0, 0))[1]
    merges = sorted(sheet.merged_cell_ranges or [], reverse=True)
    active: list[tuple[int, int, Any]] = []  # last row, column, value
    line = 0
    for line, values in enumerate(sheet.iter_rows(), start=1):
        cells = [_cell(value) for value in values]
        active = [one for one in active if one[0] >= line - 1]
        for _, column, value in active:
            cells[column] = value
        while merges and merges[-1][0][0] <= line - 1:
            (top, column), (bottom, _) = merges.pop()
            if bottom > top == line - 1 and 0 <= column - left < len(cells):
                active.append((bottom, column - left, cells[column - left]))
        yield line, cells
    yield from ((after, []) for after in stored if after > line)


def _cell(value: Any) -> Any:
    """A cell's value; spreadsheets have one kind of number, and whole ones become int."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if value != "" else None


def _under_header(rows: Iterator[tuple[int, list[Any]]], place: str) -> Iterator[Row]:
    header: list[str] = []
    first_row = 0
    for line, cells in rows:
        if header:
            if any(cell is not None for cell in cells[len(header) :]):
                raise UserError(f"{place}:{line}: a cell beyond the last column that has a name: name its column")
            filled = [*cells, *[None] * len(header)]
            yield Row(line, {key: plain(cell) for key, cell in zip(header, filled, strict=False)}, line - first_row)
        elif any(cell is not None for cell in cells):
            last = max(i for i, cell in enumerate(cells) if cell is not None)
            header, first_row = check_header(cells[: last + 1], f"{place}:{line}"), line

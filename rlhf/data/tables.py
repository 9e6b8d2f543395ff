"""Tables as rows: CSV by csv, Parquet by pyarrow, spreadsheets (.xlsx) by calamine. An empty line is no row.

Calamine stores a sheet as one dense block from its first to its last value, so a file of a kilobyte with two cells far
apart can use all memory. A workbook is therefore measured before it is opened: its unpacked size, and the block of its
cells. Formulas give the value that was saved.
"""

import codecs
import csv
import io
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import IO, Any

from rlhf.data.inputs import MAX_RECORD_BYTES, Row, Source, open_bytes
from rlhf.data.records import first_repeat
from rlhf.errors import UserError
from rlhf.system.terminal import one_line

_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
_BATCH = 64  # rows of Parquet converted at a time
MAX_UNPACKED_BYTES = 1 << 29  # of all parts of one file together
MAX_CELLS = 20_000_000  # of the block of a sheet's cells
_CELL = re.compile(rb'(?:\w+:)?c [^>]*?\br="([A-Z]{1,3})(\d{1,7})"')


def check_header(cells: Sequence[Any], place: str) -> list[str]:
    """The names of the columns, without white space around them. Raises: UserError if one is empty or appears twice."""
    names = ["" if cell is None else str(cell).strip() for cell in cells]
    if "" in names:
        raise UserError(
            f"{place}: column {names.index('') + 1} without a name in the header: want a name for each column"
        )
    if (twice := first_repeat(names)) is not None:
        raise UserError(f'{place}: the header names "{twice}" twice: rename one of these columns')
    return names


def read_delimited(path: Path, suffix: str, source: Source) -> Iterator[Row]:
    """The rows after the header. The delimiter is a tab in .tsv, else whichever of comma, semicolon and tab gives the header most
    columns.

    Raises: UserError if a quote never closes, and for a wrong header or encoding.
    """
    name, encoding = source.name, source.encoding
    csv.field_size_limit(MAX_RECORD_BYTES)
    codec = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding  # reads past a byte-order mark
    try:
        with open_bytes(path, source) as file:
            text = io.TextIOWrapper(file, codec, errors="surrogateescape", newline="")  # type: ignore[arg-type]
            yield from _delimited_rows(text, suffix, source)
    except UnicodeError as error:
        raise UserError(
            f"{name}: not {encoding} text ({error}): set encoding=utf-8, utf-16, cp1252, … (of rlhf import; of classify data.encoding)"
        ) from error


def _delimited_rows(text: io.TextIOWrapper, suffix: str, source: Source) -> Iterator[Row]:
    name, first = source.name, text.readline(MAX_RECORD_BYTES)
    delimiter = "\t" if suffix == ".tsv" else max(_DELIMITERS, key=re.sub('"[^"]*"', "", first).count)
    source.note = f"columns divided by {_DELIMITERS[delimiter]}"
    record: list[str] = []  # its lines

    def lines() -> Iterator[str]:
        for line in chain([first], iter(lambda: text.readline(MAX_RECORD_BYTES), "")):
            record.append(line)
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    header: list[str] = []
    number = 0
    while True:
        record.clear()
        line, problem, cells = reader.line_num + 1, "", []
        try:
            cells = next(reader, [])
        except csv.Error as error:
            if "unexpected end" in str(error) or "field limit" in str(error):
                what = "a quote opens a cell and never closes: close it, or double it if it belongs to the text"
                raise UserError(f"{name}:{line}: damaged CSV: {what}") from error
            problem = f"not CSV ({error}): want quotes around the whole cell, and doubled inside of it"
        whole = "".join(record)
        if not whole:
            return
        if not whole.strip("\r\n"):
            continue  # an empty line is no row
        if not whole.isascii() and (wrong := re.search("[\udc80-\udcff]", whole)):
            byte = ord(wrong[0]) - 0xDC00
            problem = f"byte 0x{byte:02x} is not {source.encoding} text: set encoding=cp1252, … (of rlhf import; of classify data.encoding)"
        if not header:
            if problem:
                raise UserError(f"{name}:{line}: header: {problem}")
            header = check_header(cells, f"{name}:{line}")
            continue
        number += 1
        if not problem and len(cells) != len(header):
            problem = f"got {len(cells)} cells, want {len(header)} as in the header: quote cells with the delimiter"
        value = {key: cell or None for key, cell in zip(header, cells, strict=False)}
        yield Row(name, line, number, value, whole.encode("utf-8", "surrogateescape"), problem)


def plain(value: Any) -> Any:
    """A row as JSON values: other kinds, such as times, become text; NaN, which means an empty cell, becomes None."""

    def text(other: Any) -> Any:
        if hasattr(other, "tolist"):  # an array or a number of numpy
            return other.tolist()
        if isinstance(other, bytes):
            return other.decode("utf-8")
        return other.isoformat() if hasattr(other, "isoformat") else str(other)

    return json.loads(json.dumps(value, default=text), parse_constant=_constant)


def _constant(name: str) -> None:
    if name != "NaN":
        raise ValueError("got an infinite number, want a finite one")


def read_columns(path: Path, name: str) -> Iterator[Row]:
    """The rows of a Parquet file, a few at a time. Raises: UserError if the file is damaged."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            check_header(file.schema_arrow.names, name)
            for batch in file.iter_batches(batch_size=_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    try:
                        yield Row(name, number, number, plain(row))
                    except (ValueError, RecursionError) as error:
                        yield Row(name, number, number, {}, problem=one_line(error))
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError, NotImplementedError) as error:
        where = f"{name}: damaged .parquet file after row {number}"
        raise UserError(f"{where} ({one_line(error, 200)}): copy or download it again") from error


def _measure(file: IO[bytes]) -> int:
    """The cells of the block from the first row and column to the last ones that a sheet names."""
    rows = columns = 0
    rest = b""
    while chunk := file.read(1 << 20):
        *tags, rest = (rest + chunk).split(b"<")
        for match in filter(None, map(_CELL.match, tags)):
            rows = max(rows, int(match[2]))
            columns = max(columns, reduce(lambda n, letter: n * 26 + letter - 64, match[1], 0))
    return rows * columns


def _check_size(path: Path, name: str) -> None:
    """Raises: UserError for a workbook that is too large, since a small file can unpack to any size."""
    with zipfile.ZipFile(path) as archive:
        if sum(part.file_size for part in archive.infolist()) > MAX_UNPACKED_BYTES:
            raise UserError(f"{name}: unpacks to more than {MAX_UNPACKED_BYTES >> 20} MB: export the sheet as CSV")
        if (damaged := archive.testzip()) is not None:  # also one that is larger than it says
            raise zipfile.BadZipFile(f"{damaged} is damaged")
        for part in archive.namelist():
            if part.startswith("xl/worksheets/"):
                with archive.open(part) as opened:
                    cells = _measure(opened)
                if cells > MAX_CELLS:
                    span = f"{cells:,} cells, above {MAX_CELLS:,}"
                    raise UserError(f"{name}: a sheet spans {span}: delete stray cells or export it as CSV")


def read_sheet(path: Path, source: Source) -> Iterator[Row]:
    """The rows of one sheet, the named or the first one, under its first row that is not empty.

    Raises: UserError if the file is none, is too large or protected, or has no such sheet.
    """
    from python_calamine import CalamineWorkbook

    name = source.name
    try:
        _check_size(path, name)
        with CalamineWorkbook.from_path(str(path)) as book:
            names = list(book.sheet_names)
            chosen = source.sheet if source.sheet is not None else names[0] if names else None
            if chosen not in names:
                raise UserError(f"sheet={chosen}: {name} has no such sheet: it has {', '.join(names) or 'none'}")
            source.note = f'sheet "{chosen}" of {len(names)}'
            yield from _sheet_rows(book.get_sheet_by_name(chosen), name, f'{name}, sheet "{chosen}"')
    except (UserError, GeneratorExit):
        raise
    except BaseException as error:
        # The Rust library raises PanicException, no Exception, when one of its assertions fails.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = one_line(error, 200) or type(error).__name__
        remedy = "save it again without one or export it as CSV"
        raise UserError(f"{name}: damaged, or protected by a password ({reason}): {remedy}") from error


def _sheet_rows(sheet: Any, name: str, place: str) -> Iterator[Row]:
    """The rows with the line that the program shows. Spreadsheets have one kind of number: whole ones become int."""
    header: list[str] = []
    number = 0
    for line, values in enumerate(sheet.iter_rows(), start=1):
        cells = [int(x) if isinstance(x, float) and x.is_integer() and abs(x) < 2**53 else x for x in values]
        filled = [i for i, cell in enumerate(cells) if cell not in ("", None)]
        if not filled:
            continue
        if not header:
            header = check_header(cells[: filled[-1] + 1], f"{place}:{line}")
            continue
        if filled[-1] >= len(header):
            raise UserError(f"{place}:{line}: a cell beyond the last column that has a name: name its column")
        number += 1
        row = zip(header, [*cells, *[None] * len(header)], strict=False)
        yield Row(name, line, number, plain({key: None if cell == "" else cell for key, cell in row}))

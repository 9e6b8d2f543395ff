"""Rows by libraries: Parquet by pyarrow, spreadsheets (.xlsx) by calamine, data sets of the hub by datasets. An empty line is no row.

Calamine stores a sheet as one dense block from its first to its last value, so a file of a kilobyte with two cells far
apart can use all memory. A workbook is therefore measured before it is opened: its unpacked size, and the block of its
cells. Formulas give the value that was saved.
"""

import json
import re
import zipfile
from collections.abc import Iterator
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import IO, Any

from rlhf.data.inputs import Row, Source, check_header
from rlhf.errors import UserError, hub_remedy, reading
from rlhf.system.terminal import one_line

_BATCH = 64  # rows of Parquet converted at a time
MAX_UNPACKED_BYTES = 1 << 29  # of all parts of one file together
MAX_CELLS = 20_000_000  # of the block of a sheet's cells
_CELL = re.compile(rb'(?:\w+:)?c [^>]*?\br="([A-Z]{1,3})(\d{1,7})"')


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
            batches = file.iter_batches(batch_size=_BATCH)
            for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1):
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
    """The rows of one sheet, the named or the first one, under its first row that is not empty. Raises: UserError if
    the file is none, is too large or protected, or has no such sheet.
    """
    from python_calamine import CalamineWorkbook

    name = source.name
    with reading(f"{name}: damaged, or protected by a password", "save it again without one or export it as CSV"):
        _check_size(path, name)
        with CalamineWorkbook.from_path(str(path)) as book:
            names = list(book.sheet_names)
            chosen = source.sheet if source.sheet is not None else names[0] if names else None
            if chosen not in names:
                raise UserError(f"sheet={chosen}: {name} has no such sheet: it has {', '.join(names) or 'none'}")
            source.note = f'sheet "{chosen}" of {len(names)}'
            yield from _sheet_rows(book.get_sheet_by_name(chosen), name, f'{name}, sheet "{chosen}"')


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


def read_hub(name: str) -> Iterator[Row]:
    """The rows of a data set of the hub, of its train split if it has one; without a network from the cache. Raises:
    UserError if there is no such data set.
    """
    import datasets

    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # no network, no such name, gated, scripts
        reason = one_line(str(error) or type(error).__name__, 200)
        otherwise = "check the path or the name and the network, or download it and give the file"
        came = "no such file or folder; taken for a hub id, but the hub gave no data set of that name"
        raise UserError(f"{name}: {came} ({reason}): {hub_remedy(error, f'datasets/{name}', otherwise)}") from error
    for number, row in enumerate(splits["train"] if "train" in splits else next(iter(splits.values())), start=1):
        yield Row(name, number, number, dict(row))

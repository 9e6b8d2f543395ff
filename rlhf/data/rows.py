"""Rows of a source, by its suffix: JSON and CSV are read here, Parquet by pyarrow, spreadsheets (.xlsx) by calamine,
data sets of the hub by datasets. An empty line is no row.

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
from contextlib import suppress
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from rlhf.data.inputs import ROW_SUFFIXES, Source, has_suffix, open_bytes
from rlhf.data.records import first_repeat
from rlhf.errors import UserError, hub_remedy, reading
from rlhf.system.schemas import shown
from rlhf.system.terminal import one_line

MAX_RECORD_BYTES = 64 << 20  # of one row: this bounds the memory
MAX_ARRAY_BYTES = 1 << 30  # of a JSON file that is no JSON Lines, which is held in memory
MAX_DEPTH = 200  # levels of lists and objects; pydantic writes no record that nests more than 255
_TOO_DEEP = f"nested too deeply, more than {MAX_DEPTH} levels"
_ENCODING = "cp1252, … (of rlhf import; of classify data.encoding)"  # the remedy
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
_BATCH = 64  # rows of Parquet converted at a time
MAX_UNPACKED_BYTES = 1 << 29  # of all parts of one file together
MAX_CELLS = 20_000_000  # of the block of a sheet's cells
_CELL = re.compile(rb'(?:\w+:)?c [^>]*?\br="([A-Z]{1,3})(\d{1,7})"')


class Row(NamedTuple):
    """A row of a file: an object, or a reject if it has a problem."""

    file: str
    line: int  # where it begins; in arrays, and in tables without lines, the ordinal
    number: int  # its ordinal from 1
    value: dict[str, Any]
    raw: bytes | None = None  # as in the file; None: `value` as JSON
    problem: str = ""  # why it is a reject: `got …, want …`
    field: str = ""  # the wrong one
    records: Sequence[Any] = ()  # what became of it
    own_id: bool = False  # whether the file gives the records' ids

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.problem}"

    def original(self) -> bytes:
        """The bytes in its file, or its JSON if it comes from no line."""
        if self.raw is not None:
            return self.raw
        return json.dumps(self.value, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")


def read_rows(source: Source) -> Iterator[Row]:
    """The rows of a file or a hub data set. Raises: UserError if the source as a whole cannot be read."""
    path = source.path
    if path is None:
        yield from read_hub(source.name)
    elif has_suffix(path, ROW_SUFFIXES):
        as_lines = has_suffix(path, (".jsonl",)) or holds_lines(path)
        with open_bytes(path, source) as file:
            yield from (read_lines if as_lines else read_values)(file, source.name)
    elif has_suffix(path, (".csv", ".tsv")):
        yield from read_delimited(path, source)
    elif has_suffix(path, (".parquet",)):
        yield from read_columns(path, source.name)
    else:
        yield from read_sheet(path, source)


def is_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether lists and objects nest more than so many levels."""
    inside = list(value.values()) if isinstance(value, dict) else value
    return isinstance(inside, list) and (not levels or any(is_deep(one, levels - 1) for one in inside))


def holds_lines(path: Path) -> bool:
    """Whether a .json file has an object on its first line and more after it, so that it is read as JSON Lines."""
    with open_bytes(path) as file:
        first = next(filter(bytes.strip, iter(lambda: file.readline(MAX_RECORD_BYTES), b"")), b"")
        with suppress(ValueError, RecursionError):
            is_object = isinstance(json.loads(first.decode("utf-8-sig", "surrogateescape")), dict)
            return is_object and bool(file.read(1 << 16).strip())
    return False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"key {shown(first_repeat(key for key, _ in pairs))} appears twice in one object: keep one")
    return value


def _constant(name: str) -> None:
    raise ValueError(f"got {name}, which JSON has not: want a number or null")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _bad_byte(text: str, encoding: str) -> str:
    """Names the first byte of a text that was not of this encoding; empty without one."""
    wrong = None if text.isascii() else re.search("[\udc80-\udcff]", text)
    return f"byte 0x{ord(wrong[0]) - 0xDC00:02x} is not {encoding}" if wrong else ""


def _problem_of(value: Any, text: str) -> str:
    """What is wrong with the value of a row with this text; empty if nothing is."""
    if not isinstance(value, dict):
        return f"got {shown(value)}, want an object {{…}}"
    if text.count("[") + text.count("{") > MAX_DEPTH and is_deep(value):
        return _TOO_DEEP
    whole = "" if text.isascii() and "\\u" not in text else json.dumps(value, ensure_ascii=False)
    if byte := _bad_byte(whole, "UTF-8"):
        return f"{byte}: save the file as UTF-8"
    surrogate = "got a lone surrogate (half of a character), want text that UTF-8 can hold"
    return surrogate if re.search("[\ud800-\udfff]", whole) else ""


def read_lines(file: IO[bytes], name: str) -> Iterator[Row]:
    """The objects of a file with one per line; blank lines are skipped. The reject of a line that is too long has its beginning."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_RECORD_BYTES), b""), start=1):
        if len(line) == MAX_RECORD_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            problem = f"got a longer line, want one of at most {MAX_RECORD_BYTES >> 20} MB"
            yield Row(name, number, number, {}, line[: 1 << 20], problem)
            continue
        raw = line.rstrip(b"\r\n")
        text = raw.decode("utf-8-sig", "surrogateescape").strip(" \t")
        if not text:
            continue
        value: Any = {}
        try:
            value = _DECODER.decode(text)
            problem = _problem_of(value, text)
        except RecursionError:
            problem = _TOO_DEEP
        except json.JSONDecodeError as error:
            problem = _problem_of({"": text}, text) or f"not JSON ({error}): want one object per line"
        except ValueError as error:
            problem = str(error)
        yield Row(name, number, number, value, raw, one_line(problem))


def read_values(file: IO[bytes], name: str) -> Iterator[Row]:
    """The items of a JSON array, or a single object. Raises: UserError if the file is damaged, or larger than MAX_ARRAY_BYTES."""
    content = file.read(MAX_ARRAY_BYTES + 1)
    if len(content) > MAX_ARRAY_BYTES:
        raise UserError(f"{name}: above {MAX_ARRAY_BYTES >> 20} MB: write it as JSON Lines, one object per line")
    text = content.decode("utf-8-sig", "surrogateescape")
    del content
    try:
        items = _DECODER.decode(text) if text.strip() else []
        if is_deep(items):
            raise ValueError(_TOO_DEEP)
    except (ValueError, RecursionError) as error:
        reason = _TOO_DEEP if isinstance(error, RecursionError) else one_line(error, 200)
        raise UserError(f"{name}: damaged JSON ({reason}): correct it or download it again") from error
    for number, value in enumerate(items if isinstance(items, list) else [items], start=1):
        yield Row(name, number, number, value, problem=_problem_of(value, json.dumps(value)))


def check_header(cells: Sequence[Any], place: str) -> list[str]:
    """The names of the columns, without white space around them. Raises: UserError if one is empty or appears twice."""
    names = ["" if cell is None else str(cell).strip() for cell in cells]
    if "" in names:
        unnamed = f"column {names.index('') + 1} without a name in the header"
        raise UserError(f"{place}: {unnamed}: want a name for each column")
    if (twice := first_repeat(names)) is not None:
        raise UserError(f'{place}: the header names "{twice}" twice: rename one of these columns')
    return names


def read_delimited(path: Path, source: Source) -> Iterator[Row]:
    """The rows after the header. The delimiter is a tab in .tsv, else whichever of comma, semicolon and tab gives the
    header most columns. Raises: UserError if a quote never closes, and for a wrong header or encoding.
    """
    name, encoding = source.name, source.encoding
    csv.field_size_limit(MAX_RECORD_BYTES)
    codec = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding  # reads past a byte-order mark
    try:
        with open_bytes(path, source) as file:
            text = io.TextIOWrapper(file, codec, errors="surrogateescape", newline="")  # type: ignore[arg-type]
            yield from _delimited_rows(text, has_suffix(path, (".tsv",)), source)
    except UnicodeError as error:
        raise UserError(f"{name}: not {encoding} text ({error}): set encoding=utf-8, utf-16, {_ENCODING}") from error


def _delimited_rows(text: io.TextIOWrapper, tabs: bool, source: Source) -> Iterator[Row]:
    name, first = source.name, text.readline(MAX_RECORD_BYTES)
    delimiter = "\t" if tabs else max(_DELIMITERS, key=re.sub('"[^"]*"', "", first).count)
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
        if not (whole := "".join(record)):
            return
        if not whole.strip("\r\n"):
            continue  # an empty line is no row
        if byte := _bad_byte(whole, source.encoding):
            problem = f"{byte} text: set encoding={_ENCODING}"
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

    return json.loads(json.dumps(value, default=text), parse_constant=lambda x: None if x == "NaN" else _constant(x))


def read_columns(path: Path, name: str) -> Iterator[Row]:
    """The rows of a Parquet file, a few at a time. Raises: UserError if the file is damaged."""
    from pyarrow import parquet

    with reading(f"{name}: damaged .parquet file", "copy or download it again"), parquet.ParquetFile(path) as file:
        check_header(file.schema_arrow.names, name)
        batches = file.iter_batches(batch_size=_BATCH)
        for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1):
            try:
                yield Row(name, number, number, plain(row))
            except (ValueError, RecursionError) as error:
                yield Row(name, number, number, {}, problem=one_line(error))


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

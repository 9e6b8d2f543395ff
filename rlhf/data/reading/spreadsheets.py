"""Spreadsheets (.xlsx, .xls, .ods) as rows of cells, through calamine; formulas give the value that was saved.

Calamine stores a sheet as one dense block from its first to its last value, so a file of a kilobyte with two cells
far apart can use all memory. Files are therefore measured before they are opened: their unpacked size, and the block
that their cells span.
"""

import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

from rlhf.errors import UserError

SPREADSHEET_SUFFIXES = (".xlsx", ".xls", ".ods")
MAX_UNPACKED_BYTES = 1 << 30  # of all parts of one file together
MAX_CELLS = 20_000_000  # of the block between a sheet's first and last value
MAX_CHARACTERS = 1 << 29  # of the cells of one sheet
_CHUNK = 1 << 16
_REFERENCE = re.compile(r"([A-Z]+)([0-9]+)")
# Errors of zipfile, zlib and expat for bytes that are not an archive or not XML.
_DAMAGED = (zipfile.BadZipFile, zlib.error, expat.ExpatError, EOFError, LookupError, ValueError, RuntimeError, OSError)
Merge = tuple[tuple[int, int], tuple[int, int]]


@dataclass(slots=True)
class Extent:
    """The extent of a sheet's values, and the rows that the file stores; rows and columns from 1."""

    rows: int = 0
    columns: int = 0
    characters: int = 0  # characters of all cells; a shared text counts for each cell, since each gets a copy
    stored: list[int] = field(default_factory=list)  # rows that have cells, with a value or without


@dataclass(slots=True)
class Sheet:
    """One sheet of an open workbook."""

    name: str
    names: list[str]
    _sheet: Any
    _stored: list[int]

    def used(self, header: list[Any]) -> list[Any]:
        """The header without empty cells at its end whose columns are empty throughout."""
        last = max((i for i, cell in enumerate(header) if cell is not None), default=-1)
        width = max((self._last_value(row) for row in self._sheet.iter_rows()), default=-1)
        return header[: max(last, width) + 1]

    @staticmethod
    def _last_value(row: list[Any]) -> int:
        return next((i for i in reversed(range(len(row))) if row[i] != ""), -1)

    def rows(self) -> Iterator[tuple[int, list[Any]]]:
        """(number as the program shows it, cells) of every row that the file stores; an empty cell is None.

        A cell merged over several rows appears in each of them. After the last value only rows that have cells
        count, such as formatted ones; ranges that are only repeated or never used do not.
        """
        left = (self._sheet.start or (0, 0))[1]
        merges = sorted(self._sheet.merged_cell_ranges or [], reverse=True)
        active: list[tuple[Merge, Any]] = []
        line = 0
        for line, cells in enumerate(self._sheet.iter_rows(), start=1):
            row = [_cell(value) for value in cells]
            active = [one for one in active if one[0][1][0] >= line - 1]
            for merge, value in active:
                row[merge[0][1] - left] = value
            while merges and merges[-1][0][0] <= line - 1:
                merge = merges.pop()
                column = merge[0][1] - left
                if merge[1][0] > line - 1 == merge[0][0] and 0 <= column < len(row) and row[column] is not None:
                    active.append((merge, row[column]))
            yield line, row
        for after in self._stored:
            if after > line:
                yield after, [None] * self._sheet.width


def _cell(value: Any) -> Any:
    """A cell's value; spreadsheets have one kind of number, and whole ones become int."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if value != "" else None


@contextmanager
def open_sheet(path: Path, name: str, sheet: str | None) -> Iterator[Sheet]:
    """One sheet: the named one, or the first.

    Raises: UserError if the file is none, is too large or protected, or has no such sheet.
    """
    from python_calamine import CalamineError, CalamineWorkbook, PasswordError

    packed = path.suffix.lower() != ".xls"
    try:
        if packed:
            _check_unpacked_size(path, name)
        if path.suffix.lower() == ".ods":
            _check_cells(_ods_extent(path), name)  # calamine reads every sheet as it opens the file
        elif not packed and path.stat().st_size > MAX_UNPACKED_BYTES:
            raise UserError(f"{name}: above {MAX_UNPACKED_BYTES >> 20} MB: save the sheet as CSV")
        with CalamineWorkbook.from_path(str(path)) as book:
            names = list(book.sheet_names)
            if sheet is not None and sheet not in names:
                raise UserError(f"sheet={sheet}: {name} has no such sheet: it has {', '.join(names)}")
            if not names:
                raise UserError(f"{name}: has no sheet: want one with a header row")
            chosen = sheet if sheet is not None else names[0]
            extent = _xlsx_extent(path, names.index(chosen)) if path.suffix.lower() == ".xlsx" else Extent()
            _check_cells(extent, f'{name}, sheet "{chosen}"')
            yield Sheet(chosen, names, book.get_sheet_by_name(chosen), extent.stored)
    except PasswordError as error:
        raise UserError(f"{name}: protected by a password: save it without one") from error
    except (CalamineError, *_DAMAGED) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{name}: damaged {path.suffix} file ({reason}): save it again or export it as CSV") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by the Rust library when one of its assertions fails
            raise
        raise UserError(f"{name}: damaged {path.suffix} file: save it again or export it as CSV") from error


def _check_unpacked_size(path: Path, name: str) -> None:
    """Unpack every part and count the bytes, since the header's sizes may be false. Raises: UserError."""
    with path.open("rb") as file:
        if file.read(4) == b"\xd0\xcf\x11\xe0":
            raise UserError(f"{name}: protected by a password, or an .xls file by another name: save it again as .xlsx")
    total = 0
    with zipfile.ZipFile(path) as packed:
        for part in packed.infolist():
            if part.flag_bits & 1:
                raise UserError(f"{name}: protected by a password: save it without one")
            with packed.open(part) as file:
                while chunk := file.read(_CHUNK):
                    total += len(chunk)
                    if total > MAX_UNPACKED_BYTES:
                        wanted = f"unpacks to more than {MAX_UNPACKED_BYTES >> 20} MB"
                        raise UserError(f"{name}: {wanted}, too much for a spreadsheet: export the sheet as CSV")


def _check_cells(extent: Extent, name: str) -> None:
    if extent.rows * extent.columns > MAX_CELLS:
        size = f"{extent.rows} rows x {extent.columns} columns"
        raise UserError(
            f"{name}: its values span {size}, above {MAX_CELLS} cells: delete stray cells or export it as CSV"
        )
    if extent.characters > MAX_CHARACTERS:
        raise UserError(
            f"{name}: its cells contain {extent.characters / 1e6:,.0f} million characters, above "
            f"{MAX_CHARACTERS / 1e6:,.0f} million: export it as CSV"
        )


def _events(path: Path, part: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """What one XML part consists of, streamed: (start, name, attributes), (end, name, {}) and (text, characters, {}).

    Names come without their namespace prefix.
    """
    events: list[tuple[str, str, dict[str, str]]] = []
    parser = expat.ParserCreate()
    parser.StartElementHandler = lambda tag, attributes: events.append(("start", tag.rpartition(":")[2], attributes))
    parser.EndElementHandler = lambda tag: events.append(("end", tag.rpartition(":")[2], {}))
    parser.CharacterDataHandler = lambda characters: events.append(("text", characters, {}))
    with zipfile.ZipFile(path) as packed, packed.open(part) as file:
        while chunk := file.read(_CHUNK):
            parser.Parse(chunk, False)
            yield from events
            events.clear()
        parser.Parse(b"", True)
        yield from events


def _xlsx_part(path: Path, index: int) -> str:
    """The path of the index-th sheet of the workbook in the archive."""
    ids: list[str] = []
    targets: dict[str, str] = {}
    for part in ("xl/workbook.xml", "xl/_rels/workbook.xml.rels"):
        for event, tag, attributes in _events(path, part):
            if event == "start" and tag == "sheet":
                ids.append(next((v for k, v in attributes.items() if k == "id" or k.endswith(":id")), ""))
            elif event == "start" and tag == "Relationship":
                targets[attributes.get("Id", "")] = attributes.get("Target", "")
    target = targets[ids[index]]
    return target.lstrip("/") if target.startswith(("/", "xl/")) else f"xl/{target}"


def _column(letters: str) -> int:
    number = 0
    for letter in letters[:8]:
        number = number * 26 + ord(letter) - 64
    return number


def _xlsx_extent(path: Path, index: int) -> Extent:
    """Measure one sheet. A cell without a reference follows the one before it, as in calamine."""
    extent = Extent()
    shared = _shared_lengths(path)
    row = column = 0
    place = ""  # the digits of a cell that names a shared text
    is_shared = in_value = False
    for event, name, attributes in _events(path, _xlsx_part(path, index)):
        if event == "text":
            place += name if in_value else ""
        elif event == "end":
            if in_value and name == "v":
                number = place.strip()
                at = int(number) if number.isdecimal() and len(number) < 10 else len(shared)
                extent.characters += shared[at] if at < len(shared) else 0
                place, in_value = "", False
        elif name == "row":
            given = attributes.get("r", "")
            row, column = int(given) if given.isdecimal() else row + 1, 0
        elif name == "c":
            match = _REFERENCE.fullmatch(attributes.get("r", ""))
            column = _column(match[1]) if match else column + 1
            row = int(match[2]) if match else row
            if not extent.stored or extent.stored[-1] != row:
                extent.stored.append(row)
            is_shared = attributes.get("t") == "s"
        elif name in ("v", "is"):
            extent.rows, extent.columns = max(extent.rows, row), max(extent.columns, column)
            in_value = is_shared
    return extent


def _shared_lengths(path: Path) -> list[int]:
    """The characters of each text that cells share."""
    with zipfile.ZipFile(path) as packed:
        part = next((name for name in packed.namelist() if name.lower() == "xl/sharedstrings.xml"), None)
    lengths: list[int] = []
    for event, name, _ in _events(path, part) if part is not None else ():
        if event == "start" and name == "si":
            lengths.append(0)
        elif event == "text" and lengths:
            lengths[-1] += len(name)
    return lengths


def _repeats(attributes: dict[str, str], name: str) -> int:
    given = attributes.get(name, "1")
    if not given.isdecimal():
        raise ValueError(f"{name} is {given[:20]!r}")
    return int(given[:12])


def _ods_extent(path: Path) -> Extent:
    """Measure all sheets together. Rows and cells that repeat count as often as they say, once they have a value."""
    extent = Extent()
    row = last_row = column = last_column = repeats = 0
    in_cells = in_row = 0  # number of cells with the following text; characters of one row
    for event, name, attributes in _events(path, "content.xml"):
        given = {key.rpartition(":")[2]: value for key, value in attributes.items()}
        is_cell = name in ("table-cell", "covered-table-cell")
        if event == "text":
            in_row += in_cells * len(name)
        elif event == "end":
            if is_cell:
                in_cells = 0
            elif name == "table-row":
                row += repeats
                extent.characters += repeats * in_row
                if last_column:
                    last_row = row
                    extent.columns = max(extent.columns, last_column)
            elif name == "table":
                extent.rows += last_row
                last_row = 0
        elif name == "table":
            row = column = last_column = 0
        elif name == "table-row":
            repeats, column, last_column, in_row = _repeats(given, "number-rows-repeated"), 0, 0, 0
        elif is_cell:
            in_cells = _repeats(given, "number-columns-repeated")
            column += in_cells
            if "value-type" in given:
                last_column = column
    return extent

"""Tables as rows: CSV and TSV (plain, .gz, .zst), spreadsheets, Parquet and Arrow, each row under its header's names.

Cells become strings, numbers, true and false, lists and objects; an empty one is None; dates become ISO text. `importers/table.py`
interprets the columns; JSON is read in `json_rows.py`, spreadsheets in `spreadsheets.py`.
"""

import codecs
import csv
import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rlhf.data.reading.arrow_rows import read_arrow_rows
from rlhf.data.reading.cells import check_header, plain
from rlhf.data.reading.readers import MAX_RECORD_BYTES, Reject, Row, open_bytes
from rlhf.data.reading.spreadsheets import SPREADSHEET_SUFFIXES, open_sheet
from rlhf.errors import UserError

_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
_HEAD = 1 << 20  # characters of a CSV file within which the header must end
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # Python's replacement for a byte that it cannot decode
_RESTARTS = 100  # how often per file reading restarts after a quote that never closes


def read_table(path: Path, name: str, *, encoding: str = "utf-8", sheet: str | None = None) -> Iterator[Row | Reject]:
    """The rows of a table; a row that cannot be read is a Reject. `line` is the number that the table's program shows.

    Raises: UserError if the file as a whole cannot be read, or its header is not valid.
    """
    suffix = _suffix(path)
    if suffix in (".csv", ".tsv"):
        yield from _read_delimited(path, name, encoding, _delimiter(path, name, encoding))
    elif suffix in SPREADSHEET_SUFFIXES:
        yield from _read_spreadsheet(path, name, sheet)
    else:
        yield from read_arrow_rows(path, name, suffix)


def describe_table(path: Path, name: str, *, encoding: str = "utf-8", sheet: str | None = None) -> str:
    """How a table is read, as a short text for the report: its delimiter, or which of its sheets.

    Raises: UserError as `read_table`.
    """
    suffix = _suffix(path)
    if suffix in (".csv", ".tsv"):
        return f"columns divided by {_DELIMITERS[_delimiter(path, name, encoding)]}"
    if suffix in SPREADSHEET_SUFFIXES:
        with open_sheet(path, name, sheet) as opened:
            return f'sheet "{opened.name}" of {len(opened.names)}'
    return suffix[1:].capitalize()


def _suffix(path: Path) -> str:
    """The suffix of the table's kind, without that of the compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] in (".gz", ".zst") else suffixes[-1]


# --- CSV and TSV -----------------------------------------------------------------------------------------------------


class _TooLong(Exception):
    """A record that does not end within the allowed length."""


class _Lines:
    """The physical lines of a text, with those of the current record. Undecodable bytes are lone surrogates."""

    def __init__(self, file: IO[bytes], encoding: str):
        self._text = _decoded(file, encoding)
        self._pushed: list[str] = []
        # encodings with one-byte line feeds and no byte order mark
        self._encoding = encoding if "\n".encode(encoding) == b"\n" else None
        self.number = 0  # of the last line read
        self._offset = 0  # bytes before the record
        self.record: list[str] = []  # the record's lines so far
        self._size = 0
        self._skipped = 0  # bytes of the record that are not in `record`

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._pushed.pop() if self._pushed else self._text.readline(MAX_RECORD_BYTES)
        if not line:
            raise StopIteration
        self.number += 1
        self.record.append(line)
        self._size += len(line)
        if self._size >= MAX_RECORD_BYTES:
            raise _TooLong
        return line.removeprefix("\ufeff") if self.number == 1 else line

    def end_record(self) -> tuple[str, bytes, int | None]:
        """The record as it is in the file, and the byte at which it begins; the next line begins another.

        If the file is in UTF-16 or the like, the bytes are UTF-8 and the place is unknown.
        """
        text, begin = "".join(self.record), self._offset
        raw = self._encode(text)
        self._offset += len(raw) + self._skipped
        self.record, self._size, self._skipped = [], 0, 0
        return text, raw, begin if self._encoding else None

    def _encode(self, text: str) -> bytes:
        return text.encode(self._encoding or "utf-8", "surrogateescape")

    def keep_first_line(self) -> None:
        """Give back all lines of the record but its first."""
        first, *rest = self.record
        self._pushed += reversed(rest)
        self.number -= len(rest)
        self.record, self._size = [first], len(first)

    def skip_line(self) -> tuple[str, int]:
        """Read on to the end of a line that is too long; returns the record's sha256 and length."""
        line = self.record[-1]
        digest = hashlib.sha256(begin := self._encode("".join(self.record)))
        while line and not line.endswith(("\n", "\r")):
            line = self._text.readline(MAX_RECORD_BYTES)
            digest.update(raw := self._encode(line))
            self._skipped += len(raw)
        return digest.hexdigest(), len(begin) + self._skipped


def _decoded(file: IO[bytes], encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="")  # type: ignore[arg-type]


def _check_encoding(encoding: str) -> str:
    """The encoding, with UTF-8's byte order mark left to `_Lines`."""
    try:
        codec = codecs.lookup(encoding)
        "\n".encode(encoding)  # refuses codecs that are not text encodings, such as base64
    except (LookupError, UnicodeError) as error:
        raise UserError(
            f"encoding={encoding}: no such text encoding: want utf-8, cp1252, latin-1, utf-16, …"
        ) from error
    return "utf-8" if codec.name == "utf-8-sig" else encoding


def _delimiter(path: Path, name: str, encoding: str) -> str:
    """The delimiter: a tab for .tsv; else a comma, semicolon or tab, whichever gives the header most columns.

    Raises: UserError if there is no header.
    """
    with open_bytes(path) as file:
        try:
            head = _decoded(file, _check_encoding(encoding)).read(_HEAD).lstrip("\ufeff\r\n")
        except UnicodeError as error:
            raise _not_encoded(name, encoding, error) from error
    if _suffix(path) == ".tsv":
        return "\t"
    if (asked := _excel_hint(head)) is not None:
        return asked

    def columns(delimiter: str) -> int:
        try:
            return len(next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter), []))
        except csv.Error:
            return 0

    return max(_DELIMITERS, key=columns)  # of equals the first, the comma


def _excel_hint(line: str) -> str | None:
    """Excel's first line that says the delimiter, as "sep=;"."""
    return line[4] if line[:4].lower() == "sep=" and line[5:6] in ("\r", "\n") and line[4] in _DELIMITERS else None


def _not_encoded(name: str, encoding: str, error: UnicodeError) -> UserError:
    return UserError(
        f"{name}: not {encoding} text ({error}): set encoding=utf-8, utf-16, cp1252, … or convert the file"
    )


def _read_delimited(path: Path, name: str, encoding: str, delimiter: str) -> Iterator[Row | Reject]:
    csv.field_size_limit(MAX_RECORD_BYTES)
    with open_bytes(path) as file:
        lines = _Lines(file, _check_encoding(encoding))
        try:
            yield from _records(lines, name, encoding, delimiter)
        except UnicodeError as error:
            raise _not_encoded(name, encoding, error) from error


def _records(lines: _Lines, name: str, encoding: str, delimiter: str) -> Iterator[Row | Reject]:
    """The rows after the header. Each record is read separately, so that a bad one does not affect the next."""
    header: list[str] | None = None
    number = restarts = 0
    while True:
        line = lines.number + 1
        digest = None
        try:
            cells = next(csv.reader(lines, delimiter=delimiter, strict=True), None)
            problem = None
        except _TooLong:
            cells = []
            problem = f"got a record above {MAX_RECORD_BYTES >> 20} MB, want a shorter one: is a quote never closed?"
            digest = lines.skip_line()
        except csv.Error as error:
            cells, problem = [], f"not CSV ({error}): want quotes around the whole cell, and doubled inside of it"
            if "unexpected end" in str(error):
                problem = "a quote opens a cell and never closes: close it, or double it where it belongs to the text"
                if restarts < _RESTARTS:
                    lines.keep_first_line()
                    restarts += 1
        if cells is None:
            return
        text, raw, offset = lines.end_record()
        if not cells and problem is None:
            continue  # an empty line is no row
        if header is None:
            if problem is not None:
                raise UserError(f"{name}:{line}: header: {problem}")
            if wrong := _wrong_byte(text, encoding):
                raise UserError(f"{name}:{line}: {wrong}")
            if _excel_hint(text.lstrip("\ufeff")) is None:
                header = check_header(cells, name, line)
            continue
        number += 1
        problem = problem or _problem(cells, text, header, encoding)
        if problem:
            yield Reject(name, line, "", problem, number, offset, None if digest else raw, digest)
        else:
            values = {key: cell if cell != "" else None for key, cell in zip(header, cells, strict=True)}
            yield Row(line, values, number, offset, raw)


def _wrong_byte(text: str, encoding: str) -> str | None:
    """What to do about the first byte that is not in the encoding."""
    match = None if text.isascii() else _ESCAPED_BYTE.search(text)
    if match is None:
        return None
    byte = ord(match[0]) - 0xDC00
    of_utf16 = byte in (0xFE, 0xFF)  # its byte order mark, which cannot occur in UTF-8
    others = "utf-16, cp1252" if of_utf16 else "cp1252, latin-1"
    return f"byte 0x{byte:02x} is not {encoding} text: set encoding={others}, … or mend the file"


def _problem(cells: list[str], text: str, header: list[str], encoding: str) -> str | None:
    if wrong := _wrong_byte(text, encoding):
        return wrong
    if any("\0" in cell for cell in cells):
        return "got a NUL byte, want text: remove it"
    if len(cells) != len(header):
        return f"got {len(cells)} cells, want {len(header)} as in the header: quote cells that contain the delimiter"
    return None


# --- spreadsheets ----------------------------------------------------------------------------------------------------


def _read_spreadsheet(path: Path, name: str, sheet: str | None) -> Iterator[Row | Reject]:
    """Rows under the first row that is not empty; later empty rows are rows, with None in every cell."""
    header: list[str] | None = None
    first_row = 0
    with open_sheet(path, name, sheet) as opened:
        for line, cells in opened.rows():
            if header is None:
                if any(cell is not None for cell in cells):
                    header, first_row = check_header(opened.used(cells), f'{name}, sheet "{opened.name}"', line), line
                continue
            values = {key: plain(cell) for key, cell in zip(header, cells, strict=False)}
            yield Row(line, values, line - first_row)

"""Files as rows: JSON Lines, JSON arrays, CSV, and data sets of the hub; Parquet, Arrow and spreadsheets are in `cells.py`.

A row is an object under its keys or its header's names. A bad line of a line-based file is a Reject, and reading goes on;
a damaged array, workbook or Parquet file ends with a UserError that names the place.
"""

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rlhf.data.cells import check_header, read_arrow_file, read_sheet
from rlhf.data.inputs import MAX_RECORD_BYTES, ROW_SUFFIXES, Reading, Reject, Row, Source, has_suffix, open_bytes
from rlhf.data.records import first_repeat, shown
from rlhf.errors import UserError
from rlhf.system.terminal import one_line, say

MAX_DEPTH = 400  # levels of lists and objects: few enough that no code that handles a row runs out of stack
HUB_SECONDS = 5  # seconds to wait for the hub's first answer
_RESTARTS = 100  # how often per CSV file reading restarts after a quote that never closes
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
_TOO_DEEP = f"nested too deeply, more than {MAX_DEPTH} levels"


def read_rows(source: Source, reading: Reading | None = None) -> Iterator[Row | Reject]:
    """The rows of a file or a hub data set. Raises: UserError if the source as a whole cannot be read."""
    reading = reading or Reading()
    path, name = source.path, source.name
    if path is None:
        yield from _read_hub(name)
        return
    suffix = [s.lower() for s in path.suffixes if s.lower() not in (".gz", ".zst")][-1]
    if has_suffix(path, ROW_SUFFIXES):
        with open_bytes(path, reading) as file:
            if file.peek(3)[:3] == codecs.BOM_UTF8:  # type: ignore[attr-defined]
                file.read(3)
            as_lines = suffix == ".jsonl" or _holds_lines(file.peek(1 << 16))  # type: ignore[attr-defined]
            yield from _read_lines(file, name) if as_lines else _read_values(file, name)
    elif suffix in (".csv", ".tsv"):
        yield from _read_delimited(path, name, suffix, reading)
    elif suffix in (".parquet", ".arrow"):
        yield from read_arrow_file(path, name, suffix)
    else:
        yield from read_sheet(path, name, reading)


# --- JSON ----------------------------------------------------------------------------------------------------------


def is_deep(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether lists and objects nest more than `most` levels."""
    level = [value]
    for _ in range(most + 1):
        inside = [one for one in level if isinstance(one, dict | list)]
        if not inside:
            return False
        level = [one for outer in inside for one in (outer.values() if isinstance(outer, dict) else outer)]
    return True


def _holds_lines(head: bytes) -> bool:
    """Whether a .json file has an object on its first line, so that it is read as JSON Lines."""
    line, _, rest = head.lstrip().partition(b"\n")
    try:
        return bool(rest.strip()) and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"key {shown(first_repeat(key for key, _ in pairs))} appears twice in one object: keep one")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"got {name}, which JSON has not: want a number or null")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _parse_line(line: bytes) -> dict[str, Any]:
    """The object of a line, stricter than the json module. Raises: ValueError with what is wrong."""
    try:
        text = line.decode("utf-8").strip(" \t\r\n")
        value = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte 0x{line[error.start]:02x} is not UTF-8: save the file as UTF-8") from error
    except UnicodeEncodeError:
        raise ValueError("got a lone surrogate (half of a character), want text that UTF-8 can hold") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}): want one object per line") from error
    if not isinstance(value, dict):
        raise ValueError(f"got {shown(value)}, want an object {{…}}")
    if text.count("[") + text.count("{") > MAX_DEPTH and is_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def _read_lines(file: IO[bytes], name: str) -> Iterator[Row | Reject]:
    """The objects of a file with one per line; blank lines are none. Of a line that is too long only the beginning is kept."""
    number = 0
    while line := file.readline(MAX_RECORD_BYTES):
        number += 1
        if len(line) == MAX_RECORD_BYTES and not line.endswith(b"\n"):
            size = len(line)
            while not line.endswith(b"\n") and (rest := file.readline(1 << 20)):
                size += len(rest)
                line = line[: 1 << 20] + rest[-1:] if rest.endswith(b"\n") else line[: 1 << 20]
            problem = f"got a line of {size:,} bytes, want one of at most {MAX_RECORD_BYTES >> 20} MB"
            yield Reject(name, number, "", problem, number, line[: 1 << 20])
        elif line.strip(b" \t\r\n"):
            try:
                yield Row(number, _parse_line(line), number, line.rstrip(b"\r\n"))
            except ValueError as error:
                yield Reject(name, number, "", one_line(error), number, line.rstrip(b"\r\n"))


class _Counted:
    """A file that refuses to be read further than a record may be long."""

    def __init__(self, file: IO[bytes], name: str):
        self.file, self.name, self.number, self.since = file, name, 0, 0

    def read(self, size: int = -1) -> bytes:
        chunk = self.file.read(size)
        self.since += len(chunk)
        if self.since > MAX_RECORD_BYTES + (1 << 20):
            raise UserError(f"{self.name}: row {self.number + 1} is above {MAX_RECORD_BYTES >> 20} MB: make it shorter")
        return chunk


def _read_values(file: IO[bytes], name: str) -> Iterator[Row | Reject]:
    """The items of a JSON array, or objects one after another, as the file streams by.

    Built from events, since `ijson.items` needs memory that grows with the square of the depth. Raises: UserError where the
    file is damaged.
    """
    import ijson

    counted = _Counted(file, name)
    builder: Any = None
    in_list = False
    depth = deepest = 0
    try:
        for event, value in ijson.basic_parse(counted, use_float=True, multiple_values=True):
            if builder is None:
                if event in ("start_array", "end_array") and in_list == (event == "end_array"):
                    in_list = event == "start_array"  # the list that holds the rows
                    continue
                builder, deepest = ijson.ObjectBuilder(), 0
            depth += {"start_map": 1, "start_array": 1, "end_map": -1, "end_array": -1}.get(event, 0)
            deepest = max(deepest, depth)
            if deepest <= MAX_DEPTH:
                builder.event(event, value)
            if depth:
                continue
            made, builder = builder.value if deepest <= MAX_DEPTH else None, None
            counted.number, counted.since = counted.number + 1, 0
            if isinstance(made, dict):
                yield Row(counted.number, made, counted.number)
            else:
                problem = _TOO_DEEP if deepest > MAX_DEPTH else f"got {shown(made)}, want an object {{…}}"
                yield Reject(name, counted.number, "", problem, counted.number, json.dumps(made).encode())
    except (ijson.JSONError, UnicodeDecodeError) as error:
        if counted.number or counted.since or builder is not None:  # else the file is empty
            place = f"row {counted.number + 1} ({one_line(str(error), 200)})"
            raise UserError(f"{name}: damaged JSON in {place}: correct it or download it again") from error


# --- tables --------------------------------------------------------------------------------------------------------


class _Lines:
    """The lines of a text with those of the current record, which can be given back."""

    def __init__(self, text: io.TextIOWrapper):
        self._text = text
        self._pushed: list[str] = []
        self.number = 0
        self.record: list[str] = []
        self._size = 0

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
            raise csv.Error("unexpected end: the record is too long")
        return line.removeprefix("\ufeff") if self.number == 1 else line

    def take(self) -> str:
        """The record's text; the next line begins another."""
        text = "".join(self.record)
        self.record, self._size = [], 0
        return text

    def keep_first(self) -> None:
        """Give back all lines of the record but its first, which is read to its end."""
        first, *rest = self.record
        self._pushed += reversed(rest)
        self.number -= len(rest)
        self.record, self._size = [first[: 1 << 20]], 0
        while not self._pushed and first and not first.endswith(("\n", "\r")):
            first = self._text.readline(1 << 20)


def _delimiter(head: str, suffix: str) -> str:
    """A tab for .tsv; else what Excel's first line says ("sep=;"), or whichever gives the header most columns."""
    if suffix == ".tsv":
        return "\t"
    if re.match(r"sep=[,;\t][\r\n]", head, re.IGNORECASE):
        return head[4]

    def columns(delimiter: str) -> int:
        try:
            return len(next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter), []))
        except csv.Error:
            return 0

    return max(_DELIMITERS, key=columns)  # of equals the first, the comma


def _read_delimited(path: Path, name: str, suffix: str, reading: Reading) -> Iterator[Row | Reject]:
    csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        encoding = reading.encoding if codecs.lookup(reading.encoding).name != "utf-8-sig" else "utf-8"
        "\n".encode(encoding)  # refuses codecs that are not text encodings, such as base64
    except (LookupError, UnicodeError) as error:
        raise UserError(f"encoding={reading.encoding}: no such text encoding: want utf-8, cp1252, …") from error
    try:
        with open_bytes(path) as file:
            text = io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="")  # type: ignore[arg-type]
            delimiter = _delimiter(text.read(1 << 20).lstrip("\ufeff\r\n"), suffix)
        reading.note = f"columns divided by {_DELIMITERS[delimiter]}"
        with open_bytes(path, reading) as file:
            text = io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="")  # type: ignore[arg-type]
            yield from _records(_Lines(text), name, encoding, delimiter)
    except UnicodeError as error:
        raise UserError(f"{name}: not {encoding} text ({error}): set encoding=utf-8, utf-16, cp1252, …") from error


def _records(lines: _Lines, name: str, encoding: str, delimiter: str) -> Iterator[Row | Reject]:
    """The rows after the header. Each record is read separately, so that a bad one does not affect the next."""
    header: list[str] | None = None
    number = restarts = 0
    while True:
        line, problem = lines.number + 1, ""
        try:
            cells = next(csv.reader(lines, delimiter=delimiter, strict=True), None)
            if cells is None:
                return
        except csv.Error as error:
            cells, problem = [], f"not CSV ({error}): want quotes around the whole cell, and doubled inside of it"
            if "unexpected end" in str(error):
                problem = "a quote opens a cell and never closes: close it, or double it where it belongs to the text"
                restarts += 1
                if restarts <= _RESTARTS:
                    lines.keep_first()
        text = lines.take()
        if not cells and not problem:
            continue  # an empty line is no row
        if not text.isascii() and (wrong := re.search("[\udc80-\udcff]", text)):
            problem = f"byte 0x{ord(wrong[0]) - 0xDC00:02x} is not {encoding} text: set encoding=cp1252, utf-16, …"
        if header is None:
            if problem:
                raise UserError(f"{name}:{line}: header: {problem}")
            if not re.match(r"\ufeff?sep=.[\r\n]", text, re.IGNORECASE):
                header = check_header(cells, f"{name}:{line}")
            continue
        number += 1
        if not problem and len(cells) != len(header):
            problem = f"got {len(cells)} cells, want {len(header)} as in the header: quote cells with the delimiter"
        raw = text.encode("utf-8", "surrogateescape")
        if problem:
            yield Reject(name, line, "", problem, number, raw)
        else:
            yield Row(line, {key: cell or None for key, cell in zip(header, cells, strict=True)}, number, raw)


# --- the hub -------------------------------------------------------------------------------------------------------


def _read_hub(name: str) -> Iterator[Row]:
    """The rows of a data set of the hub, of its train split if it has one; without a network from the cache.

    The hub is asked with a time limit, since the library would retry for 25 s. Raises: UserError if there is none.
    """
    say(f"rlhf: {name}: no such file or folder: taken for a hub id (owner/name)", sys.stderr)
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    offline = datasets.config.HF_HUB_OFFLINE
    try:
        with suppress(HfHubHTTPError):  # the hub answered: loading reports the problem
            HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except Exception:  # no answer; the kind of error depends on the client's library
        datasets.config.HF_HUB_OFFLINE = True  # read at each call
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # no network, no such name, gated, scripts
        reason = one_line(str(error) or type(error).__name__, 200)
        raise UserError(
            f"{name}: no such file or folder; taken for a hub id, but the hub gave no data set of that name ({reason}): "
            "check the path or the name and the network, or download it and give the file"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    for number, row in enumerate(splits["train"] if "train" in splits else next(iter(splits.values())), start=1):
        yield Row(number, dict(row), number)

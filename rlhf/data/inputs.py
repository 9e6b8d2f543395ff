"""Sources of rows: resolves a setting such as `path` or `data.comparisons` to files, finished imports and data sets of the
hub; opens files; reads JSON and CSV. `tables.py` reads what libraries read, `reading.py` makes records from rows.
"""

import codecs
import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from rlhf.config.setting import listed
from rlhf.data.records import first_repeat
from rlhf.data.storage import is_import
from rlhf.errors import UserError
from rlhf.system.files import check_regular
from rlhf.system.schemas import shown
from rlhf.system.terminal import one_line

TEXT_SUFFIXES = (".txt",)
ROW_SUFFIXES = (".jsonl", ".json")
RECORD_SUFFIXES = (*ROW_SUFFIXES, ".csv", ".tsv", ".xlsx", ".parquet")  # of files whose rows can be records
MAX_RECORD_BYTES = 64 << 20  # of one row: this bounds the memory
MAX_ARRAY_BYTES = 1 << 30  # of a JSON file that is no JSON Lines, which is held in memory
MAX_DEPTH = 200  # levels of lists and objects; pydantic writes no record that nests more than 255
_TOO_DEEP = f"nested too deeply, more than {MAX_DEPTH} levels"
_ENCODING = "cp1252, … (of rlhf import; of classify data.encoding)"  # the remedy
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_EXTENSION = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,7}")


def printable_path(path: Path | str) -> str:
    """A path as text; bytes that are not UTF-8 are shown as \\xe9."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(slots=True)
class Source:
    """A file, the folder of a finished import, or a data set of the hub if `path` is None: how it is read, and what it holds."""

    name: str
    path: Path | None
    imported: bool = False
    encoding: str = "utf-8"  # of CSV and TSV
    sheet: str | None = None  # of a spreadsheet; none: the first one
    note: str = ""  # the delimiter, or which of the sheets
    format: str | None = None
    joins: bool = False  # as of the format
    why: str = ""  # how the format was recognised; "asked for" if the user named it
    rows: int = 0
    records: Counter[str] = field(default_factory=Counter)  # by kind
    file: IO[bytes] | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Bytes on disk; 0 for a data set of the hub, and for a file that was removed meanwhile."""
        return self.path.stat().st_size if self.path and self.path.exists() else 0

    def position(self) -> int:
        """Bytes of the file on disk that were read; 0 for formats that are read as a whole."""
        return 0 if self.file is None or self.file.closed else self.file.tell()

    def __str__(self) -> str:
        made = ", ".join(f"{count} {kind} records" for kind, count in sorted(self.records.items())) or "no record"
        return f"{self.name}: {self.format} ({self.why}), {self.rows} rows: {made}"


def is_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether lists and objects nest more than so many levels."""
    inside = list(value.values()) if isinstance(value, dict) else value
    return isinstance(inside, list) and (not levels or any(is_deep(one, levels - 1) for one in inside))


def has_suffix(path: Path, suffixes: Iterable[str]) -> bool:
    """Whether a file has one of these suffixes, packed or not."""
    return path.name.lower().endswith(tuple(s + packed for s in suffixes for packed in ("", *_CODECS)))


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


@contextmanager
def open_bytes(path: Path, source: Source | None = None) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, unpacked. Raises: UserError if it cannot be opened or, while it is read, is damaged."""
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as file:
            if source is not None:
                source.file = file
            if suffix in _CODECS:
                import pyarrow

                packed = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), _CODECS[suffix])
                yield io.BufferedReader(packed)
            else:
                yield file
    except OSError as error:
        if error.errno is not None:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        raise UserError(f"{path}: damaged {suffix} file ({error}): copy or download it again") from error


def resolve_sources(
    sources: Any, suffixes: tuple[str, ...], imports: bool = False, setting: str = "data"
) -> list[Source]:
    """A path, a hub id or a list of these as the files to read; a folder: all its files with these suffixes. With
    `imports`, folders that `rlhf import` wrote are sources too. `setting` is for messages. Raises: UserError if
    something is missing, has another suffix, or if a folder has no such file.
    """
    if sources is None:
        raise UserError(f"{setting}: no data given: want a file, a folder or a hub id (owner/name)")
    try:
        return [source for name in listed(sources) for source in _resolve(str(name), suffixes, imports)]
    except OSError as error:  # no permission, or a name that is too long
        path = printable_path(error.filename or "")[:200]
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _resolve(name: str, suffixes: tuple[str, ...], imports: bool) -> list[Source]:
    path = Path(name)
    wanted = ", ".join(suffixes) + " (plain, .gz or .zst)"
    if not path.exists():
        if _HUB_ID.fullmatch(name) and not _EXTENSION.fullmatch(path.suffix):  # else a mistyped path
            return [Source(name, None)]
        raise UserError(f"{name}: no such file or folder: want {wanted}, a folder of these, or a hub id (owner/name)")
    if not path.is_dir():
        if not has_suffix(path, suffixes):
            raise UserError(f"{name}: got a file of another kind, want {wanted}: convert or rename it")
        check_regular(path)
        return [Source(printable_path(path), path)]
    if is_import(path) and not imports:
        raise UserError(f"{name}: is an import already: want the files that it was made of")
    inside = list(_files_below(path, suffixes, imports, path.resolve()))
    if not inside:
        raise UserError(f"{name}: the folder has no file to read: want {wanted}")
    return inside


def _files_below(folder: Path, suffixes: tuple[str, ...], imports: bool, root: Path) -> Iterator[Source]:
    """The files with these suffixes, and the imports, of a folder and the folders in it; hidden ones are left out.
    Raises: UserError for a link that leads out of `root` or nowhere, and for pipes, sockets and devices.
    """
    if is_import(folder):
        if imports:
            yield Source(printable_path(folder), folder, imported=True)
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not (has_suffix(path, suffixes) or path.is_dir()):
            continue
        target = path.resolve()
        if path.is_symlink() and not (path.exists() and target.is_relative_to(root)):
            came = f"{printable_path(path)}: is a link out of the folder or to nothing"
            raise UserError(f"{came}: give {printable_path(target)} itself, or remove the link")
        if not path.is_dir():
            check_regular(path)
            yield Source(printable_path(path), path)
        elif not path.is_symlink():  # a folder that a link leads to is read where it is
            yield from _files_below(path, suffixes, imports, root)


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


def _constant(name: str) -> float:
    raise ValueError(f"got {name}, which JSON has not: want a number or null")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _problem_of(value: Any, text: str) -> str:
    """What is wrong with the value of a row with this text; empty if nothing is."""
    if not isinstance(value, dict):
        return f"got {shown(value)}, want an object {{…}}"
    if text.count("[") + text.count("{") > MAX_DEPTH and is_deep(value):
        return _TOO_DEEP
    plain = text.isascii() and "\\u" not in text
    wrong = None if plain else re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False))
    if wrong is None:
        return ""
    if "\udc80" <= wrong[0] <= "\udcff":
        return f"byte 0x{ord(wrong[0]) - 0xDC00:02x} is not UTF-8: save the file as UTF-8"
    return "got a lone surrogate (half of a character), want text that UTF-8 can hold"


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
        text = raw.decode("utf-8", "surrogateescape").strip(" \t")
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
    text = content.decode("utf-8", "surrogateescape")
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
        raise UserError(
            f"{place}: column {names.index('') + 1} without a name in the header: want a name for each column"
        )
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
        whole = "".join(record)
        if not whole:
            return
        if not whole.strip("\r\n"):
            continue  # an empty line is no row
        if not whole.isascii() and (wrong := re.search("[\udc80-\udcff]", whole)):
            byte = ord(wrong[0]) - 0xDC00
            problem = f"byte 0x{byte:02x} is not {source.encoding} text: set encoding={_ENCODING}"
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

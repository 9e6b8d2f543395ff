"""Files as rows or as text, streamed: plain, .gz or .zst; and what a source (file, folder, import, hub id) is.

This file knows nothing of formats or records: it yields objects with their line numbers, and says plainly where a
file cannot be read. JSON is parsed in `json_rows.py`, tables in `tables.py`; a finished import is read by `storage.py`.
"""

import codecs
import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlhf.errors import UserError

TEXT_SUFFIXES = (".txt",)
ROW_SUFFIXES = (".jsonl", ".json")
_PACKED = ("", ".gz", ".zst")
MAX_RECORD_BYTES = 64 * 2**20  # of one JSON record: what memory is bounded by
KEPT_BYTES = 1 << 20  # of a reject; of a longer one its sha256 and length are kept
MANIFEST = "dataset.json"  # what makes a folder an import, see storage.py
_CHUNK = 1 << 16
_PACKED_CHUNK = 1 << 9  # of a .zst file: may unpack to 30,000 times as much at once
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def printable_path(path: Path | str) -> str:
    """A path as text, whatever bytes its names are: those that are no UTF-8 as \\xe9."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, the folder of a finished import, or a data set of the hub where `path` is None."""

    name: str
    path: Path | None
    imported: bool = False

    @property
    def is_text(self) -> bool:
        return self.path is not None and has_suffix(self.path, TEXT_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object: the line where it begins (for tables and hub data sets: its row), and where that lies."""

    line: int
    value: dict[str, Any]
    number: int = 0  # ordinal in the file, from 1
    offset: int | None = None  # bytes from the beginning of the unpacked file
    raw: bytes | None = None  # as it stands there; none: `value` as JSON is all there is


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that is no record: where it stands, which field is wrong, what came and what was wanted."""

    file: str
    line: int
    field: str
    message: str
    number: int = 0
    offset: int | None = None
    raw: bytes | None = None  # as it stands there, where it is kept
    digest: tuple[str, int] | None = None  # sha256 and bytes of what is too long to keep

    def __str__(self) -> str:
        # More rows than lines so far: an array on one line, where the line alone says nothing.
        row = f" (row {self.number:,})" if self.number > self.line else ""
        return f"{self.file}:{self.line}{row}: {self.message}"


def has_suffix(path: Path, suffixes: Iterable[str]) -> bool:
    """Whether a file has one of these suffixes, packed or not."""
    return path.name.lower().endswith(tuple(s + packed for s in suffixes for packed in _PACKED))


def is_import(folder: Path) -> bool:
    """Whether a folder says that it is an import; whether it is whole is told by `storage.read_manifest`."""
    try:
        with (folder / MANIFEST).open("rb") as file:
            return b'"rlhf_import"' in file.read(200)
    except OSError:
        return False


def _files_below(
    folder: Path, suffixes: tuple[str, ...], imports: bool, above: tuple[Path, ...] = ()
) -> Iterator[Source]:
    """The files with these suffixes, and the imports, of a folder and the folders in it; hidden ones are left out.

    A link to a folder `above` is not followed: it would give every file dozens of times.
    """
    if is_import(folder):
        if imports:
            yield Source(printable_path(folder), folder, imported=True)
        return
    real = folder.resolve()
    if real in above:
        return
    if imports and any(folder.glob("*/train.arrow")):
        raise UserError(f"{folder}: an import that was never finished, or lost its {MANIFEST}: run `rlhf import` again")
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files_below(path, suffixes, imports, (*above, real))
        elif path.is_file() and has_suffix(path, suffixes):
            yield Source(printable_path(path), path)


def size_of(source: Source) -> int:
    """Bytes on disk; 0 for a data set of the hub, and for a file that went away."""
    try:
        return source.path.stat().st_size if source.path else 0
    except OSError:
        return 0


def resolve_sources(sources: Any, suffixes: tuple[str, ...], imports: bool = False) -> list[Source]:
    """A path, a hub id or a list of these as the files to read; a folder: all its files with these suffixes.

    With `imports`, folders that `rlhf import` wrote are sources too.

    Raises: UserError where something is missing, has another suffix, or where a folder has no such file.
    """
    if sources is None:
        raise UserError("no data given: want a file, a folder or a hub id (owner/name)")
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    wanted = ", ".join(suffixes) + " (plain, .gz or .zst)"
    found = []
    for one in given:
        path = Path(one)
        if path.is_dir():
            if is_import(path) and not imports:
                raise UserError(f"{path}: is an import already: want the files that it was made of")
            inside = list(_files_below(path, suffixes, imports))
            if not inside:
                raise UserError(f"{path}: the folder has no file to read: want {wanted}")
            found += inside
        elif path.exists():
            if not has_suffix(path, suffixes):
                raise UserError(f"{path}: got a file of another kind, want {wanted}: convert or rename it")
            if not path.is_file():
                raise UserError(f"{path}: is no regular file (a pipe or device): write what it gives into a file")
            found.append(Source(printable_path(path), path))
        elif _HUB_ID.fullmatch(str(one)) and not has_suffix(path, TEXT_SUFFIXES + ROW_SUFFIXES):
            found.append(Source(str(one), None))
        else:
            raise UserError(f"{one}: no such file or folder: want {wanted}, a folder of these, or a hub id")
    if not found:
        raise UserError("the list of data sources is empty: want a file, a folder or a hub id (owner/name)")
    return found


class _ZstdReader(io.RawIOBase):
    """Decompresses .zst frame by frame and, unlike the library's reader, notices a file that was cut off."""

    def __init__(self, file: IO[bytes]):
        import zstandard

        self._file = file
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._packed = b""
        self._plain = memoryview(b"")  # of which slices are no copies

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            self._packed = self._packed or self._file.read(_PACKED_CHUNK)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the last frame is cut off")
                return 0
            self._frame = self._frame or self._new()
            self._plain = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        n = min(len(buffer), len(self._plain))
        buffer[:n], self._plain = self._plain[:n], self._plain[n:]
        return n


class Meter:
    """How far into a file reading is, for a progress bar; readers that do not move it count at their end."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def watch(self, file: IO[bytes]) -> None:
        self._file = file

    def position(self) -> int:
        """Bytes of the file as it lies on disk."""
        return 0 if self._file is None or self._file.closed else self._file.tell()


@contextmanager
def open_bytes(path: Path, meter: Meter | None = None) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, unpacked.

    Raises: UserError where it cannot be opened, or is damaged (also while it is being read).
    """
    errors: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    suffix = path.suffix.lower()
    if suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{path}: reading .zst needs a library: pip install zstandard") from error
        errors = (*errors, zstandard.ZstdError)
    try:
        with path.open("rb") as file:
            if meter is not None:
                meter.watch(file)
            if suffix == ".gz":
                with gzip.open(file) as unpacked:
                    yield unpacked  # type: ignore[misc]
            elif suffix == ".zst":
                yield io.BufferedReader(_ZstdReader(file), _CHUNK)  # type: ignore[type-var]
            else:
                yield file
    except errors as error:
        raise UserError(f"{path}: damaged {suffix} file ({error}): copy or download it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file as it lies on disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, encoding: str = "utf-8", remedy: str | None = None) -> Iterator[str]:
    """Decode a file chunk by chunk; a BOM is dropped and line ends become a single newline.

    Raises: UserError where the encoding is unknown or the bytes are not in it, naming the byte's offset.
    """
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError as error:
        raise UserError(f"data.encoding={encoding}: no such encoding: want utf-8, latin-1, cp1252, …") from error
    newlines = io.IncrementalNewlineDecoder(decoder, translate=True)
    utf8 = codecs.lookup(encoding).name == "utf-8"
    with open_bytes(path) as file:
        offset = 0  # of the chunk in the file, bytes
        ended = False
        while not ended:
            chunk = file.read(_CHUNK)
            ended = not chunk
            if utf8 and offset == 0 and chunk.startswith(codecs.BOM_UTF8):
                chunk, offset = chunk[3:], 3
            try:
                text = newlines.decode(chunk, final=ended)
            except UnicodeDecodeError as error:
                # The decoder's object is what it held back from the last chunk, then this chunk.
                at = offset - (len(error.object) - len(chunk)) + error.start
                byte = error.object[error.start]
                cure = remedy or "set data.encoding=latin-1 (or cp1252, …), or convert the file with iconv"
                raise UserError(f"{path}: byte 0x{byte:02x} at offset {at} is not {encoding} text: {cure}") from error
            offset += len(chunk)
            if text:
                yield text


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What reading a table needs to be told."""

    encoding: str = "utf-8"  # of CSV and TSV
    sheet: str | None = None  # of a spreadsheet; none: the first one


def read_rows(
    source: Source, options: TableOptions | None = None, meter: Meter | None = None
) -> Iterator[Row | Reject]:
    """The rows of a file, a hub data set; what is no row is a Reject.

    Raises: UserError where the source as a whole cannot be read.
    """
    options = options or TableOptions()
    if source.path is None:
        yield from _read_hub(source.name)
    elif has_suffix(source.path, ROW_SUFFIXES):
        from rlhf.data.reading.json_rows import read_json_lines, read_json_values

        read = read_json_lines if has_suffix(source.path, (".jsonl",)) else read_json_values
        with open_bytes(source.path, meter) as file:
            yield from read(file, source.name)
    else:
        from rlhf.data.reading.tables import read_table

        yield from read_table(source.path, source.name, encoding=options.encoding, sheet=options.sheet)


def _read_hub(name: str) -> Iterator[Row]:
    import datasets

    try:
        splits = datasets.load_dataset(name)
        split = "train" if "train" in splits else next(iter(splits))
        rows = splits[split]
    except Exception as error:  # the hub's client raises dozens of kinds: no network, no such name, gated, scripts
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{name}: no such file or folder, and the hub did not give a data set of that name ({reason}): "
            "check the name and the network, or download it and give the file"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield Row(number, dict(row), number)

"""Files as bytes or as text, streamed: plain, .gz or .zst; and the rows that JSON and tables are read as.

This module does not depend on formats or records. `json_rows.py` parses JSON, `tables.py` tables, and `rows.py` chooses
between them.
"""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from rlhf.errors import UserError

MAX_RECORD_BYTES = 64 * 2**20  # of one JSON record: this bounds the memory
KEPT_BYTES = 1 << 20  # of a reject's original; for a longer one sha256 and length are kept
_CHUNK = 1 << 16
_PACKED_CHUNK = 1 << 9  # bytes read of a .zst file, which can unpack to 30,000 times as many


class Row(NamedTuple):
    """One JSON object: the line where it begins (for tables and hub data sets: its row), and its place."""

    line: int
    value: dict[str, Any]
    number: int = 0  # ordinal in the file, from 1
    offset: int | None = None  # bytes from the beginning of the unpacked file
    raw: bytes | None = None  # as in the file; None: `value` as JSON
    record: Any = None  # set if the line was read as a record directly; `value` is then empty


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that is not a record: its place, the wrong field, and a message `got …, want …`."""

    file: str
    line: int
    field: str
    message: str
    number: int = 0
    offset: int | None = None
    raw: bytes | None = None  # as in the file, if it is kept
    digest: tuple[str, int] | None = None  # sha256 and length of an original that is too long to keep

    def __str__(self) -> str:
        # more rows than lines so far: an array on one line, for which the line number is not enough
        row = f" (row {self.number:,})" if self.number > self.line else ""
        return f"{self.file}:{self.line}{row}: {self.message}"


class _ZstdReader(io.RawIOBase):
    """Decompresses .zst frame by frame and, unlike the library's reader, notices a file that was cut off."""

    def __init__(self, file: IO[bytes]):
        import zstandard

        self._file = file
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._packed = b""
        self._plain = memoryview(b"")  # a view, whose slices are not copies

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
    """The position in a file, for a progress bar; readers that do not update it count at their end."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def watch(self, file: IO[bytes]) -> None:
        self._file = file

    def position(self) -> int:
        """Bytes of the file on disk, packed."""
        return 0 if self._file is None or self._file.closed else self._file.tell()


@contextmanager
def open_bytes(path: Path, meter: Meter | None = None) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, unpacked.

    Raises: UserError if it cannot be opened, or is damaged (also while it is being read).
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


def read_text(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """Decode a file chunk by chunk; a BOM is dropped and line ends become a single newline.

    Raises: UserError if the encoding is unknown or the bytes are not in it, naming the byte's offset.
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
                # the decoder's input: the rest of the last chunk, then this chunk
                at = offset - (len(error.object) - len(chunk)) + error.start
                byte = error.object[error.start]
                cure = "set data.encoding=latin-1 (or cp1252, …), or convert the file with iconv"
                raise UserError(f"{path}: byte 0x{byte:02x} at offset {at} is not {encoding} text: {cure}") from error
            offset += len(chunk)
            if text:
                yield text

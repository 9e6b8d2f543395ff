"""Where rows come from: a setting such as `path` or `data.comparisons` as files, folders, finished imports and data sets of
the hub; files as bytes; and the rows that `reading.py` makes of them. `storage.py` reads finished imports.
"""

import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from rlhf.config.setting import listed
from rlhf.errors import UserError

TEXT_SUFFIXES = (".txt",)
ROW_SUFFIXES = (".jsonl", ".json")
TABLE_SUFFIXES = (".csv", ".tsv", ".xlsx", ".xls", ".ods", ".parquet", ".arrow")
RECORD_SUFFIXES = ROW_SUFFIXES + TABLE_SUFFIXES  # of files whose rows can be records
MAX_RECORD_BYTES = 64 << 20  # of one row: this bounds the memory
MANIFEST = "dataset.json"  # the file that marks a folder as an import, see storage.py
_PACKED = ("", ".gz", ".zst")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_EXTENSION = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,7}")
_SAVED = ("dataset_info.json", "state.json")  # in a folder that `Dataset.save_to_disk` of the library datasets wrote
_SAVED_SPLITS = "dataset_dict.json"  # in one that `DatasetDict.save_to_disk` wrote, a folder per split beside it


def printable_path(path: Path | str) -> str:
    """A path as text; bytes that are not UTF-8 are shown as \\xe9."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, the folder of a finished import, or a data set of the hub if `path` is None."""

    name: str
    path: Path | None
    imported: bool = False

    @property
    def is_text(self) -> bool:
        return self.path is not None and has_suffix(self.path, TEXT_SUFFIXES)


def has_suffix(path: Path, suffixes: Iterable[str]) -> bool:
    """Whether a file has one of these suffixes, packed or not."""
    return path.name.lower().endswith(tuple(s + packed for s in suffixes for packed in _PACKED))


def is_import(folder: Path) -> bool:
    """Whether a folder is marked as an import; `storage.read_manifest` checks whether it is complete."""
    path = folder / MANIFEST
    try:
        if not path.is_file():  # reading a pipe of that name would block
            return False
        with path.open("rb") as file:
            return b'"rlhf_import"' in file.read(200)
    except OSError:
        return False


def size_of(source: Source) -> int:
    """Bytes on disk; 0 for a data set of the hub, and for a file that was removed meanwhile."""
    try:
        return source.path.stat().st_size if source.path else 0
    except OSError:
        return 0


class Row(NamedTuple):
    """One object: the line where it begins, and its ordinal from 1 (in arrays and tables without lines both are that)."""

    line: int
    value: dict[str, Any]
    number: int
    raw: bytes | None = None  # as in the file; None: `value` as JSON


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that is not a record: its place, the wrong field, a message `got …, want …`, and its bytes."""

    file: str
    line: int
    field: str
    message: str
    number: int = 0
    raw: bytes | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass(slots=True)
class Reading:
    """How a file is read, what was noticed about it, and how far reading has come."""

    encoding: str = "utf-8"  # of CSV and TSV
    sheet: str | None = None  # of a spreadsheet; none: the first one
    note: str = ""  # the delimiter, or which of the sheets
    file: IO[bytes] | None = field(default=None, repr=False)

    def position(self) -> int:
        """Bytes of the file on disk that were read; 0 for formats that are read as a whole."""
        return 0 if self.file is None or self.file.closed else self.file.tell()


@contextmanager
def open_bytes(path: Path, reading: Reading | None = None) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, unpacked. Raises: UserError if it cannot be opened or, while it is read, is damaged."""
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as file:
            if reading is not None:
                reading.file = file
            if suffix == ".gz":
                yield gzip.GzipFile(fileobj=file)  # type: ignore[misc]
            elif suffix == ".zst":
                import pyarrow

                yield io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd"))
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged {suffix} file ({error}): copy or download it again") from error
    except OSError as error:
        if suffix == ".zst" and error.errno is None:
            raise UserError(f"{path}: damaged {suffix} file ({error}): copy or download it again") from error
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def resolve_sources(
    sources: Any, suffixes: tuple[str, ...], imports: bool = False, setting: str = "data"
) -> list[Source]:
    """A path, a hub id or a list of these as the files to read; a folder: all its files with these suffixes.

    With `imports`, folders that `rlhf import` wrote are sources too. `setting` is for messages.

    Raises: UserError if something is missing, has another suffix, or if a folder has no such file.
    """
    if sources is None:
        raise UserError(f"{setting}: no data given: want a file, a folder or a hub id (owner/name)")
    return [source for name in listed(sources) for source in _resolve(str(name), suffixes, imports)]


def _resolve(name: str, suffixes: tuple[str, ...], imports: bool) -> list[Source]:
    path = Path(name)
    wanted = ", ".join(suffixes) + " (plain, .gz or .zst)"
    mode = _mode(path)
    if mode is None:
        if _HUB_ID.fullmatch(name) and not _EXTENSION.fullmatch(Path(name).suffix):  # else a mistyped path
            return [Source(name, None)]
        raise UserError(f"{name}: no such file or folder: want {wanted}, a folder of these, or a hub id (owner/name)")
    if not stat.S_ISDIR(mode):
        if not has_suffix(path, suffixes):
            raise UserError(f"{name}: got a file of another kind, want {wanted}: convert or rename it")
        return [_file(path, mode)]
    if is_import(path) and not imports:
        raise UserError(f"{name}: is an import already: want the files that it was made of")
    inside = list(_files_below(path, suffixes, imports, path.resolve()))
    if not inside:
        raise UserError(f"{name}: the folder has no file to read: want {wanted}")
    return inside


def _mode(path: Path) -> int | None:
    """The mode of a path from stat; None if it does not exist. Raises: UserError if stat fails."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # no permission, a name that is too long, a NUL byte in it
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    shown = printable_path(path)
    return UserError(f"{shown[:200] + '…' * (len(shown) > 200)}: cannot be read ({getattr(error, 'strerror', error)})")


def _file(path: Path, mode: int) -> Source:
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{printable_path(path)}: not a regular file (a pipe, socket or device): write its content "
            "to a file, or move it out of the folder"
        )
    return Source(printable_path(path), path)


def _files_below(
    folder: Path, suffixes: tuple[str, ...], imports: bool, root: Path, above: tuple[Path, ...] = ()
) -> Iterator[Source]:
    """The files with these suffixes, and the imports, of a folder and the folders in it; hidden ones are left out.

    A link to a folder `above` is skipped: it would give every file dozens of times.

    Raises: UserError for a link that leads out of `root`, and for pipes, sockets and devices.
    """
    if is_import(folder):
        if imports:
            yield Source(printable_path(folder), folder, imported=True)
        return
    real = folder.resolve()
    if real in above:
        return
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from error
    if imports and any(folder.glob("*/train.arrow")):
        raise UserError(f"{folder}: an import that was never finished, or lost its {MANIFEST}: run `rlhf import` again")
    for path in _saved(folder) or inside:
        if path.name.startswith("."):
            continue
        mode = _mode(path)
        is_folder = mode is not None and stat.S_ISDIR(mode)
        if not is_folder and not has_suffix(path, suffixes):
            continue
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise UserError(
                f"{printable_path(path)}: is a link out of the folder, which is not followed: "
                f"give {printable_path(path.resolve())} itself, or remove the link"
            )
        if mode is None:
            raise UserError(f"{printable_path(path)}: is a link to a file that does not exist: remove it")
        if is_folder:
            yield from _files_below(path, suffixes, imports, root, (*above, real))
        else:
            yield _file(path, mode)


def _saved(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `save_to_disk` wrote; of several splits `train`, or the first one, as for a data set of
    the hub. Empty for any other folder.
    """
    if (folder / _SAVED_SPLITS).is_file():
        splits = sorted(path for path in folder.iterdir() if all((path / name).is_file() for name in _SAVED))
        return [path for path in splits if path.name == "train"] or splits[:1]
    if all((folder / name).is_file() for name in _SAVED):
        return sorted(folder.glob("data-*.arrow"))
    return []

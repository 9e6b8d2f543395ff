"""Sources of rows: resolves a setting such as `path` or `data.comparisons` to files, finished imports and data sets of
the hub, and opens files. `rows.py` reads their rows, `reading.py` makes records from rows.
"""

import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlhf.config.setting import listed
from rlhf.data.storage import is_import
from rlhf.errors import UserError
from rlhf.system.files import check_regular

TEXT_SUFFIXES = (".txt",)
ROW_SUFFIXES = (".jsonl", ".json")
RECORD_SUFFIXES = (*ROW_SUFFIXES, ".csv", ".tsv", ".xlsx", ".parquet")  # of files whose rows can be records
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


def has_suffix(path: Path, suffixes: Iterable[str]) -> bool:
    """Whether a file has one of these suffixes, packed or not."""
    return path.name.lower().endswith(tuple(s + packed for s in suffixes for packed in ("", *_CODECS)))


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


def resolve_sources(sources: Any, suffixes: tuple[str, ...], imports: bool = False) -> list[Source]:
    """A path, a hub id or a list of these as the files to read; a folder: all its files with these suffixes. With
    `imports`, folders that `rlhf import` wrote are sources too. Raises: UserError if something is missing, has another
    suffix, or if a folder has no such file.
    """
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

"""Resolves a setting such as `path` or `data.comparisons`: files, folders, finished imports, data sets of the hub.

`rows.py` reads the files; `storage.py` reads finished imports.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.setting import listed
from rlhf.errors import UserError

TEXT_SUFFIXES = (".txt",)
ROW_SUFFIXES = (".jsonl", ".json")
TABLE_SUFFIXES = (".csv", ".tsv", ".xlsx", ".xls", ".ods", ".parquet", ".arrow")
RECORD_SUFFIXES = ROW_SUFFIXES + TABLE_SUFFIXES  # of files whose rows can be records
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
        if _may_be_hub_id(name):
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


def _may_be_hub_id(name: str) -> bool:
    """Whether a name without a file can be owner/name; one with an extension is a mistyped path."""
    return _HUB_ID.fullmatch(name) is not None and _EXTENSION.fullmatch(Path(name).suffix) is None


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

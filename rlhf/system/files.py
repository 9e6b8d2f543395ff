"""Hashing files, writing them completely or not at all, also on a full disk, and reading them from the hub."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import UserError, hub_remedy
from rlhf.system.terminal import say

# Errors of a disk that is full or not writable.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def check_regular(path: Path) -> None:
    """Raises: UserError for a pipe, a socket or a device, which may never end, also behind a link or in the folder."""
    for one in path.iterdir() if path.is_dir() else [path]:
        if one.exists() and not one.is_file() and not one.is_dir():
            raise UserError(f"{one}: not a regular file (a pipe, socket or device): write its content to a file")


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file. Raises: UserError as `check_regular`."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path, skip: tuple[str, ...] = ()) -> dict[str, str]:
    """{relative path: sha256} of every file below a folder, sorted; top-level names in `skip` are left out."""
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(name): sha256_file(folder / name) for name in names if name.parts[0] not in skip}


def write_json(path: Path, value: Any) -> None:
    """As `write_text`, for a value as JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n", errors="backslashreplace")


def write_text(path: Path, text: str, errors: str = "replace", mode: int = 0o666) -> None:
    """Write a file atomically, and its folder if there is none: a reader sees the old one or the new one, and a failed
    attempt leaves nothing of it. Raises: UserError if the disk is full or refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opener = functools.partial(os.open, mode=mode)
        with open(temporary, "w", encoding="utf-8", errors=errors, opener=opener) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def write_jsonl(path: Path, rows: Iterable[dict]) -> int:
    """Write rows as JSON Lines; returns their number."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def beside(out: Path) -> Path:
    """The folder in which the replacement of a folder is written."""
    return out.with_name(f".{out.name}.new")


def set_aside(out: Path) -> Path:
    """The path of the old folder between the two renames of `swap`."""
    return out.with_name(f".{out.name}.old")


def swap(out: Path, new: Path | None = None) -> None:
    """Replace the old folder by the complete new one. Raises: UserError if the system refuses."""
    new, old = new or beside(out), set_aside(out)
    try:
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
        new.rename(out)
    except OSError as error:
        if old.exists() and not out.exists():
            old.rename(out)
        raise disk_error(error, out) from error
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def finish_swap(out: Path) -> None:
    """Finish a `swap` that was killed; without the new folder undo it. Call it with the lock on `out`."""
    new, old = beside(out), set_aside(out)
    if old.exists() and not out.exists():
        (new if new.exists() else old).rename(out)
    shutil.rmtree(old, ignore_errors=True)


def lock_of(place: Path) -> Path:
    """The file by which processes of this package keep off a folder or file."""
    return place.with_name(f".{place.name}.lock")


@contextlib.contextmanager
def locked(place: Path, busy: str, setting: str = "runs_dir") -> Iterator[None]:
    """Lock a folder or file, which need not exist. busy: what another process does with it, and what to do then.
    Raises: UserError if another one has the lock.
    """
    lock = lock_of(place)
    with writing(place, setting):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not lock.exists() or lock.stat().st_ino != os.fstat(file.fileno()).st_ino:
                raise BlockingIOError  # it was released and removed between opening and locking
        except BlockingIOError:
            raise UserError(f"{place}: another process is {busy}") from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def is_locked(place: Path) -> bool:
    """Whether a process has the lock on a place, by the kernel's list: taking it could keep another process from its work."""
    kernel = Path("/proc/locks")
    with contextlib.suppress(FileNotFoundError):  # no lock, or the process has just ended
        number = lock_of(place).stat().st_ino
        return not kernel.exists() or f":{number} " in kernel.read_text(encoding="ascii")
    return False


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Lock `out` for writing, without what a killed command left behind. Raises: UserError if another process has the lock."""
    with locked(out, "writing it: wait for it, or choose another place", "out"):
        finish_swap(out)
        if (left := beside(out)).exists():
            say(f"removing {left}, which a killed command left behind")
            shutil.rmtree(left)
        yield


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """An empty folder next to `out`, which replaces it if the block succeeds and has not moved it. Call it with the
    lock on `out`.
    Raises: UserError if the disk is full or not writable.
    """
    new = beside(out)
    try:
        with writing(out, "out"):
            new.mkdir(parents=True)
            yield new
        if new.exists():
            swap(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_replaceable(out: Path, overwrite: bool, setting: str, what: str, is_ours: Callable[[Path], bool]) -> None:
    """Raises: UserError unless nothing, an empty folder, or with overwrite=true what `is_ours` recognises, in words `what`, is at `out`."""
    if not (out.exists() or out.is_symlink()) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{out}: exists: choose another {setting}=…, or add overwrite=true to replace it")
    if out.is_symlink():  # its target may be someone else's
        raise UserError(f"{out}: is a link, so it is not replaced: give the folder that it points to")
    if not is_ours(out):
        raise UserError(f"{out}: is no {what}, so it is not replaced: choose another {setting}=…, or remove it")


def share(folder: Path) -> None:
    """Give files below a folder the mode of the umask: safetensors writes through a temporary file, whose mode is 0600."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600:
            path.chmod(0o666 & ~mask)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, damaged or contains something else.
    Raises: UserError as `check_regular`.
    """
    check_regular(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def writing(path: Path, setting: str = "runs_dir", only_full: bool = False) -> Iterator[None]:
    """Raises: UserError as `disk_error` words it for an OSError within, or for a library's words of a disk that is full
    or read-only.

    only_full: of the OSErrors, those of such a disk alone.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = re.search(r"\(os error (\d+)\)|inline_container", str(error))  # safetensors', torch.save's
        number = error.errno if isinstance(error, OSError) else int(words[1] or errno.ENOSPC) if words else None
        if number not in DISK_ERRORS and (only_full or not isinstance(error, OSError)):
            raise
        system = error if isinstance(error, OSError) else OSError(number, os.strerror(number or 0))
        raise disk_error(system, Path(system.filename or path) if only_full else path, setting) from error


def disk_error(error: OSError, path: Path, setting: str = "runs_dir") -> UserError:
    """One line for an error while writing that says what to do. setting: the setting that names the place."""
    full = f"free space or choose another disk with {setting}=…; a run resumes from its last checkpoint"
    remedies = {errno.ENOSPC: full, errno.EDQUOT: full, errno.EFBIG: f"raise the limit on files (ulimit -f), or {full}"}
    refused = f"make the folder writable or choose another with {setting}=…"
    remedies |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), refused)
    remedy = remedies.get(error.errno or 0, f"check the disk and {setting}=…, then run the same command again")
    return UserError(f"{path}: cannot write: {error.strerror or error}: {remedy}")


def download(setting: str, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The local copy of a hub repository's files. setting: what the message begins with. Raises: UserError if it cannot be read."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the library raises many kinds for missing, private or unreachable repositories
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        remedy = hub_remedy(error, name, "check the name and the connection, or give a local folder")
        raise UserError(f"{setting}{name}: not readable from the hub ({reason}): {remedy}") from error

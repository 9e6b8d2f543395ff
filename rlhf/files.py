"""Files that are hashed, written whole or not at all, and on disks that may be full."""

import contextlib
import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from rlhf.errors import UserError

# What a disk that is full, or may not be written, gives.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def hash_files(folder: Path, skip: tuple[str, ...] = ()) -> dict[str, str]:
    """{relative path: sha256} of every file below a folder, sorted; top-level names in `skip` are left out."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    names = ((p, p.relative_to(folder)) for p in files)
    return {str(name): sha256_file(p) for p, name in names if name.parts[0] not in skip}


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a torn one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, ensure_ascii=False, default=str)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def read_json(path: Path) -> Any:
    """The JSON of a file, or None where it does not exist or is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def disk_error(error: OSError, path: Path) -> UserError:
    """An operating system's complaint about writing, as one line that says what to do."""
    remedy = {
        errno.ENOSPC: "free space or choose another disk with runs_dir=…; the run resumes from its last checkpoint",
        errno.EDQUOT: "free space or choose another disk with runs_dir=…; the run resumes from its last checkpoint",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f); the run resumes from its last checkpoint",
        errno.EACCES: "make the folder writable or choose another with runs_dir=…",
        errno.EROFS: "make the folder writable or choose another with runs_dir=…",
    }.get(error.errno or 0, "check the disk, then run the same command again")
    return UserError(f"{path}: cannot write: {error.strerror or error}: {remedy}")

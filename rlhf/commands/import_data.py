"""`rlhf import`: foreign files -> records in Arrow, in a folder that is there as a whole or not at all.

The rows are read by `data/importing/importer.py`. Here is what surrounds it: the temporary folder, which is renamed once its
manifest is written, what a killed import left behind, and what the screen shows.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.config import ImportConfig
from rlhf.data.records import one_line
from rlhf.errors import UserError
from rlhf.terminal import say


def run(config: ImportConfig) -> None:
    """Import `config.path` into `config.out`.

    Raises: UserError if nothing can be read or written, and, after the accepted rows were written under
    `<out>.partial`, where there are more rejects than max_rejects.
    """
    from rlhf.data.importing.importer import Importer
    from rlhf.data.importing.report import describe
    from rlhf.data.reading.sources import RECORD_SUFFIXES, given_names, resolve_sources, size_of
    from rlhf.data.storage import seal
    from rlhf.tracking.progress import progress

    assert config.out is not None
    [given] = given_names("out", config.out, "the folder to write")
    out = Path(os.path.abspath(given))
    sources = resolve_sources(config.path, RECORD_SUFFIXES, setting="path")
    started = time.monotonic()
    with _working_folder(out, config.overwrite) as folder:
        earlier = _earlier(config, out)
        size = sum(map(size_of, sources))
        with progress(size, "import", unit="byte") as bar:
            importer = Importer(config, folder, earlier, lambda done: bar.update(max(0, done - bar.done)))
            report = importer.run(sources)
        partial = importer.reject_count > config.max_rejects
        about = {
            "records": report["records"],
            "splits": {"prefix_characters": config.prefix_characters, "seed": config.seed,
                       "dev": config.dev, "test": config.test},
        }  # fmt: skip
        seal(folder, "partial" if partial else "complete", about)
        target = _partial(out) if partial else out
        _put_in_place(folder, target)
    for line in describe(report) + importer.notes:
        _say(line)
    for reject in importer.first_rejects:
        _say(f"reject: {reject}")
    hidden = importer.reject_count - len(importer.first_rejects)
    if hidden:
        _say(f"… and {hidden:,} more rejects in {target / 'rejects.jsonl'}")
    seconds = time.monotonic() - started
    _say(f"{size / 1e6:,.1f} MB in {seconds:.1f} s ({size / 1e6 / seconds:.1f} MB/s) -> {target}")
    if partial:
        raise UserError(
            f"{importer.reject_count:,} rejects, max_rejects={config.max_rejects}: the accepted rows are in {target}, "
            "which training refuses without data.allow_partial=true: mend the rows, or set max_rejects"
        )


def _say(text: str) -> None:
    say(f"import: {one_line(text, 4000)}")


def _earlier(config: ImportConfig, out: Path) -> Any:
    """The splits that are kept: those of `earlier`, and of the import that is replaced."""
    from rlhf.data.importing.assignments import Assignments, read_assignments
    from rlhf.data.reading.sources import given_names, is_import

    given = [] if config.earlier is None else given_names("earlier", config.earlier, "the folder of an import")
    folders = [Path(one) for one in given]
    if is_import(out):
        folders.append(out)
    found = Assignments()
    for folder in folders:
        found.add(read_assignments(folder, config.prefix_characters))
    return found


# --- the folder ----------------------------------------------------------------------------------------------------


def disk_problem(error: OSError, path: Path) -> UserError:
    """An operating system's complaint about writing, as one line that says what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free space, or choose another disk with out=…, then run the same command again"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "make the folder writable, or choose another with out=…"
    else:
        remedy = "check the disk and out=…, then run the same command again"
    return UserError(f"{path}: cannot write: {error.strerror or error}: {remedy}")


@contextlib.contextmanager
def _working_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """An empty folder beside `out`, locked; removed where the import fails.

    Raises: UserError if `out` is there already, another process imports to it, or the disk refuses.
    """
    folder = out.with_name(f".{out.name}.importing")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        left = folder.exists()
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise disk_problem(error, out) from error
    try:
        if not _lock(lock, folder):
            raise UserError(f"{out}: another process is importing to it: wait for it, or choose another out=…")
        try:
            for target in (out, _partial(out)):
                _restore(target)
                if target.exists() or target.is_symlink():
                    _check_replaceable(target, overwrite or target != out)
            if left:
                _say(f"removing {folder}, which an import that was killed left behind")
                for path in folder.iterdir():
                    _remove(path)
            yield folder
        except OSError as error:
            raise disk_problem(error, Path(error.filename or folder)) from error
        finally:
            if _is_same(lock, folder):  # not the one that another import has begun since
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _lock(handle: int, folder: Path) -> bool:
    """Whether the folder is ours alone: nobody else has it, nor has moved it away since it was opened."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _is_same(handle, folder)
    except BlockingIOError:
        return False


def _is_same(handle: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False


def _partial(out: Path) -> Path:
    """Where an import with too many rejects goes."""
    return out.with_name(out.name + ".partial")


def _remove(path: Path) -> None:
    """Remove a folder, a file, or a link but not what it points to."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _check_replaceable(out: Path, overwrite: bool) -> None:
    """Raises: UserError if `out` must stay. A link is no import: what it points to belongs to someone else."""
    from rlhf.data.reading.sources import is_import

    if not overwrite:
        raise UserError(f"{out}: is there already: choose another out=…, or add overwrite=true to replace it")
    if out.is_symlink():
        raise UserError(f"{out}: is a link, so it is not replaced: give the folder that it points to")
    if not is_import(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: is no import, so it is not replaced: choose another out=…, or remove it yourself")


def _old(out: Path) -> Path:
    return out.with_name(f".{out.name}.old")


def _restore(out: Path) -> None:
    """Undo, or finish, a replacement that was killed between its two renames."""
    old = _old(out)
    if old.exists() and not out.exists():
        old.rename(out)
        _say(f"{out}: restored, since an import that was to replace it was killed")
    elif old.exists():
        _say(f"removing {old}, which an import that was killed left behind")
        _remove(old)


def _put_in_place(folder: Path, target: Path) -> None:
    """Rename a sealed folder; what it replaces stays beside it until then."""
    from rlhf.data.storage import sync_folder

    old = _old(target)
    if target.exists():
        target.rename(old)
    folder.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)

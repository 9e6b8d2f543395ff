"""`rlhf import`: foreign files -> records in Arrow, in a folder that is written completely or not at all.

The rows are read by `data/importer.py`. This module has the rest: the temporary folder, which is renamed
once its manifest is written, the cleaning up after a killed import, and the output on the screen.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.config.commands import ImportConfig
from rlhf.config.setting import listed
from rlhf.errors import UserError
from rlhf.system.files import beside, disk_error, held, mend, swap
from rlhf.system.terminal import say


def run(config: ImportConfig) -> None:
    """Import `config.path` into `config.out`.

    Raises: UserError if nothing can be read or written, and, after the accepted rows were written under
    `<out>.partial`, if there are more rejects than max_rejects.
    """
    from rlhf.data.import_report import describe
    from rlhf.data.importer import Importer
    from rlhf.data.inputs import RECORD_SUFFIXES, resolve_sources
    from rlhf.data.storage import seal
    from rlhf.runs.progress import progress

    assert config.out is not None
    out = Path(os.path.abspath(config.out))
    sources = resolve_sources(config.path, RECORD_SUFFIXES, setting="path")
    started = time.monotonic()
    with _working_folder(out, config.overwrite) as folder:
        earlier = _earlier(config, out)
        size = sum(source.size for source in sources)
        with progress(size, "import", unit="byte") as bar:
            importer = Importer(config, folder, earlier, lambda done: bar.update(max(0, done - bar.done)))
            report = importer.run(sources)
        partial = importer.damaged or importer.reject_count > config.max_rejects
        splits = {name: getattr(config, name) for name in ("prefix_characters", "seed", "dev", "test")}
        seal(folder, "partial" if partial else "complete", {"records": report["records"], "splits": splits})
        target = _partial(out) if partial else out
        swap(target, folder)
    for line in describe(report) + importer.notes:
        _say(line)
    for reject in importer.first_rejects:
        _say(f"reject: {reject}")
    hidden = importer.reject_count - len(importer.first_rejects)
    if hidden:
        _say(f"… and {hidden:,} more rejects in {target / 'rejects.jsonl'}")
    seconds = time.monotonic() - started
    _say(f"{size / 1e6:,.1f} MB in {seconds:.1f} s ({size / 1e6 / seconds:.1f} MB/s) -> {target}")
    if importer.damaged:
        raise UserError(
            f"a file could not be read to its end (see the rejects): what was accepted before is in {target}, which training "
            "refuses without data.allow_partial=true: replace the damaged file and import again"
        )
    if partial:
        raise UserError(
            f"{importer.reject_count:,} rejects, max_rejects={config.max_rejects}: the accepted rows are in {target}, "
            "which training refuses without data.allow_partial=true: mend the rows, or set max_rejects"
        )


def _say(text: str) -> None:
    say(f"import: {text[:4000]}")


def _earlier(config: ImportConfig, out: Path) -> Any:
    """The splits to keep: those of `earlier`, and of the import that is replaced."""
    from rlhf.data.inputs import is_import
    from rlhf.data.splits import Assignments
    from rlhf.data.storage import read_assignments

    assignments = Assignments()
    for folder in [*map(Path, listed(config.earlier)), *([out] if is_import(out) else [])]:
        assignments.add(read_assignments(folder, config.prefix_characters))
    return assignments


# --- the folder ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _working_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """An empty folder next to `out`, which is locked; removed if the import fails.

    Raises: UserError if `out` exists, another process imports to it, or the disk is full or not writable.
    """
    folder = beside(out)
    with held(out):
        try:
            mend(_partial(out))
            for target in (out, _partial(out)):
                if target.exists() or target.is_symlink():
                    _check_replaceable(target, overwrite or target != out)
            folder.mkdir()
            yield folder
        except OSError as error:
            raise disk_error(error, Path(error.filename or folder), "out") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _partial(out: Path) -> Path:
    """The folder of an import with too many rejects."""
    return out.with_name(out.name + ".partial")


def _check_replaceable(out: Path, overwrite: bool) -> None:
    """Raises: UserError if `out` must not be replaced. A link is no import: its target may be someone else's."""
    from rlhf.data.inputs import is_import

    if not overwrite:
        raise UserError(f"{out}: exists: choose another out=…, or add overwrite=true to replace it")
    if out.is_symlink():
        raise UserError(f"{out}: is a link, so it is not replaced: give the folder that it points to")
    if not is_import(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: is no import, so it is not replaced: choose another out=…, or remove it yourself")

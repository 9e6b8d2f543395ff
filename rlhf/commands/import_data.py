"""`rlhf import`: foreign files -> records, in a folder that is written completely or not at all.

The rows are read by `data/importer.py`; this module has the folder and the output on the screen.
"""

import os
import time
from pathlib import Path

from rlhf.config.commands import ImportConfig
from rlhf.config.setting import listed
from rlhf.errors import UserError
from rlhf.system.files import check_replaceable, held, mend, replaced, swap
from rlhf.system.terminal import say


def run(config: ImportConfig) -> None:
    """Import `config.path` into `config.out`.

    Raises: UserError if nothing can be read or written, and, after the accepted rows were written under
    `<out>.partial`, if there are more rejects than max_rejects.
    """
    from rlhf.data.import_report import describe
    from rlhf.data.importer import Importer
    from rlhf.data.inputs import RECORD_SUFFIXES, is_import, resolve_sources
    from rlhf.data.splits import Assignments
    from rlhf.data.storage import read_assignments, seal
    from rlhf.runs.progress import progress

    assert config.out is not None
    out = Path(os.path.abspath(config.out))
    too_many_rejects = out.with_name(out.name + ".partial")
    sources = resolve_sources(config.path, RECORD_SUFFIXES, setting="path")
    started = time.monotonic()
    with held(out):
        mend(too_many_rejects)
        check_replaceable(out, config.overwrite, "out", "import", is_import)
        check_replaceable(too_many_rejects, True, "out", "import", is_import)
        with replaced(out) as folder:
            earlier = Assignments()  # of the import that is replaced too
            for known in [*map(Path, listed(config.earlier)), *([out] if is_import(out) else [])]:
                earlier.add(read_assignments(known))
            size = sum(source.size for source in sources)
            with progress(size, "import", unit="byte") as bar:
                importer = Importer(config, folder, earlier, lambda done: bar.update(max(0, done - bar.done)))
                report = importer.run(sources)
            partial = importer.reject_count > config.max_rejects
            seal(folder, "partial" if partial else "complete", {"records": report["records"]})
            target = too_many_rejects if partial else out
            if partial:
                swap(target, folder)
    for line in describe(report):
        _say(line)
    hidden = importer.reject_count
    for reject, count in importer.first_rejects.values():
        _say(f"reject: {reject}{f' (and {count - 1:,} more like it)' if count > 1 else ''}")
        hidden -= count
    if hidden:
        _say(f"… and {hidden:,} more rejects in {target / 'rejects.jsonl'}")
    seconds = time.monotonic() - started
    _say(f"{size / 1e6:,.1f} MB in {seconds:.1f} s ({size / 1e6 / seconds:.1f} MB/s) -> {target}")
    if not partial:
        return
    raise UserError(
        f"{importer.reject_count:,} rejects, max_rejects={config.max_rejects}: the accepted rows are in {target}, which "
        "training refuses without data.allow_partial=true: correct the rows, or set max_rejects"
    )


def _say(text: str) -> None:
    say(f"import: {text[:4000]}")

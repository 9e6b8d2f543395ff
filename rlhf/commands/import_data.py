"""`rlhf import`: foreign files -> records, in a folder that is written completely or not at all. `data/importer.py` reads the rows."""

import os
from pathlib import Path
from typing import Any

from rlhf.config.commands import ImportConfig
from rlhf.config.setting import listed
from rlhf.errors import UserError
from rlhf.system.files import check_replaceable, finish_swap, held, replaced, swap
from rlhf.system.terminal import one_line, say


def run(config: ImportConfig) -> None:
    """Import `config.path` into `config.out`, or, with more rejects than max_rejects, into `<out>.partial`, and then fail."""
    from rlhf.data.importer import Importer
    from rlhf.data.inputs import RECORD_SUFFIXES, resolve_sources
    from rlhf.data.storage import is_import, read_assignments, seal
    from rlhf.runs.progress import Progress

    out = Path(os.path.abspath(config.out or ""))
    too_many_rejects = out.with_name(out.name + ".partial")
    sources = resolve_sources(config.path, RECORD_SUFFIXES)
    with held(out):
        finish_swap(too_many_rejects)
        check_replaceable(out, config.overwrite, "out", "import", is_import)
        check_replaceable(too_many_rejects, True, "out", "import", is_import)
        with replaced(out) as folder:
            earlier: dict[tuple[str, int], str] = {}  # of the import that is replaced too
            for known in [*map(Path, listed(config.earlier)), *([out] if is_import(out) else [])]:
                earlier = read_assignments(known) | earlier
            with Progress(sum(source.size for source in sources), "import", unit="byte") as bar:
                importer = Importer(config, folder, earlier, lambda done: bar.update(max(0, done - bar.done)))
                report = importer.run(sources)
            partial = importer.reject_count > config.max_rejects
            seal(folder, "partial" if partial else "complete", {"records": report["records"]})
            if partial:
                swap(too_many_rejects, folder)
    target = too_many_rejects if partial else out
    target = target if os.path.isabs(str(config.out)) else Path(os.path.relpath(target))  # as it was given
    lines = [*describe(report), *(f"reject: {reject}" for reject in importer.first_rejects)]
    hidden = importer.reject_count - len(importer.first_rejects)
    lines += [f"… and {hidden:,} more in {target / 'rejects.jsonl'}"] if hidden else []
    for line in (*lines, f"written to {target}"):
        say(f"import: {line[:4000]}")
    if partial:
        there = f"the accepted rows are in {target}, which training refuses without data.allow_partial=true"
        rejects = f"{importer.reject_count:,} reject{'s' if importer.reject_count > 1 else ''}"
        raise UserError(f"{rejects}, max_rejects={config.max_rejects}: {there}: correct the rows, or set max_rejects")


def describe(report: dict[str, Any]) -> list[str]:
    from rlhf.data import agreement
    from rlhf.data.importer import ROW_COUNTS
    from rlhf.data.splits import SPLITS

    lines = []
    for file in report["files"]:
        made = ", ".join(f"{count:,} {kind}" for kind, count in file["records"].items()) or "no record"
        lines.append(f"{file['file']}: {file['format']} ({file['why']}): {file['counts']['input']:,} rows, {made}")
    lines.append("rows: " + ", ".join(f"{report['counts'][name]:,} {name}" for name in ROW_COUNTS))
    records = report["records"]
    lines += [f"  {'records':<15}" + "".join(f"{name:>10}" for name in (*SPLITS, "in all"))] if records else []
    for kind, by_split in records.items():
        cells = [by_split[split] for split in SPLITS]
        lines.append(f"  {kind:<15}" + "".join(f"{count:>10,}" for count in (*cells, sum(cells))))
    done = [f"{count:,} {name.replace('_', ' ')}" for name, count in report["cleaning"].items() if count]
    lines += ["cleaning: " + ", ".join(done)] if done else []
    if "ranking" in records:
        k = ", ".join(f"{count:,} of {size}" for size, count in report["responses_a_ranking"].items())
        counts = ", ".join(f"{report[name]:,} {name}" for name in ("pairs", "ties", "unpaired"))
        lines.append(f"rankings: responses {k}; {counts}; {len(report['labelers']):,} labelers")
    for name, figures in report["lengths"].items():
        median, p95, most = (f"{figures[key]:,}" for key in ("median", "p95", "max"))
        lines.append(f"words per {name.removesuffix('_words')}: median {median}, 95% up to {p95}, longest {most}")
    lines += agreement.describe(report["agreement"]) if "ranking" in records else []
    for labeler, checks in report["checks"].items():
        looked = {name: (one["right"] / one["pairs"], one["pairs"]) for name, one in checks.items() if one["pairs"]}
        shares = ", ".join(f"{name} {right:.1%} of {pairs:.0f} pairs" for name, (right, pairs) in looked.items())
        lines.append(f"checks: {one_line(labeler, 24)}: {shares}")
    return lines

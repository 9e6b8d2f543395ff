"""The import loop: rows of all files -> checked records -> cleaning -> splits -> Arrow, with every row accounted for.

Memory holds hashes of the records, not the records: they are written as they come, without a split, and divided once
all of them were seen, since a user's prompts stay together. Rows become records in `batches.py`; folders, temporary
names and messages are in `commands/import_data.py`.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rlhf.config.commands import ImportConfig
from rlhf.config.setting import NOTHING, settings_in
from rlhf.data.agreement.judgements import AgreementCounter
from rlhf.data.importers import Format, choose_format, formats, stem_of
from rlhf.data.importers.table import make_format
from rlhf.data.importing.assignments import FILE, Assigner, Assignments, describe_splits, write_assignments
from rlhf.data.importing.batches import Batch, BatchMaker, Held, Plan, process
from rlhf.data.importing.cleaning import DUPLICATE, FILTERED, KEPT, KIND_NUMBERS, REJECTED, Cleaner
from rlhf.data.importing.joining import join_held
from rlhf.data.importing.pool import Pool, WorkerError
from rlhf.data.importing.report import ROW_COUNTS, Statistics, reject_line, versions
from rlhf.data.importing.units import (
    BATCH_ROWS,
    Digest,
    Unit,
    file_units,
    first_rows,
    last_line,
    row_units,
    rows_of,
    table_note,
)
from rlhf.data.reading.json_rows import Block
from rlhf.data.reading.readers import Meter, Reject
from rlhf.data.reading.rows import TableOptions
from rlhf.data.reading.sources import Source, size_of
from rlhf.data.revisions import find_replaced
from rlhf.data.splits import SPLITS
from rlhf.data.storage import ArrowWriter, schemas, to_row
from rlhf.errors import UserError

SHOWN_REJECTS = 20
_LARGE_PREFIX = 0.05  # of all prompts with one beginning: worth a word
_LEAST_PROMPTS = 100  # below which that says nothing


@dataclass(slots=True)
class FileReport:
    """What one file was taken for, and what came of it."""

    file: str
    format: str | None = None
    why: str = "no row could be read"
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROW_COUNTS, 0))
    records: Counter[str] = field(default_factory=Counter)  # kept, by kind
    sha256: str = ""

    def count(self, statuses: np.ndarray) -> None:
        """Count rows by their result."""
        self.counts["input"] += len(statuses)
        names = {KEPT: "accepted", DUPLICATE: "duplicates", FILTERED: "filtered", REJECTED: "rejected"}
        for status, name in names.items():
            self.counts[name] += int((statuses == status).sum())


class Importer:
    """One import into an empty folder, which the caller renames or deletes."""

    def __init__(self, config: ImportConfig, folder: Path, earlier: Assignments, progress: Callable[[int], None]):
        self.config, self.folder = config, folder
        self.progress = progress  # is called with the number of bytes done
        self.cleaner = Cleaner(config.duplicates, config.pii, config.filter_prefixes, config.max_prompts_per_user)
        shares = {"train": 1.0 - config.dev - config.test, "dev": config.dev, "test": config.test}
        self.assigner = Assigner(config.seed, shares, earlier)
        self.statistics = Statistics()
        self.agreement = AgreementCounter()
        self.files: list[FileReport] = []
        self.reject_count = 0
        self.first_rejects: list[str] = []  # as shown; the rejects themselves hold up to a record's bytes each
        self.notes: list[str] = []
        self.unknown_splits: Counter[str] = Counter()
        self._facts: dict[str, list[np.ndarray]] = defaultdict(list)  # of kept records, by kind
        self._writers: dict[str, ArrowWriter] = {}
        self._pool = Pool(config.processes)
        self._failures: list[UserError] = []
        self._rejects: TextIO | None = None

    # --- reading ---

    def run(self, sources: list[Source]) -> dict[str, Any]:
        """Import the sources; returns the report, which is written too.

        Raises: UserError if no source can be read at all; OSError if the folder cannot be written.
        """
        self._forced_format()  # report an unknown format before anything is read
        done = 0
        try:
            with (self.folder / "rejects.jsonl").open("w", encoding="utf-8") as self._rejects:
                for source in sources:
                    self._import_file(source, done)
                    done += size_of(source)
                    self.progress(done)
        finally:
            self._pool.close()
        if len(self._failures) == len(sources):
            raise self._failures[0]
        return self._finish()

    def _forced_format(self) -> tuple[Format, str] | None:
        """The format if the files do not decide it. Raises: UserError for one that does not exist."""
        name = self.config.format
        if name == "table":
            return make_format(self.config.columns, self.config.words), "asked for"
        if name != "auto" and name not in formats():
            choose_format("", [], name, "format")
        return None

    def _import_file(self, source: Source, done: int) -> None:
        report = FileReport(source.name)
        self.files.append(report)
        meter = Meter()
        digest = Digest(source)
        last = 0  # last row read, for a message about a truncated file
        held: list[Held] = []  # each with the index of its row in the file
        statuses: list[np.ndarray] = []
        try:
            for batch, line in self._batches(source, report, meter, digest):
                offset = sum(map(len, statuses))
                held += [one._replace(at=offset + one.at) for one in batch.held]
                statuses.append(self._take(batch, report))
                last = line
                self.progress(done + meter.position())
        except WorkerError:
            raise  # says nothing of the file
        except UserError as error:
            message = str(error).removeprefix(f"{source.name}: ")
            if not any(map(len, statuses)):
                self._failures.append(error)
            self._reject(Reject(source.name, last + 1, "file", f"file: {message}"))
            statuses.append(np.array([REJECTED], np.uint8))
        rows = np.concatenate(statuses) if statuses else np.zeros(0, np.uint8)
        if held:
            self._join(held, rows, report)
        report.count(rows)
        report.sha256 = digest.hexdigest()

    def _batches(self, source: Source, report: FileReport, meter: Meter, digest: Digest) -> Iterator[tuple[Batch, int]]:
        """The batches of a file in their order, and the line before which the next one begins."""
        config = self.config
        options = TableOptions(config.encoding, config.sheet)
        units = digest.watch(file_units(source, options, meter))
        plan = Plan(
            source.name,
            stem_of(source),
            pii=config.pii,
            prefix_characters=config.prefix_characters,
            seed=config.seed,
        )
        seen = 0
        for unit in units:
            rows = first_rows(unit, source.name)
            if not rows:  # nothing but rejects, and blank lines
                batch = process(plan, unit)
                seen += batch.rows
                yield batch, last_line(unit)
                continue
            chosen, why = self._forced_format() or choose_format(source.name, rows, config.format, "format")
            if chosen.prepare is not None:
                values = [row.value for row in first_rows(unit, source.name, BATCH_ROWS)]
                chosen = chosen.prepare(source.name, values)
                why = f"{why}; {table_note(source, options)}{chosen.recognise(values[0])}"
            report.format, report.why = chosen.name, why
            revised = find_replaced(source.path) if chosen.name == "native" and source.path else frozenset()
            plan = replace(plan, format=chosen, replaced=revised)
            work: Iterator[Unit] = chain([unit], units)
            if chosen.gather is not None:
                work = row_units(chosen.gather(chain.from_iterable(rows_of(u, source.name) for u in work), source.name))
            alone = not chosen.joins and chosen.gather is None
            parallel = config.processes > 1 and isinstance(unit, Block) and alone
            if config.processes > 1 and not parallel:
                self.notes.append(
                    f"{source.name}: read by one process, since only JSON Lines of single rows can be shared out"
                )
            for one, batch in self._pool.in_order(process, plan, work, share=parallel):
                yield batch, last_line(one)
            return
        if not seen:
            raise UserError(f"{source.name}: the file is empty: want rows of a known format")

    # --- cleaning ---

    def _take(self, batch: Batch, report: FileReport) -> np.ndarray:
        """Clean a batch and write the kept records; returns the result of each row."""
        rows = np.full(batch.rows, REJECTED, np.uint8)
        rows[batch.replaced] = FILTERED
        facts = batch.facts
        judge = self.cleaner.judge
        columns = (facts[name].tolist() for name in ("kind", "identity", "prefix", "user", "pii"))
        judged = np.array([judge(*values) for values in zip(*columns, strict=True)], np.uint8)
        np.minimum.at(rows, facts["row"], judged)
        kept = judged == KEPT
        for _, reject in batch.rejects:
            self._reject(reject)
        self.unknown_splits.update(batch.unknown_splits)
        self.assigner.add(facts, kept)
        if kept.any():
            self._keep(batch, kept, report)
        return rows

    def _keep(self, batch: Batch, kept: np.ndarray, report: FileReport) -> None:
        import pyarrow as pa

        facts = batch.facts
        self.statistics.add(facts[kept])
        for kind, table in batch.tables.items():
            of_kind = facts["kind"] == KIND_NUMBERS[kind]
            mask = kept[of_kind]
            if not mask.any():
                continue
            if kind == "ranking":
                for judgement, keep in zip(batch.judgements, mask.tolist(), strict=True):
                    if keep:
                        self.agreement.add_judgement(judgement)
            prompts, responses = batch.sizes[kind]
            self.statistics.add_sizes(prompts[mask], responses[np.repeat(mask, facts["responses"][of_kind])])
            chosen = table if mask.all() else table.filter(pa.array(mask))
            if "labeler" in chosen.schema.names:
                counted = chosen.column("labeler").value_counts()
                self.statistics.add_labelers(counted.field(0).to_pylist(), counted.field(1).to_pylist())
            self._writer(kind).write(chosen)
            report.records[kind] += int(mask.sum())
            self._facts[kind].append(facts[of_kind][mask][["key", "prompt", "user", "given"]].copy())

    def _writer(self, kind: str) -> ArrowWriter:
        if kind not in self._writers:
            self._writers[kind] = ArrowWriter(self.folder / "unsplit" / f"{kind}.arrow", schemas()[kind])
        return self._writers[kind]

    def _reject(self, reject: Reject) -> None:
        assert self._rejects is not None
        self._rejects.write(reject_line(reject))
        self.reject_count += 1
        if len(self.first_rejects) < SHOWN_REJECTS:
            self.first_rejects.append(str(reject))

    def _join(self, held: list[Held], rows: np.ndarray, report: FileReport) -> None:
        """Join judgements that were held back; updates the result of their rows in `rows`."""
        plan = Plan(
            report.file,
            "",
            pii=self.config.pii,
            prefix_characters=self.config.prefix_characters,
            seed=self.config.seed,
        )
        for members, joined in join_held(held, report.file):
            if isinstance(joined, list):
                for reject in joined:
                    self._reject(reject)
                continue
            maker = BatchMaker(plan)
            maker.add(joined, to_row(joined), 0, members[0].own_id)
            batch = maker.finish()
            batch.rows = 1
            [status] = self._take(batch, report)
            for member in members:
                rows[member.at] = min(rows[member.at], status)

    # --- splitting and writing ---

    def _finish(self) -> dict[str, Any]:
        for writer in self._writers.values():
            writer.close(keep=False)
        self.assigner.decide()
        records: dict[str, dict[str, int]] = {}
        for kind in KIND_NUMBERS:
            if kind in self._writers:
                records[kind] = self._divide(kind)
        if (self.folder / "unsplit").exists():
            (self.folder / "unsplit").rmdir()
        write_assignments(self.folder / FILE, self.assigner.assignments)
        report = self._report(records)
        # A path whose bytes are not UTF-8 is written with JSON's escapes.
        with (self.folder / "report.json").open("w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(report, file, indent=1, ensure_ascii=False)
            file.write("\n")
        return report

    def _divide(self, kind: str) -> dict[str, int]:
        """Rewrite the records of a kind, one file per split."""
        import pyarrow as pa

        source = self._writers[kind].path
        splits = self.assigner.splits_of(np.concatenate([facts["key"] for facts in self._facts[kind]]))
        writers = {split: ArrowWriter(self.folder / kind / f"{split}.arrow", schemas()[kind]) for split in SPLITS}
        begin = 0
        with pa.memory_map(str(source)) as mapped:
            for batch in pa.ipc.open_stream(mapped):
                mine = splits[begin : begin + batch.num_rows]
                begin += batch.num_rows
                for index, split in enumerate(SPLITS):
                    writers[split].write(batch, mine == index)
        for writer in writers.values():
            writer.close()
        source.unlink()
        return {split: writer.rows for split, writer in writers.items()}

    def _report(self, records: dict[str, dict[str, int]]) -> dict[str, Any]:
        counts = {name: sum(file.counts[name] for file in self.files) for name in ROW_COUNTS}
        agreement = self.agreement.report()
        facts = [part for parts in self._facts.values() for part in parts]
        return {
            "counts": counts,
            "records": records,
            **self.statistics.report(),
            "cleaning": dict(self.cleaner.counts) | {f"{name}_found": n for name, n in self.statistics.pii.items()},
            "splits": describe_splits(self.assigner, facts)
            | {
                "unknown_names": dict(sorted(self.unknown_splits.items())),
                "large_prefixes": self._warn_prefixes(facts),
            },
            "agreement": agreement,
            "rejects": self.reject_count,
            "files": [asdict(file) | {"records": dict(sorted(file.records.items()))} for file in self.files],
            "settings": settings_of(self.config),
            "versions": versions(),
        }

    def _warn_prefixes(self, facts: list[np.ndarray]) -> list[dict[str, Any]]:
        """Warn of prefixes that many prompts share, so that the splits become uneven."""
        if not facts:
            return []
        pairs = np.unique(np.concatenate([part[["key", "prompt"]] for part in facts]))
        keys, counts = np.unique(pairs["key"], return_counts=True)
        total = len(pairs)
        warned: list[dict[str, Any]] = []
        if total < _LEAST_PROMPTS:
            return warned
        large = np.flatnonzero(counts > _LARGE_PREFIX * total)
        for i in large:
            split = SPLITS[int(self.assigner.splits_of(keys[i : i + 1])[0])]
            self.notes.append(
                f"{counts[i]:,} of {total:,} prompts have one beginning and stay together in {split}: "
                "a larger prefix_characters separates them"
            )
            warned.append({"prompts": int(counts[i]), "of": total, "split": split})
        return warned


def settings_of(config: ImportConfig) -> dict[str, Any]:
    """The settings that affect the content; the output folder and the number of processes do not."""
    settings = asdict(config)
    for key, stated in settings_in(ImportConfig).items():
        if stated.changes == NOTHING:
            del settings[key]
    return json.loads(json.dumps(settings, default=str))

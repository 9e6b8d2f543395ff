"""The import loop: rows of all files -> checked records -> cleaning -> splits -> Arrow, with every row accounted for.

Memory holds hashes of the records, not the records: they are written as they come, without a split, and divided once all of
them were seen, since a user's prompts stay together. Folders and messages are in `commands/import_data.py`.
"""

import hashlib
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from rlhf.config.commands import ImportConfig
from rlhf.config.setting import NOTHING, settings_in
from rlhf.data.agreement import AgreementCounter
from rlhf.data.assignments import FILE, Assigner, Assignments, describe_splits, write_assignments
from rlhf.data.cleaning import DUPLICATE, FILTERED, KEPT, REJECTED, Cleaner, facts_of
from rlhf.data.formats import BadRow, Format, find_format
from rlhf.data.formats.table import make_table_format
from rlhf.data.import_report import ROW_COUNTS, Statistics, reject_line, versions
from rlhf.data.inputs import Reading, Reject, Row, Source, open_bytes, size_of
from rlhf.data.label_files import Converted, FileInfo, read, reject_row, row_bytes
from rlhf.data.records import KINDS, CycleError, RankedResponse, Ranking, Record, join_judgements, shown
from rlhf.data.splits import SPLITS, given_split
from rlhf.data.storage import ArrowWriter, json_text, schemas, to_row
from rlhf.errors import UserError
from rlhf.system.files import sha256_file

SHOWN_REJECTS = 20
_LARGE_PREFIX = 0.05  # of all prompts with one beginning: worth a word
_LEAST_PROMPTS = 100  # below which that says nothing
_RESULTS = {KEPT: "accepted", DUPLICATE: "duplicates", FILTERED: "filtered", REJECTED: "rejected"}


@dataclass(slots=True)
class FileReport:
    """What one file was taken for, and what came of it."""

    file: str
    format: str | None = None
    why: str = ""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROW_COUNTS, 0))
    records: Counter[str] = field(default_factory=Counter)  # kept, by kind
    sha256: str = ""


class _Judgement(NamedTuple):
    """A record that waits for the other judgements of its item."""

    at: int  # index of its row in the file
    row: Row
    record: Ranking
    own_id: bool


class _Kept:
    """What is remembered of the kept records of a kind, in their order."""

    def __init__(self) -> None:
        self.keys, self.prompts, self.users, self.given = array("Q"), array("Q"), array("Q"), array("b")


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
        self.first_rejects: list[str] = []
        self.damaged = False  # whether a file could not be read to its end
        self.notes: list[str] = []
        self.unknown_splits: Counter[str] = Counter()
        self._kept: dict[str, _Kept] = defaultdict(_Kept)  # by kind
        self._writers: dict[str, ArrowWriter] = {}
        self._rejects: TextIO | None = None

    # --- reading ---

    def run(self, sources: list[Source]) -> dict[str, Any]:
        """Import the sources; returns the report, which is written too.

        Raises: UserError if no source can be read at all; OSError if the folder cannot be written.
        """
        config = self.config
        table = config.format == "table"
        chosen = make_table_format(config.columns, config.words) if table else find_format(config.format, "format")
        failures: list[UserError] = []
        done = 0
        with (self.folder / "rejects.jsonl").open("w", encoding="utf-8") as self._rejects:
            for source in sources:
                try:
                    self._import_file(source, chosen, done)
                except UserError as error:
                    failures.append(error)
                    self._reject(Reject(source.name, 1, "file", f"file: {str(error).removeprefix(f'{source.name}: ')}"))
                    self.files[-1].counts |= {"input": 1, "rejected": 1}
                done += size_of(source)
                self.progress(done)
        if len(failures) == len(sources):
            raise failures[0]
        return self._finish()

    def _import_file(self, source: Source, chosen: Format | None, done: int) -> None:
        """Import one file. Raises: UserError if not even one row of it can be read."""
        report, info = FileReport(source.name), FileInfo(source.name)
        self.files.append(report)
        reading = Reading(self.config.encoding, self.config.sheet)
        digest = hashlib.sha256()  # of the rows of a data set from the hub
        results = bytearray()  # of each row
        held: list[_Judgement] = []
        replaced: set[tuple[str, str | None]] | None = None
        line = 0
        try:
            for row, records, rejects, own_id in read(source, chosen, info, reading, "format"):
                line = row.line
                if info.format == "native" and replaced is None:
                    replaced = _find_replaced(source.path) if source.path is not None else set()
                if source.path is None and isinstance(row, Row):
                    digest.update(row_bytes(row))
                if replaced and records and all((r.id, getattr(r, "labeler", None)) in replaced for r in records):
                    results.append(FILTERED)
                    continue
                results.append(
                    self._take_row(Converted(row, records, rejects, own_id), info, report, held, len(results))
                )
                if len(results) % 100 == 0:
                    self.progress(done + reading.position())
        except UserError as error:
            if not results:
                raise
            self.damaged = True
            self._reject(Reject(source.name, line + 1, "file", f"file: {str(error).removeprefix(f'{source.name}: ')}"))
            results.append(REJECTED)
        report.format, report.why = info.format, info.why
        self._join(held, results, report)
        report.counts["input"] = len(results)
        for result, name in _RESULTS.items():
            report.counts[name] = results.count(result)
        report.sha256 = digest.hexdigest() if source.path is None else sha256_file(source.path)

    def _take_row(self, row: Converted, info: FileInfo, report: FileReport, held: list[_Judgement], at: int) -> int:
        """Clean a row's records and write those that are kept; returns the row's result."""
        assert isinstance(row.row, Row) or not row.records
        joins = info.format in ("label_studio", "tasks_csv")
        result = REJECTED
        rejects = list(row.rejects)
        try:
            checked = [self._checked(record, info.format) for record in row.records]
        except (BadRow, ValueError) as error:
            assert isinstance(row.row, Row)
            bad = error if isinstance(error, BadRow) else BadRow("metadata", str(error))
            checked, rejects = [], [*rejects, reject_row(report.file, row.row, bad.field, bad.message)]
        for record, stored in checked:
            if joins and isinstance(record, Ranking) and isinstance(record.metadata.get("item"), str):
                assert isinstance(row.row, Row)
                held.append(_Judgement(at, row.row, record, row.own_id))
            else:
                result = min(result, self._take(record, stored, row.own_id, report))
        for reject in rejects:
            self._reject(reject)
        return result

    def _checked(self, record: Record, format: str | None) -> tuple[Record, dict[str, Any]]:
        """A record and its row in Arrow. An unknown split of a foreign file becomes `metadata.source_split`.

        Raises: BadRow for such a split in our own format; ValueError if the metadata is not JSON.
        """
        given = given_split(record)
        if given is not None and given not in SPLITS:
            if format == "native" or record.metadata.get("split") is None or "source_split" in record.metadata:
                raise BadRow("split", f"got {shown(given)}, want one of {', '.join(SPLITS)}, or null")
            self.unknown_splits[shown(given)] += 1
            metadata = {key: value for key, value in record.metadata.items() if key != "split"}
            record = record.model_copy(update={"metadata": metadata | {"source_split": given}})
        return record, to_row(record)

    def _take(self, record: Record, stored: dict[str, Any], own_id: bool, report: FileReport) -> int:
        """Clean a record, and write it if it is kept."""
        facts = facts_of(record, own_id, self.config.prefix_characters, self.config.seed)
        result = self.cleaner.judge(record.kind, facts)
        self.assigner.add(facts.key, facts.user, facts.group, facts.given, result == KEPT)
        if result != KEPT:
            return result
        if facts.pii and self.config.pii == "flag" and "pii" not in record.metadata:
            stored["metadata"] = json_text(record.metadata | {"pii": list(facts.pii)})
        if record.kind not in self._writers:
            path = self.folder / "unsplit" / f"{record.kind}.arrow"
            self._writers[record.kind] = ArrowWriter(path, schemas()[record.kind])
        self._writers[record.kind].add(stored, self.statistics.add(record, facts))
        report.records[record.kind] += 1
        if isinstance(record, Ranking):
            self.agreement.add(record)
        kept = self._kept[record.kind]
        kept.keys.append(facts.key)
        kept.prompts.append(facts.prompt)
        kept.users.append(facts.user)
        kept.given.append(-1 if facts.given is None else SPLITS.index(facts.given))
        return KEPT

    def _reject(self, reject: Reject) -> None:
        assert self._rejects is not None
        self._rejects.write(reject_line(reject))
        self.reject_count += 1
        if len(self.first_rejects) < SHOWN_REJECTS:
            self.first_rejects.append(str(reject))

    def _join(self, held: list[_Judgement], results: bytearray, report: FileReport) -> None:
        """Join the judgements of each item and labeler into one record; updates the result of their rows."""
        items: dict[tuple[str, str | None], list[_Judgement]] = {}
        for one in held:
            items.setdefault((one.record.metadata["item"], one.record.labeler), []).append(one)
        for (item, labeler), members in items.items():
            try:
                joined = join_rankings_of_item([one.record for one in members])
                result = self._take(joined, to_row(joined), members[0].own_id, report)
                for one in members:
                    results[one.at] = min(results[one.at], result)
            except BadRow as error:
                by = f" by {shown(labeler)[1:-1]}" if labeler is not None else ""
                message = error.message.removeprefix(f"{error.field}: ")
                said = f"{error.field}: the judgements of item {shown(item)[1:-1]}{by} {message}"
                for row in {one.at: one.row for one in members}.values():
                    self._reject(reject_row(report.file, row, error.field, said))

    # --- splitting and writing ---

    def _finish(self) -> dict[str, Any]:
        for writer in self._writers.values():
            writer.close()
        decided = self.assigner.decide()
        records = {kind: self._divide(kind) for kind in KINDS if kind in self._writers}
        if (self.folder / "unsplit").exists():
            (self.folder / "unsplit").rmdir()
        write_assignments(self.folder / FILE, decided)
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
        splits = np.array([self.assigner.splits[key] for key in self._kept[kind].keys], np.int8)
        writers = {split: ArrowWriter(self.folder / kind / f"{split}.arrow", schemas()[kind]) for split in SPLITS}
        begin = 0
        with pa.memory_map(str(source)) as mapped:
            for batch in pa.ipc.open_stream(mapped):
                mine = splits[begin : begin + batch.num_rows]
                begin += batch.num_rows
                for index, split in enumerate(SPLITS):
                    writers[split].write(batch.filter(pa.array(mine == index)))
        for writer in writers.values():
            writer.close()
        source.unlink()
        return {split: writer.rows for split, writer in writers.items()}

    def _report(self, records: dict[str, dict[str, int]]) -> dict[str, Any]:
        kept = [one for k in self._kept.values() for one in zip(k.keys, k.users, k.given, strict=True)]
        return {
            "counts": {name: sum(file.counts[name] for file in self.files) for name in ROW_COUNTS},
            "records": records,
            **self.statistics.report(),
            "cleaning": dict(self.cleaner.counts) | {f"{name}_found": n for name, n in self.statistics.pii.items()},
            "splits": describe_splits(self.assigner, kept)
            | {"unknown_names": dict(sorted(self.unknown_splits.items())), "large_prefixes": self._large_prefixes()},
            "agreement": self.agreement.report(),
            "rejects": self.reject_count,
            "files": [asdict(file) | {"records": dict(sorted(file.records.items()))} for file in self.files],
            "settings": settings_of(self.config),
            "versions": versions(),
        }

    def _large_prefixes(self) -> list[dict[str, Any]]:
        """Prefixes that many prompts share, so that the splits become uneven; a note on each."""
        pairs = {pair for kept in self._kept.values() for pair in zip(kept.keys, kept.prompts, strict=True)}
        if len(pairs) < _LEAST_PROMPTS:
            return []
        warned: list[dict[str, Any]] = []
        for key, count in sorted(Counter(key for key, _ in pairs).items()):
            if count > _LARGE_PREFIX * len(pairs):
                split = SPLITS[self.assigner.splits[key]]
                self.notes.append(
                    f"{count:,} of {len(pairs):,} prompts have one beginning and stay together in {split}: "
                    "a larger prefix_characters separates them"
                )
                warned.append({"prompts": count, "of": len(pairs), "split": split})
        return warned


def settings_of(config: ImportConfig) -> dict[str, Any]:
    """The settings that affect the content; the output folder does not."""
    settings = asdict(config)
    for key, stated in settings_in(ImportConfig).items():
        if stated.changes == NOTHING:
            del settings[key]
    return json.loads(json.dumps(settings, default=str))


def _find_replaced(path: Path) -> set[tuple[str, str | None]]:
    """The records, by id and labeler, that later lines of a native file replace; only lines with that key are parsed."""
    replaced: set[tuple[str, str | None]] = set()
    with suppress(UserError), open_bytes(path) as file:  # reading the rows reports how the file is damaged
        while line := file.readline(1 << 26):
            if b'"replaces"' not in line:
                continue
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                row = json.loads(line)
                old = {**row, **(row.get("metadata") or {})}.get("replaces")
                replaced |= {(old, row.get("labeler"))} if isinstance(old, str) else set()
    return replaced


# --- joining judgements ----------------------------------------------------------------------------------------------


def join_rankings_of_item(records: list[Ranking]) -> Ranking:
    """One labeler's judgements of one item, pairwise or of some responses, as one ranking; `pairs` if no weak order fits.

    Raises: BadRow if they contradict each other: in a circle, in the prompt, or in a response's text.
    """
    if len(records) == 1:
        return records[0]
    first = records[0]
    turns = [(m.role, m.content) for m in first.prompt]
    if any([(m.role, m.content) for m in record.prompt] != turns for record in records):
        raise BadRow("prompt", "come with two prompts, want one")
    responses: dict[str, RankedResponse] = {}
    for response in (response for record in records for response in record.responses):
        if responses.setdefault(response.id, response).text != response.text:
            raise BadRow("responses", f'give response "{shown(response.id)[1:-1]}" two texts: want one')
    names = list(responses)
    judgements = [triple for record in records for triple in _verdicts(record, names)]
    try:
        joined = join_judgements(len(names), judgements)
    except CycleError as error:
        circle = " over ".join(names[i] for i in error.cycle)
        raise BadRow("ranking", f"go in a circle, {circle}: drop one of them") from error
    shared = {
        key: value
        for key, value in first.metadata.items()
        if all(key in record.metadata and record.metadata[key] == value for record in records)
    }
    alone = [
        {"id": record.id, "responses": [response.id for response in record.responses]}
        | {key: value for key, value in record.metadata.items() if key not in shared}
        for record in records
    ]
    times = [record.seconds for record in records if record.seconds is not None]
    said = joined.named(names)
    return Ranking.model_validate(
        {
            "id": first.id,
            "prompt": first.prompt,
            "responses": list(responses.values()),
            "ranking": said["ranking"] if judgements else None,
            "pairs": said["pairs"],
            "ratings": {key: value for record in reversed(records) for key, value in record.ratings.items()},
            "flags": {key: value for record in reversed(records) for key, value in record.flags.items()},
            "labeler": first.labeler,
            "seconds": sum(times) if times else None,
            "created": max((record.created for record in records if record.created is not None), default=None),
            "metadata": shared | {"judgements": alone} | joined.named_ties(names),
        }
    )


def _verdicts(record: Ranking, names: list[str]) -> Iterator[tuple[int, int, int]]:
    ids = [names.index(response.id) for response in record.responses]
    if record.pairs is not None:
        yield from ((ids[better], ids[worse], 1) for better, worse in record.pair_list())
        return
    ranks = record.ranks()
    for i, j in combinations(range(len(ids)), 2):
        if ranks[i] >= 0 and ranks[j] >= 0:
            yield ids[i], ids[j], 0 if ranks[i] == ranks[j] else 1 if ranks[i] < ranks[j] else 2

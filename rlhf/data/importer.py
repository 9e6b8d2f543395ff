"""The import loop: rows of all files -> checked records -> cleaning -> splits -> files, with every row accounted for.

Only facts and hashes of the records stay in memory, and until the end of a file its judgements that are joined. The
records are written at once, without a split, and divided after the last one, since all prompts of a user get one split.
Folders and messages are in `commands/import_data.py`.
"""

import base64
import hashlib
import json
from collections import ChainMap, Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from rlhf.config.commands import ImportConfig
from rlhf.data.agreement import AgreementCounter
from rlhf.data.cleaning import DUPLICATE, FILTERED, KEPT, PII_KINDS, REJECTED, Cleaner, Facts, facts_of
from rlhf.data.formats.shapes import BadRow
from rlhf.data.formats.table import make_table_format
from rlhf.data.inputs import ROW_SUFFIXES, Source, has_suffix, open_bytes
from rlhf.data.reading import FORMATS, JOINED, Choose, convert_row, find_format, read
from rlhf.data.records import KINDS, Ranking, Record, check_of, join_judgements, name_of, replaced_by, sum_checks
from rlhf.data.rows import MAX_RECORD_BYTES, Row, read_rows
from rlhf.data.splits import SPLITS, Assigner, Assignments, given_split
from rlhf.data.storage import create, read_lines, to_line, write_assignments
from rlhf.system.files import sha256_file, write_json
from rlhf.system.schemas import first_problem, shown
from rlhf.system.terminal import one_line

SHOWN_REJECTS = 20
KEPT_BYTES = 1 << 20  # of a rejected row
_Name = tuple[str, str | None]  # of a record, or of an item: its id and the labeler
_Items = dict[_Name, list[tuple[int, Row, Ranking]]]  # the index of a row, the row, and its judgement
_RESULTS = {KEPT: "accepted", DUPLICATE: "duplicates", FILTERED: "filtered", REJECTED: "rejected"}
ROW_COUNTS = ("input", *_RESULTS.values())


class Importer:
    """One import into an empty folder, which the caller renames or deletes."""

    def __init__(self, config: ImportConfig, folder: Path, earlier: Assignments, progress: Callable[[int], None]):
        self.config, self.folder = config, folder
        self.progress = progress  # called with the number of bytes that were read
        self.cleaner = Cleaner(config)
        shares = {"train": 1.0 - config.dev - config.test, "dev": config.dev, "test": config.test}
        self.assigner = Assigner(config.seed, shares, earlier)
        self.kept: list[Facts] = []
        self.summary = Summary()
        self.agreement = AgreementCounter()
        self.checks: dict[str, dict[str, dict[str, float]]] = {}  # by labeler, see `sum_checks`
        self.careless: set[str] = set()  # labelers below min_gold_accuracy
        self.files: list[dict[str, Any]] = []  # per file: its format, why, and its counts
        self.reject_count = 0
        self.first_rejects: list[Row] = []
        self._unsplit, self._rejects = create(folder / "unsplit.jsonl"), create(folder / "rejects.jsonl")

    def run(self, sources: list[Source]) -> dict[str, Any]:
        """Import the sources; returns the report, which is written too. Raises: UserError if a source cannot be read;
        OSError if the folder cannot be written.
        """
        config = self.config
        table = config.format == "table"
        choose = make_table_format(config.columns, config.words) if table else find_format(config.format, "format")
        ahead = [_look_ahead(source) for source in sources]
        checks = [check for _, of_file in ahead for check in of_file]
        for labeler in sorted({check.labeler for check in checks if check.labeler is not None}):
            self.checks[labeler] = sums = sum_checks(check for check in checks if check.labeler == labeler)
            if "gold" in sums and sums["gold"]["right"] < config.min_gold_accuracy * sums["gold"]["pairs"]:
                self.careless.add(labeler)
        done = 0
        for source, (replaced, _) in zip(sources, ahead, strict=True):
            self._import_file(source, choose, done, replaced)
            done += source.size
            self.progress(done)
        self._unsplit.close()
        self._rejects.close()
        write_assignments(self.folder, self.assigner.decide())
        report = self._report(self._divide())
        write_json(self.folder / "report.json", report)
        return report

    def _import_file(self, source: Source, choose: Choose, done: int, replaced: set[_Name]) -> None:
        """Import one file; `replaced`: records that later ones replace. Raises: UserError if it cannot be read."""
        source.encoding, source.sheet = self.config.encoding, self.config.sheet
        digest = hashlib.sha256()  # of the rows of a data set from the hub
        results = bytearray()  # of each row
        items: _Items = {}
        for row in read(source, choose):
            records = row.records
            if source.path is None:
                digest.update(row.original())
            result = REJECTED
            if source.format == "native" and records and all(name_of(r) in replaced or check_of(r) for r in records):
                result, records = FILTERED, []
            careful = [r for r in records if getattr(r, "labeler", None) not in self.careless]
            if len(careful) < len(records):
                result, records = FILTERED, careful
                self.cleaner.counts["gold_accuracy"] += 1
            try:
                checked = [self._check(record, source.format) for record in records]
            except BadRow as error:
                checked, row = [], row._replace(field=error.field, problem=error.message)
            for record, stored in checked:
                item = record.metadata.get("item") if source.format == JOINED else None
                if isinstance(record, Ranking) and isinstance(item, str):
                    items.setdefault((item, record.labeler), []).append((len(results), row, record))
                else:
                    result = min(result, self._take(record, stored, row.own_id, source))
            if row.problem:
                self._reject(row)
            results.append(result)
            if len(results) % 100 == 0:
                self.progress(done + source.position())
        self._join(items, results, source)
        entry = {
            "file": source.name,
            "format": source.format,
            "why": source.why,
            "counts": {"input": len(results)} | {name: results.count(result) for result, name in _RESULTS.items()},
            "records": dict(sorted(source.records.items())),
            "sha256": digest.hexdigest() if source.path is None else sha256_file(source.path),
        }
        self.files.append(entry)

    def _check(self, record: Record, format: str | None) -> tuple[Record, str]:
        """A record and its line. An unknown split of a foreign file becomes `metadata.source_split`, unless the row has
        one.
        Raises: BadRow for such a split in our own format, and if the metadata is not JSON.
        """
        given = given_split(record)
        if given is not None and given not in SPLITS:
            if format == "native" or record.metadata.get("split") is None:
                raise BadRow("split", f"got {shown(given)}, want one of {', '.join(SPLITS)}, or null")
            metadata = {key: value for key, value in record.metadata.items() if key != "split"}
            record = record.model_copy(update={"metadata": {"source_split": given} | metadata})
        try:
            return record, to_line(record)
        except (ValueError, TypeError, RecursionError) as error:
            wanted = "want strings, numbers, lists, objects"
            raise BadRow("metadata", f"got a value that JSON has not ({error}), {wanted}") from error

    def _take(self, record: Record, line: str, own_id: bool, source: Source) -> int:
        """Clean a record, and write it if it is kept."""
        facts = facts_of(record, own_id, self.config.seed)
        result = self.cleaner.judge(facts)
        self.assigner.add(facts.key, facts.user, facts.group, facts.given, result == KEPT)
        if result != KEPT:
            return result
        if facts.pii and self.config.pii == "flag" and "pii" not in record.metadata:
            line = to_line(record.model_copy(update={"metadata": record.metadata | {"pii": list(facts.pii)}}))
        self._unsplit.write(line)
        self.kept.append(facts)
        self.summary.add(record)
        source.records[record.kind] += 1
        if isinstance(record, Ranking):
            self.agreement.add(record)
        return KEPT

    def _reject(self, row: Row) -> None:
        """Write the place, what is wrong, and the row, cut to KEPT_BYTES."""
        entry: dict[str, Any] = {name: getattr(row, name) for name in ("file", "line", "number", "field")}
        entry["message"], raw = row.problem, row.original()
        cut = {"bytes": len(raw)} if len(raw) > KEPT_BYTES else {}
        try:
            entry["original"] = raw[:KEPT_BYTES].decode("utf-8", "ignore" if cut else "strict")
        except UnicodeDecodeError:
            entry["base64"] = base64.b64encode(raw[:KEPT_BYTES]).decode("ascii")
        # lone surrogates, which UTF-8 cannot hold, are written as JSON's escapes
        line = json.dumps(entry | cut, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
        self._rejects.write(line + "\n")
        self.reject_count += 1
        if len(self.first_rejects) < SHOWN_REJECTS:
            self.first_rejects.append(row)

    def _join(self, items: _Items, results: bytearray, source: Source) -> None:
        """Join the judgements of each item and labeler into one record; updates the result of their rows."""
        for (item, labeler), members in items.items():
            try:
                joined = join_rankings_of_item([record for *_, record in members])
                result = self._take(joined, to_line(joined), members[0][1].own_id, source)
                for at, *_ in members:
                    results[at] = min(results[at], result)
            except BadRow as error:
                by = f" by {one_line(labeler, 60)}" if labeler is not None else ""
                message = error.message.removeprefix(f"{error.field}: ")
                said = f"{error.field}: the judgements of item {one_line(item, 60)}{by}: {message}"
                for row in {at: row for at, row, *_ in members}.values():
                    self._reject(row._replace(field=error.field, problem=said))

    def _divide(self) -> dict[str, dict[str, int]]:
        """Move the records to one file per kind and split; returns the number in each."""
        unsplit = self.folder / "unsplit.jsonl"
        places = [(one.kind, self.assigner.splits[one.key]) for one in self.kept]
        counts = Counter(places)
        files = {(kind, split): create(self.folder / kind / f"{split}.jsonl") for kind, split in counts}
        for place, line in zip(places, read_lines(unsplit), strict=True):
            files[place].write(line)
        for file in files.values():
            file.close()
        unsplit.unlink()
        kinds = [kind for kind in KINDS if any(kind == one for one, _ in counts)]
        return {kind: {split: counts[kind, split] for split in SPLITS} for kind in kinds}

    def _report(self, records: dict[str, dict[str, int]]) -> dict[str, Any]:
        prompts = Counter(self.assigner.splits.values())
        by_split, users = {split: prompts[split] for split in SPLITS}, {one.user for one in self.kept} - {0}
        found = {f"{name}_found": sum(name in one.pii for one in self.kept) for name in PII_KINDS}
        settings = asdict(self.config)
        del settings["out"], settings["overwrite"]  # the folder does not affect the content
        return {
            "counts": {name: sum(file["counts"][name] for file in self.files) for name in ROW_COUNTS},
            "records": records,
            **self.summary.report(),
            "cleaning": self.cleaner.counts | found,
            "splits": {"prompts": by_split, "users": len(users)},
            "agreement": self.agreement.report(),
            "checks": self.checks,
            "rejects": self.reject_count,
            "files": self.files,
            "settings": settings,
        }


def _look_ahead(source: Source) -> tuple[set[_Name], list[Ranking]]:
    """What of a native file must be known before its first line: the records that later lines replace, and the checks
    of labelers that count.
    """
    if source.path is None or not has_suffix(source.path, ROW_SUFFIXES):
        return set(), []
    with open_bytes(source.path) as file:
        lines = iter(lambda: file.readline(MAX_RECORD_BYTES), b"")
        if not any(b'"replaces"' in line or b'"labeler_check"' in line for line in lines):
            return set(), []
    made = (one for row in read_rows(source) for one in convert_row(row, FORMATS["native"], "").records)
    records = [one for one in made if one.metadata.keys() & {"replaces", "labeler_check"}]
    replaced, checks = replaced_by(records), [one for one in records if isinstance(one, Ranking) and check_of(one)]
    return replaced, [check for check in checks if name_of(check) not in replaced]


def join_rankings_of_item(records: list[Ranking]) -> Ranking:
    """One labeler's judgements of one item, pairwise or of some responses, as one ranking; `pairs` if no weak order
    fits. Raises: BadRow if they contradict each other: in a circle, in the prompt, or in a response's text.
    """
    if len(records) == 1:
        return records[0]
    first = records[0]
    if any(record.prompt != first.prompt for record in records):
        raise BadRow("prompt", "got two prompts, want one")
    responses: dict[str, Any] = {}
    for response in (response for record in records for response in record.responses):
        if responses.setdefault(response.id, response).text != response.text:
            raise BadRow("responses", f'response "{one_line(response.id, 60)}" has two texts, want one')
    judged = [one for record in records for one in record.verdicts()]
    better, equal = ([(a, b) for a, b, verdict in judged if verdict == wanted] for wanted in (1, 0))
    said, ties = join_judgements(list(responses), better, equal)
    others = [record.metadata for record in records[1:]]
    shared = {k: v for k, v in first.metadata.items() if all(k in other and other[k] == v for other in others)}
    alone = [
        {"id": one.id, "responses": [response.id for response in one.responses]}
        | {k: v for k, v in one.metadata.items() if k not in shared}
        for one in records
    ]
    times = [record.seconds for record in records if record.seconds is not None]
    update = {
        "responses": [response.model_dump() for response in responses.values()],
        "ratings": dict(ChainMap(*(record.ratings for record in records))),
        "flags": dict(ChainMap(*(record.flags for record in records))),
        "seconds": sum(times) if times else None,
        "created": max((record.created for record in records if record.created is not None), default=None),
        "metadata": shared | {"judgements": alone} | ties,
    }
    try:
        return Ranking.model_validate(first.model_dump() | update | (said if judged else {}))
    except ValidationError as error:
        raise BadRow(*first_problem(error)) from error


class Summary:
    """The figures of records: ties, ordered pairs, K, labelers and lengths."""

    def __init__(self) -> None:
        self.counts = Counter(dict.fromkeys(("ties", "pairs", "unpaired"), 0))
        self.sizes, self.labelers = Counter[int](), Counter[str]()
        self.words = {"prompt_words": list[int](), "response_words": list[int]()}

    def add(self, record: Record) -> None:
        texts = [record.response] if record.kind == "demonstration" else []
        if record.kind == "ranking":
            texts = [response.text for response in record.responses]
            said = Counter(verdict for *_, verdict in record.verdicts())
            self.counts.update(ties=said[0], pairs=said[1], unpaired=int(not said[1]))
            self.sizes[len(texts)] += 1
        if record.kind != "prompt" and record.labeler is not None:
            self.labelers[record.labeler] += 1
        self.words["prompt_words"].append(sum(len(message.content.split()) for message in record.prompt))
        self.words["response_words"] += [len(text.split()) for text in texts]

    def report(self) -> dict[str, Any]:
        lengths = {}
        for name, words in self.words.items():
            if words:  # each quantile is one of the lengths
                found = np.quantile(words, (0.5, 0.95, 1), method="inverted_cdf").astype(int).tolist()
                lengths[name] = dict(zip(("median", "p95", "max"), found, strict=True))
        sizes = {str(size): count for size, count in sorted(self.sizes.items())}
        labelers = dict(sorted(self.labelers.items()))
        return self.counts | {"responses_a_ranking": sizes, "labelers": labelers, "lengths": lengths}

"""Converts rows to checked records in Arrow, a batch at a time: the part of an import that several processes can share.

This module handles each row alone. Duplicates, splits and files are in `importer.py`.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from rlhf.data.agreement.judgements import Judgement, judgement_of
from rlhf.data.agreement.packing import item_of
from rlhf.data.importers import BadRow, Format, convert_row, formats, make_records, row_bytes
from rlhf.data.importing.cleaning import FACT, KIND_NUMBERS, PII_KINDS, fact_of
from rlhf.data.importing.sizes import batch_sizes
from rlhf.data.importing.units import Unit, rows_of
from rlhf.data.reading.json_rows import Block, parse_block
from rlhf.data.reading.readers import Reject, Row
from rlhf.data.records import Ranking, Record, first_problem, shown
from rlhf.data.revisions import Replaced, identity
from rlhf.data.splits import SPLITS, given_split
from rlhf.data.storage import json_text, to_batch, to_row

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the conversion of one file's rows depends on."""

    name: str  # of the file, for messages
    stem: str  # for the ids of records that have none
    format: Format | None = None  # None: no row could be read
    pii: str = "flag"
    prefix_characters: int = 200
    seed: int = 0
    replaced: Replaced = frozenset()  # records that later ones of the file replace


class Held(NamedTuple):
    """A record that waits for the other judgements of its item."""

    at: int  # index of its row in the batch
    row: Row  # with its bytes, without its value
    record: Ranking
    own_id: bool


@dataclass(slots=True)
class Batch:
    """The result of some rows."""

    rows: int = 0
    rejects: list[tuple[int, Reject]] = field(default_factory=list)  # index of the row
    replaced: list[int] = field(default_factory=list)  # rows that were replaced
    tables: "dict[str, pa.RecordBatch]" = field(default_factory=dict)  # by kind
    facts: np.ndarray = field(default_factory=lambda: np.zeros(0, FACT))  # of all records, in their order
    sizes: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # by kind: see `batch_sizes`
    judgements: list[Judgement | None] = field(default_factory=list)  # of rankings, in their order
    held: list[Held] = field(default_factory=list)
    unknown_splits: Counter[str] = field(default_factory=Counter)


_AT_ONCE = 64  # rows


class BatchMaker:
    """Collects records, and makes the batch of them.

    _AT_ONCE rows are read, and as many records are converted, one property of all before the next: the records, and the
    code that computes a property, then stay in the processor's caches.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.batch = Batch()
        self._records: list[Record] = []
        self._lines: list[dict[str, Any]] = []
        self._own_ids: list[bool] = []
        self._rows: list[int] = []  # of all records
        self._facts: list[np.ndarray] = []
        self._tables: dict[str, list[pa.RecordBatch]] = {}

    def add(self, record: Record, line: dict[str, Any], row: int, own_id: bool) -> None:
        """Add a record, given as `line` in Arrow, of the row with that index."""
        self._records.append(record)
        self._lines.append(line)
        self._own_ids.append(own_id)
        self._rows.append(row)
        if len(self._records) == _AT_ONCE:
            self._convert()

    def finish(self) -> Batch:
        import pyarrow as pa

        self._convert()
        batch = self.batch
        batch.facts = np.concatenate(self._facts)
        batch.facts["row"] = self._rows
        batch.tables = {kind: pa.concat_batches(self._tables[kind]) for kind in KIND_NUMBERS if kind in self._tables}
        batch.sizes = {kind: batch_sizes(kind, table) for kind, table in batch.tables.items()}
        return batch

    def _convert(self) -> None:
        """Convert the records that were added since the last time."""
        plan, records = self.plan, self._records
        items = [item_of(record) if isinstance(record, Ranking) else None for record in records]
        facts = [
            fact_of(record, item, own_id, plan.prefix_characters, plan.seed)
            for record, item, own_id in zip(records, items, self._own_ids, strict=True)
        ]
        self._facts.append(np.array(facts, FACT))
        self.batch.judgements += [
            judgement_of(record, item)
            for record, item in zip(records, items, strict=True)
            if isinstance(record, Ranking) and item is not None
        ]
        if plan.pii == "flag":
            self._flag_pii(self._facts[-1]["pii"])
        for kind in {record.kind for record in records}:
            lines = [line for line in self._lines if line["kind"] == kind]
            self._tables.setdefault(kind, []).append(to_batch(kind, lines))
        for each in (self._records, self._lines, self._own_ids):
            each.clear()

    def _flag_pii(self, pii: np.ndarray) -> None:
        for i in np.flatnonzero(pii).tolist():
            metadata = self._records[i].metadata
            if "pii" not in metadata:
                kinds = [name for bit, name in enumerate(PII_KINDS) if pii[i] >> bit & 1]
                self._lines[i]["metadata"] = json_text(metadata | {"pii": kinds})


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause Python's cyclic garbage collector: a batch's objects form no cycles, and it would walk them again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_without_collector()
def process(plan: Plan, unit: Unit) -> Batch:
    """The batch of some rows of a file; the same whichever process makes it."""
    maker = BatchMaker(plan)
    batch = maker.batch
    read = plan.format.read if plan.format and not plan.replaced else None
    for index, item in enumerate(_read_ahead(rows_of(unit, plan.name, read))):
        batch.rows += 1
        if isinstance(item, Row) and item.record is not None:
            try:
                record = _check_split(item.record, maker.plan.format, batch)
                _add_record(maker, record, to_row(record), True, item, index)
                continue
            except (BadRow, ValueError):  # parse the line, which finds what is wrong with it
                [item] = parse_block(Block(item.line, item.offset or 0, item.raw or b""), plan.name)
        if isinstance(item, Reject):
            batch.rejects.append((index, item))
            continue
        try:
            _add_row(maker, item, index)
        except BadRow as error:
            batch.rejects.append((index, reject_row(plan.name, item, error.field, error.message)))
        except ValidationError as error:
            batch.rejects.append((index, reject_row(plan.name, item, *first_problem(error))))
        except RecursionError:
            batch.rejects.append((index, reject_row(plan.name, item, "", "nested too deeply")))
    return maker.finish()


def _read_ahead(rows: Iterable[Row | Reject]) -> Iterator[Row | Reject]:
    """The rows, read _AT_ONCE at a time."""
    following = iter(rows)
    while some := list(islice(following, _AT_ONCE)):
        yield from some


def _add_row(maker: BatchMaker, row: Row, index: int) -> None:
    """Convert a row. Raises: BadRow, ValidationError if it gives no record."""
    plan, batch, chosen = maker.plan, maker.batch, maker.plan.format
    assert chosen is not None
    values, parts = convert_row(row, chosen)
    if not values and not parts:
        raise BadRow("", f"got a row that gives no record, want {chosen.wants}")
    made = make_records(values, plan.stem, row.number)
    if plan.replaced and made and all(identity(record) in plan.replaced for record in made):
        batch.replaced.append(index)
        return
    try:
        _add_records(maker, made, [fields.get("id") is not None for fields in values], row, index)
    except ValueError as error:
        raise BadRow("metadata", str(error)) from error
    for part in parts:
        batch.rejects.append((index, reject_row(plan.name, row, part.field, part.message)))


def _add_records(maker: BatchMaker, made: list[Record], own_ids: list[bool], row: Row, index: int) -> None:
    """Add all records of a row. Raises: ValueError, with nothing added."""
    checked = [_check_split(record, maker.plan.format, maker.batch) for record in made]
    lines = [to_row(record) for record in checked]
    for record, line, own_id in zip(checked, lines, own_ids, strict=True):
        _add_record(maker, record, line, own_id, row, index)


def _add_record(maker: BatchMaker, record: Record, line: dict[str, Any], own_id: bool, row: Row, index: int) -> None:
    chosen = maker.plan.format
    if chosen and chosen.joins and isinstance(record, Ranking) and isinstance(record.metadata.get("item"), str):
        place = Row(row.line, {}, row.number, row.offset, row_bytes(row))
        maker.batch.held.append(Held(index, place, record, own_id))
    else:
        maker.add(record, line, index, own_id)


def _check_split(record: Record, chosen: Format | None, batch: Batch) -> Record:
    """An unknown split name of a foreign file is kept as `metadata.source_split`; in our own format it is an error.

    Raises: BadRow.
    """
    given = given_split(record)
    if given is None or given in SPLITS:
        return record
    assert chosen is not None
    if chosen.name == "native" or record.metadata.get("split") is None or "source_split" in record.metadata:
        raise BadRow("split", f"got {shown(given)}, want one of {', '.join(SPLITS)}, or null")
    batch.unknown_splits[shown(given)] += 1
    metadata = {key: value for key, value in record.metadata.items() if key != "split"}
    return record.model_copy(update={"metadata": metadata | {"source_split": given}})


def reject_row(name: str, row: Row, field: str, message: str) -> Reject:
    return Reject(name, row.line, field, message, row.number, row.offset, row_bytes(row))


@cache
def warm_up() -> None:
    """Import what every batch needs; called once in a new process."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    formats()

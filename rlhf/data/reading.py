"""Files as records: the rows of a source, its format, and one validated record after another.

A row is an object under its keys or its header's names. A bad line of a line-based file is a reject, and reading goes on;
a damaged array or table ends with a UserError that names the place.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from rlhf.data.formats import BadRow, Format, choose_format, find_format
from rlhf.data.formats.shapes import is_text
from rlhf.data.inputs import (
    RECORD_SUFFIXES,
    ROW_SUFFIXES,
    Row,
    Source,
    has_suffix,
    holds_lines,
    open_bytes,
    printable_path,
    read_lines,
    read_values,
    resolve_sources,
)
from rlhf.data.records import (
    KINDS,
    Demonstration,
    PromptRecord,
    Ranking,
    Record,
    RecordType,
    check_of,
    without_replaced,
)
from rlhf.data.splits import given_split, prompt_key
from rlhf.data.storage import read_records, verify
from rlhf.data.tables import read_columns, read_delimited, read_sheet
from rlhf.errors import UserError, hub_remedy
from rlhf.system.files import read_json
from rlhf.system.schemas import first_problem, shown
from rlhf.system.terminal import one_line

HEAD_ROWS = 1000  # rows at the beginning of a file that are looked at together


def read_rows(source: Source) -> Iterator[Row]:
    """The rows of a file or a hub data set. Raises: UserError if the source as a whole cannot be read."""
    path, name = source.path, source.name
    if path is None:
        yield from _read_hub(name)
        return
    suffix = ([s.lower() for s in path.suffixes if s.lower() not in (".gz", ".zst")] or [path.name.lower()])[-1]
    if has_suffix(path, ROW_SUFFIXES):
        with open_bytes(path, source) as file:
            if file.peek(3)[:3] == codecs.BOM_UTF8:  # type: ignore[attr-defined]
                file.read(3)
            as_lines = suffix == ".jsonl" or holds_lines(path)
            yield from read_lines(file, name) if as_lines else read_values(file, name)
    elif suffix in (".csv", ".tsv"):
        yield from read_delimited(path, suffix, source)
    elif suffix == ".parquet":
        yield from read_columns(path, name)
    else:
        yield from read_sheet(path, source)


def _read_hub(name: str) -> Iterator[Row]:
    """The rows of a data set of the hub, of its train split if it has one; without a network from the cache.

    Raises: UserError if there is no such data set.
    """
    import datasets

    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # no network, no such name, gated, scripts
        reason = one_line(str(error) or type(error).__name__, 200)
        otherwise = "check the path or the name and the network, or download it and give the file"
        came = "no such file or folder; taken for a hub id, but the hub gave no data set of that name"
        raise UserError(f"{name}: {came} ({reason}): {hub_remedy(error, f'datasets/{name}', otherwise)}") from error
    for number, row in enumerate(splits["train"] if "train" in splits else next(iter(splits.values())), start=1):
        yield Row(name, number, number, dict(row))


class Converted(NamedTuple):
    """What became of one row, a reject if it has a problem."""

    row: Row
    records: list[Record]
    own_id: bool = False  # whether the file gives the records' ids


def read(source: Source, format: Format | None, setting: str = "data.format") -> Iterator[Converted]:
    """Every row of a source with its records; if `format` is None it is recognised. `source` gets the format and why.

    Raises: UserError if the source as a whole cannot be read, has no row that can be, or is of no known format.
    """
    rows = read_rows(source)
    head = list(islice(rows, HEAD_ROWS))
    values = [row.value for row in head if not row.problem]
    if not values:
        raise UserError(str(head[0]) if head else f"{source.name}: the file is empty: want rows of a known format")
    chosen = format or choose_format(source.name, values, setting)
    source.why = "asked for" if format else chosen.wants
    source.format, source.joins = chosen.name, chosen.joins
    if chosen.prepare is not None:
        chosen = chosen.prepare(source.name, values)
        source.why = "; ".join(filter(None, [source.why, source.note, chosen.note]))
    every: Iterable[Row] = chain(head, rows)
    stem = printable_path(source.path.name) if source.path else source.name
    for row in every if chosen.gather is None else chosen.gather(every):
        yield Converted(row, []) if row.problem else convert_row(row, chosen, stem)


def convert_row(row: Row, chosen: Format, stem: str) -> Converted:
    """The validated records of one row. A record without an id gets the row's, else `<file>:<number>`; of several with `.<i>`.

    An id of the row that is a number means nothing outside its file, so it stays in the metadata.
    """
    try:
        values = list(chosen.convert(row.value))
        if not values:
            raise BadRow("", f"got a row that gives no record, want {chosen.wants}")
        given = row.value["id"] if isinstance(row.value.get("id"), str) else ""
        records: list[Record] = []
        for i, fields in enumerate(values):
            kind = fields.get("kind")
            if not isinstance(kind, str) or kind not in KINDS:
                raise BadRow("kind", f"got {shown(kind)}, want {', '.join(KINDS)}")
            if fields.get("id") is None:
                own = given or f"{stem}:{row.number}"
                fields = fields | {"id": own + (f".{i}" if len(values) > 1 else "")}
                if given and isinstance(metadata := fields.get("metadata"), dict):
                    fields["metadata"] = {key: value for key, value in metadata.items() if key != "id"}
            records.append(KINDS[kind].model_validate(fields))
        return Converted(row, records, bool(given) or all(fields.get("id") is not None for fields in values))
    except BadRow as error:
        field, problem = error.field, error.message
    except ValidationError as error:
        field, problem = first_problem(error)
    except KeyError as error:
        field = one_line(str(error.args[0]), 200)
        problem = f"{field}: missing"
    except Exception as error:  # an unexpected shape must not stop the other rows
        came = one_line(f"{type(error).__name__}: {error}", 60)
        field, problem = "", f"got a shape that {chosen.name} cannot read ({came}), want {chosen.wants}"
    return Converted(row._replace(field=field, problem=problem), [])


def load_all(sources: Any, format: str = "auto", allow_partial: bool = False) -> tuple[list[Record], list[Source]]:
    """All records of the sources, of every kind, and what each file was; of finished imports with the split that was written there.

    Raises: UserError if a source cannot be read, if any row is bad (the message has the first five and their number), or if
    an import had too many rejects, unless `allow_partial`.
    """
    files = resolve_sources(sources, RECORD_SUFFIXES, imports=True)
    records: list[Record] = []
    rejects: list[Row] = []
    for source in files:
        if source.imported:
            assert source.path is not None
            verify(source.path, allow_partial)
            source.format, source.why = "import", "written by rlhf import"
            made = list(read_records(source.path))
            source.rows = len(made)
        else:
            rows = list(read(source, find_format(format, "data.format")))
            source.rows = len(rows)
            rejects += [one.row for one in rows if one.row.problem]
            counting = without_replaced(record for one in rows for record in one.records)
            made = [record for record in counting if check_of(record) is None]
            if source.joins:
                came = f"is of the format {source.format}, whose rows belong together"
                raise UserError(f"{source.name}: {came}: give it to `rlhf import` first")
        source.records.update(record.kind for record in made)
        records += [record.read_from(source.name) for record in made]
    if rejects:
        first = "; ".join([*map(str, rejects[:5]), *(["…"] if len(rejects) > 5 else [])])
        count = sum(file.rows for file in files)
        raise UserError(f"{len(rejects)} of {count} rows cannot be used: correct or remove them: {first}")
    return records, files


def prompts_of(records: Iterable[Record]) -> list[PromptRecord]:
    """The prompts of records of any kind, in order, each once; the first record with a prompt names it.

    The split and group of a demonstration or ranking are kept, since they determine the prompt's split; a demonstration's response
    is `reference` in the metadata, for reward functions that compare with it.
    """
    prompt_of: dict[str, PromptRecord] = {}
    for record in records:
        key = prompt_key(record.prompt)
        if key in prompt_of:
            continue
        if not isinstance(record, PromptRecord):
            kept = {"group": record.metadata.get("group"), "split": given_split(record)}
            kept["reference"] = record.response if isinstance(record, Demonstration) else None
            metadata = {name: value for name, value in kept.items() if value is not None}
            record = PromptRecord(id=record.id, prompt=record.prompt, metadata=metadata).read_from(record.file)
        prompt_of[key] = record
    return list(prompt_of.values())


def load_kind(
    wanted: type[RecordType], sources: Any, format: str = "auto", allow_partial: bool = False
) -> tuple[list[RecordType], list[Source]]:
    """The records of one kind in order, or the distinct prompts of records of any kind; and what each file was.

    Raises: UserError as `load_all`, and if there is none.
    """
    records, files = load_all(sources, format, allow_partial)
    chosen: list[Any] = prompts_of(records) if wanted is PromptRecord else [r for r in records if isinstance(r, wanted)]
    if not chosen:
        read = "; ".join(map(str, files))
        raise UserError(f"no {wanted.model_fields['kind'].default} record in the data: want at least one. Read: {read}")
    return chosen, files


load_comparisons = partial(load_kind, Ranking)  # those without an ordered pair (one response, all ties) included
load_demonstrations = partial(load_kind, Demonstration)
load_prompts = partial(load_kind, PromptRecord)


RULE = re.compile(r"[a-z0-9_]{1,40}")  # a rule's name


def load_rules(setting: str, path: str | None) -> dict[str, str]:
    """The rules of a file by name; none without one. Raises: UserError for another file than {"name": "what a response must keep", …}."""
    if path is None:
        return {}
    rules = read_json(Path(path))
    if not rules or not all(RULE.fullmatch(name) and is_text(text) for name, text in rules.items()):
        wanted = 'want JSON, {"name": "what a response must keep"}, with names of a-z, 0-9 and _'
        raise UserError(f"{setting}={path}: {wanted}")
    return rules

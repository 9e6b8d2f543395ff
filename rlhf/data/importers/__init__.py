"""Foreign formats as records: the registry, recognition (`format=auto`), and the loop that validates.

A format is one file in this folder with a `FORMAT`. It converts one row into records as plain dicts, without
reading files or validating. If it cannot convert a row, it raises `BadRow`; the row becomes a reject, and the
import continues.
"""

import difflib
import importlib
import json
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from typing import Any, TypeVar

from pydantic import ValidationError

from rlhf.data.reading.readers import Reject, Row
from rlhf.data.reading.rows import read_rows
from rlhf.data.reading.sources import RECORD_SUFFIXES, Source, printable_path, resolve_sources
from rlhf.data.records import KINDS, Demonstration, PromptRecord, Ranking, Record, first_problem, one_line, shown
from rlhf.data.revisions import without_replaced
from rlhf.errors import UserError

LOOK_AHEAD = 20  # rows used for recognition
_SHOWN_PROBLEMS = 5
_KEYS = 12  # of a row, in a message
_NEAREST = 3  # formats, in a message


class BadRow(Exception):
    """A row that a format cannot convert: the field, and a message `got …, want …`."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = one_line(field, 200)
        self.message = one_line(f"{field}: {message}" if field else message)


@dataclass(frozen=True, slots=True)
class Format:
    """One foreign format."""

    name: str
    wants: str  # the shape of a row as a short text, for messages
    recognise: Callable[[Mapping[str, Any]], str | None]  # why a row is of this format; None if it is not
    # records, each with its `kind`; a BadRow for each part of the row that cannot be converted
    convert: Callable[[Mapping[str, Any]], Iterable[dict[str, Any] | BadRow]]
    joins: bool = False  # pairwise judgements over one item's responses become one ranking per labeler
    # Rows of a whole file that belong together, as the rows that are converted; with the file's name, for messages.
    gather: Callable[[Iterable[Row | Reject], str], Iterator[Row | Reject]] | None = None
    # The format for one file, after a look at its name and first rows, if the columns' values matter.
    prepare: Callable[[str, Sequence[Mapping[str, Any]]], "Format"] | None = None
    read: Callable[[bytes], Record | None] | None = None  # a line's record directly; None: parse and convert the line


@cache
def formats() -> dict[str, Format]:
    """Every format of this folder by name."""
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    return {module.FORMAT.name: module.FORMAT for module in modules}


def require_text(row: Mapping[str, Any], key: str) -> str:
    """A row's string under `key`.

    Raises: BadRow if it is missing or no string.
    """
    if key not in row:
        raise BadRow(key, "missing")
    if not isinstance(row[key], str):
        raise BadRow(key, f"got {shown(row[key])}, want a string")
    return row[key]


def other_keys(row: Mapping[str, Any], *used: str) -> dict[str, Any]:
    """The keys that a format does not use, for `metadata`, so that nothing is dropped."""
    return {key: value for key, value in row.items() if key not in used}


@dataclass(slots=True)
class FileInfo:
    """The recognised format of one file, and the number of its records."""

    name: str
    format: str
    why: str  # how the format was recognised; "asked for" if the user named it
    rows: int = 0
    records: Counter[str] = field(default_factory=Counter)  # by kind


@dataclass(slots=True)
class SourceInfo:
    """What was read: one entry per file."""

    files: list[FileInfo] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def describe(self) -> list[str]:
        """One line per file: name, format and why, rows, records by kind."""
        return [
            f"{f.name}: {f.format} ({f.why}), {f.rows} rows: "
            + (", ".join(f"{count} {kind} records" for kind, count in sorted(f.records.items())) or "no record")
            for f in self.files
        ]


def _nearest(row: Mapping[str, Any]) -> str:
    """The formats whose keys are most similar to those of a row, with their keys; empty if none is similar."""

    def likeness(one: Format) -> float:
        named = set(re.findall(r"\w+", one.wants.lower()))
        keys = [str(key).lower() for key in list(row)[:_KEYS]]
        return sum(1.0 if key in named else 0.5 * bool(difflib.get_close_matches(key, named, 1, 0.75)) for key in keys)

    ranked = sorted(((likeness(one), one) for one in formats().values()), key=lambda pair: (-pair[0], pair[1].name))
    return "; ".join(f"{one.name}: {one.wants}" for score, one in ranked[:_NEAREST] if score > 0)


_OTHERWISE = "name the columns: `rlhf import format=table columns.prompt=…` (docs/importing.md lists all formats)"


def _reason(format: Format, row: Mapping[str, Any]) -> str | None:
    try:
        return format.recognise(row)
    except Exception:  # a foreign row can contain values of any type: this one is not of this format
        return None


def _recognise(name: str, rows: list[Row], setting: str) -> tuple[Format, str]:
    ambiguous = ""
    for row in rows:
        matches = [(f, why) for f in formats().values() if (why := _reason(f, row.value)) is not None]
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = " and ".join(f.name for f, _ in matches)
            ambiguous = ambiguous or f"{name}:{row.line}: could be {names}: set {setting} to one of them"
    if ambiguous:
        raise UserError(ambiguous)
    keys = ", ".join(shown(str(key))[1:-1] for key in list(rows[0].value)[:_KEYS])
    nearest = _nearest(rows[0].value)
    near = f"The nearest formats are {nearest}. " if nearest else ""
    raise UserError(f"{name}: no format recognised: rows have the keys {keys}. {near}Rename the keys, or {_OTHERWISE}")


def choose_format(name: str, rows: list[Row], asked: str, setting: str = "data.format") -> tuple[Format, str]:
    """A file's format and why: the one asked for, if one of the first rows has its shape, or the recognised one.

    `name` is the file's, `setting` what the user sets a format with; both for messages.

    Raises: UserError if no format, or more than one, fits.
    """
    if asked == "auto":
        return _recognise(name, rows[:LOOK_AHEAD], setting)
    if asked not in formats():
        raise UserError(f"{setting}={asked}: no such format: want auto, {', '.join(sorted(formats()))}")
    wanted = formats()[asked]
    if any(_reason(wanted, row.value) is not None for row in rows[:LOOK_AHEAD]):
        return wanted, "asked for"
    try:
        other, why = _recognise(name, rows[:LOOK_AHEAD], setting)
        instead = f"it looks like {other.name} ({why}): set {setting}={other.name} or auto"
    except UserError:
        instead = f"it has the keys {', '.join(map(str, list(rows[0].value)[:_KEYS]))}" if rows else "it has no row"
    raise UserError(f"{name}: not of {setting}={asked}, which wants {wanted.wants}: {instead}")


def convert_row(row: Row, chosen: Format) -> tuple[list[dict[str, Any]], list[BadRow]]:
    """A row's records before validation, and separately the BadRow of each part that cannot be converted.

    Raises: BadRow, also for a shape that the format does not expect.
    """
    values: list[dict[str, Any]] = []
    parts: list[BadRow] = []
    try:
        for one in chosen.convert(row.value):
            if isinstance(one, BadRow):
                parts.append(one)
            else:
                values.append(one)
    except BadRow:
        raise
    except RecursionError as error:
        raise BadRow("", "nested too deeply") from error
    except Exception as error:  # an unexpected shape must not stop the other rows
        came = shown(f"{type(error).__name__}: {error}")[1:-1]
        raise BadRow("", f"got a shape that {chosen.name} cannot read ({came}), want {chosen.wants}") from error
    return values, parts


def make_records(values: list[dict[str, Any]], stem: str, number: int) -> list[Record]:
    """Validated records of one row; one without an id is named `<file>:<number>`, of several `<file>:<number>.<i>`.

    Raises: BadRow, ValidationError.
    """
    made: list[Record] = []
    for i, fields in enumerate(values):
        kind = fields.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            raise BadRow("kind", f"got {shown(kind)}, want {', '.join(KINDS)}" if "kind" in fields else "missing")
        if fields.get("id") is None:
            fields = fields | {"id": f"{stem}:{number}" if len(values) == 1 else f"{stem}:{number}.{i}"}
        try:
            made.append(KINDS[kind].model_validate(fields))
        except RecursionError as error:
            raise BadRow("", "nested too deeply") from error
    return made


def stem_of(source: Source) -> str:
    """The prefix of the ids of records that have no id."""
    return printable_path(source.path.name) if source.path else source.name


def import_source(source: Source, format: str, info: SourceInfo) -> Iterator[Record | Reject]:
    """Read one source: its records in order, a Reject for each row that gives none; `info` gets an entry.

    Raises: UserError if the source cannot be read, is empty or is of no known format.
    """
    stream = read_rows(source)
    head = list(islice(stream, LOOK_AHEAD))
    if not head:
        raise UserError(f"{source.name}: the file is empty: want at least one row")
    rows = [row for row in head if isinstance(row, Row)]
    if not rows:
        raise UserError(f"{head[0]} ({len(head)} rows of the first {len(head)} cannot be read)")
    chosen, why = choose_format(source.name, rows, format)
    if chosen.joins:
        raise UserError(
            f"{source.name}: is of the format {chosen.name}, whose rows belong together: give it to `rlhf import` first"
        )
    about = FileInfo(source.name, chosen.name, why)
    info.files.append(about)
    rows_of_file = chain(head, stream)
    for row in rows_of_file if chosen.gather is None else chosen.gather(rows_of_file, source.name):
        about.rows += 1
        if isinstance(row, Reject):
            yield row
            continue
        try:
            values, parts = convert_row(row, chosen)
            made = make_records(values, stem_of(source), row.number)
        except BadRow as error:
            yield Reject(source.name, row.line, error.field, error.message)
            continue
        except ValidationError as error:
            yield Reject(source.name, row.line, *first_problem(error))
            continue
        yield from (Reject(source.name, row.line, part.field, part.message) for part in parts)
        about.records.update(record.kind for record in made)
        yield from made


def row_bytes(row: Row) -> bytes:
    """A row's bytes in its file, or its JSON if it comes from no file."""
    if row.raw is not None:
        return row.raw
    try:
        return json.dumps(row.value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
    except (ValueError, TypeError, RecursionError):  # circular, with keys of other types, or too deep
        return ascii(list(row.value)).encode()


def _load_import(source: Source, info: SourceInfo, allow_partial: bool) -> Iterator[Record]:
    """The records of a folder that `rlhf import` wrote, each with the split of its file."""
    from rlhf.data.storage import check_whole, read_records, verify

    assert source.path is not None
    check_whole(source.path, verify(source.path), allow_partial)
    about = FileInfo(source.name, "import", "written by rlhf import")
    info.files.append(about)
    for record in read_records(source.path):
        about.rows += 1
        about.records[record.kind] += 1
        yield record


RecordType = TypeVar("RecordType", Demonstration, Ranking, PromptRecord)


def load_all(sources: Any, format: str = "auto", allow_partial: bool = False) -> tuple[list[Record], SourceInfo]:
    """All records of the sources, of every kind; of finished imports with the split that was written there.

    Raises: UserError if a source cannot be read, where any row is bad (the first five problems and their count),
    and for an import that had too many rejects, unless `allow_partial`.
    """
    info = SourceInfo()
    records: list[Record] = []
    rejects: list[Reject] = []
    for source in resolve_sources(sources, RECORD_SUFFIXES, imports=True):
        if source.imported:
            records += _load_import(source, info, allow_partial)
            continue
        of_source: list[Record] = []
        for one in import_source(source, format, info):
            if isinstance(one, Reject):
                rejects.append(one)
            else:
                of_source.append(one)
        records += without_replaced(of_source)
    if rejects:
        first = "; ".join(str(reject) for reject in rejects[:_SHOWN_PROBLEMS])
        more = "; …" if len(rejects) > _SHOWN_PROBLEMS else ""
        raise UserError(f"{len(rejects)} of {info.rows} rows cannot be used: mend or remove them: {first}{more}")
    return records, info


def load_kind(
    sources: Any, format: str, wanted: type[RecordType], allow_partial: bool = False
) -> tuple[list[RecordType], SourceInfo]:
    """The records of one kind; those of other kinds are left out, but counted in the info.

    Raises: UserError as `load_all`, and if there is no record of that kind.
    """
    records, info = load_all(sources, format, allow_partial)
    chosen = [record for record in records if isinstance(record, wanted)]
    if not chosen:
        kind = wanted.model_fields["kind"].default
        raise UserError(f"no {kind} record in the data: want at least one. Read: {'; '.join(info.describe())}")
    return chosen, info

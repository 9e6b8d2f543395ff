"""Records in Arrow: the folder that `rlhf import` writes and that training reads.

    out/<kind>/<split>.arrow   stream files, which `datasets.Dataset.from_file` maps into memory
        rejects.jsonl  report.json
        assignments.arrow      which prompts and users belong to which split, for later imports
        dataset.json           the manifest: sha256 of every file; written last, so that without it nothing is trusted

Parts without a fixed form (metadata, ratings, flags, further keys of a message) are JSON text in a column. `importer.py`
writes such a folder, `reading.py` reads it.
"""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rlhf.data.inputs import MANIFEST, is_deep, is_import
from rlhf.data.records import KINDS, Record
from rlhf.data.splits import SPLITS, Assignments, with_split
from rlhf.errors import UserError
from rlhf.system.files import sha256_file, sync_folder, write_json
from rlhf.system.schemas import Count, Digest, Inside, Schema, read_checked

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
ASSIGNMENTS = "assignments.arrow"
BATCH_ROWS = 1000  # of one Arrow batch
BATCH_BYTES = 4 << 20
MAX_KEPT_DEPTH = 200  # of free-form parts: pydantic writes no record that nests more than 255 levels


@cache
def schemas() -> "dict[str, pa.Schema]":
    """The Arrow schema of each kind of record."""
    import pyarrow as pa

    text = pa.string()
    prompt = pa.list_(pa.struct([("role", text), ("content", text), ("extra", text)]))
    responses = pa.list_(pa.struct([("id", text), ("text", text), ("policy", text), ("metadata", text)]))
    names = pa.list_(pa.list_(text))
    fields: dict[str, list[tuple[str, Any]]] = {
        "demonstration": [("id", text), ("prompt", prompt), ("response", text), ("labeler", text), ("source", text),
                          ("split", text), ("metadata", text)],
        "ranking": [("id", text), ("prompt", prompt), ("responses", responses), ("ranking", names), ("ratings", text),
                    ("pairs", names), ("flags", text), ("labeler", text), ("seconds", pa.float64()), ("created", text),
                    ("metadata", text)],
        "prompt": [("id", text), ("prompt", prompt), ("user", text), ("metadata", text)],
    }  # fmt: skip
    return {kind: pa.schema(columns) for kind, columns in fields.items()}


JSON_COLUMNS = ("metadata", "ratings", "flags")


def json_text(value: Any) -> str:
    """A free-form part as JSON.

    Raises: ValueError if it holds what JSON has not (NaN, lone surrogates), or nests more than MAX_KEPT_DEPTH levels.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("got a lone surrogate (half of a character), want text that UTF-8 can hold") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"got a value that JSON has not ({error}), want strings, numbers, lists, objects") from error
    if text.count("[") + text.count("{") > MAX_KEPT_DEPTH and is_deep(value, MAX_KEPT_DEPTH):
        raise ValueError(f"nested too deeply, more than {MAX_KEPT_DEPTH} levels: leave it out")
    return text


def to_row(record: Record) -> dict[str, Any]:
    """A record as a row of its kind's schema.

    Raises: ValueError if a free-form part cannot be JSON.
    """
    row = vars(record) | {name: json_text(vars(record)[name]) for name in JSON_COLUMNS if name in vars(record)}
    row["prompt"] = [{**vars(m), "extra": json_text(m.model_extra) if m.model_extra else None} for m in record.prompt]
    if record.kind == "ranking":
        row["responses"] = [vars(r) | {"metadata": json_text(r.metadata)} for r in record.responses]
    return row


def from_row(kind: str, row: dict[str, Any]) -> Record:
    """The record that `to_row` made into this row."""
    values = row | {name: json.loads(row[name]) for name in JSON_COLUMNS if name in row}
    values["prompt"] = [
        {"role": m["role"], "content": m["content"], **(json.loads(m["extra"]) if m["extra"] else {})}
        for m in row["prompt"]
    ]
    if "responses" in row:
        values["responses"] = [r | {"metadata": json.loads(r["metadata"])} for r in row["responses"]]
    return KINDS[kind].model_validate(values)


# --- writing -------------------------------------------------------------------------------------------------------


class ArrowWriter:
    """Rows of one schema into one stream file, written in batches; the file exists once there is a row."""

    def __init__(self, path: Path, schema: "pa.Schema"):
        self.path, self.schema = path, schema
        self.rows = 0
        self._waiting: list[dict[str, Any]] = []
        self._size = 0
        self._file: Any = None
        self._stream: Any = None

    def add(self, row: dict[str, Any], size: int) -> None:
        """Add a row of about `size` bytes."""
        self._waiting.append(row)
        self._size += size
        if len(self._waiting) == BATCH_ROWS or self._size > BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._waiting:
            self.write(pa.RecordBatch.from_struct_array(pa.array(self._waiting, pa.struct(self.schema))))
        self._waiting, self._size = [], 0

    def write(self, batch: "pa.RecordBatch") -> None:
        """Write a batch of rows. Raises: OSError."""
        import pyarrow as pa

        if batch.num_rows == 0:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb")
            self._stream = pa.ipc.new_stream(self._file, self.schema)
        self._stream.write_batch(batch)
        self.rows += batch.num_rows

    def close(self) -> None:
        """Finish the file, and make sure that it is on disk."""
        self._flush()
        if self._file is not None:
            self._stream.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def seal(folder: Path, status: str, about: dict[str, Any]) -> None:
    """Write the manifest of a folder whose files are all there; `status` is complete or partial."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    for inner in {p.parent for p in files}:
        sync_folder(inner)
    hashes = {p.relative_to(folder).as_posix(): {"sha256": sha256_file(p), "bytes": p.stat().st_size} for p in files}
    manifest = {"rlhf_import": VERSION, "status": status, **about, "files": hashes}
    write_json(folder / MANIFEST, manifest)
    sync_folder(folder)


# --- the manifest and reading ---------------------------------------------------------------------------------------


class _File(Schema):
    sha256: Digest
    bytes: Count


class _Manifest(Schema):
    """dataset.json: which files belong to an import, and how it was made."""

    rlhf_import: int  # the version
    status: Literal["complete", "partial"]
    files: Annotated[dict[Inside, _File], Field(min_length=1)]
    splits: dict[str, Any] = Field({})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an import. Raises: UserError if it is none, or one that a later version wrote."""
    again = "run `rlhf import` again"
    path = folder / MANIFEST
    manifest = read_checked(path, _Manifest, again) if is_import(folder) else None
    if manifest is None:
        raise UserError(f"{folder}: no finished import there (it has no {MANIFEST}): {again}")
    if manifest["rlhf_import"] != VERSION:
        raise UserError(f"{path}: got version {manifest['rlhf_import']}, want {VERSION}: {again} with this rlhf")
    return manifest


def check_whole(folder: Path, manifest: dict[str, Any], allow_partial: bool) -> None:
    """Raises: UserError for an import that had too many rejects, unless that is allowed."""
    if manifest["status"] == "partial" and not allow_partial:
        raise UserError(
            f"{folder}: an import with more rejects than were allowed: correct its rows and import again, "
            "or train on what was accepted with data.allow_partial=true"
        )


def manifest_sha256(folder: Path) -> str:
    """One hash for an import: its manifest names the hash of every file."""
    return sha256_file(folder / MANIFEST)


_verified: set[tuple[str, int, int, str]] = set()  # files that this process has hashed already


def verify(folder: Path, only: str | None = None) -> dict[str, Any]:
    """The manifest of an import, after a check that all files are present and unchanged; hashed once per process.

    `only` names one file: the others are not looked at.

    Raises: UserError that names the first file that is missing or changed.
    """
    manifest = read_manifest(folder)
    for name, about in manifest["files"].items():
        path = folder / name
        if only not in (None, name):
            continue
        if not path.exists():
            raise UserError(f"{path}: missing from the import: run `rlhf import` again")
        state = path.stat()
        key = (str(path.resolve()), state.st_size, state.st_mtime_ns, about["sha256"])
        if key not in _verified:
            if state.st_size != about["bytes"] or sha256_file(path) != about["sha256"]:
                raise UserError(f"{path}: changed since it was imported: run `rlhf import` again")
            _verified.add(key)
    return manifest


def read_records(folder: Path) -> Iterator[Record]:
    """The records of an import by kind and split, each with the split of its file, mapped into memory."""
    files = read_manifest(folder)["files"]
    for kind in KINDS:
        for split in SPLITS:
            path = folder / kind / f"{split}.arrow"
            if path.relative_to(folder).as_posix() in files:
                for row in read_arrow(path):
                    yield with_split(from_row(kind, row), split)


def read_arrow(path: Path, rows: int = 1000) -> Iterator[dict[str, Any]]:
    """The rows of a stream file, memory-mapped, made into Python objects one batch at a time."""
    import datasets

    for batch in datasets.Dataset.from_file(str(path)).with_format("arrow").iter(batch_size=rows):
        yield from batch.to_pylist()


def read_assignments(folder: Path, prefix_characters: int) -> Assignments:
    """What an import decided. Raises: UserError if the folder is no import, or if its keys were made in another way."""
    made_with = verify(folder, only=ASSIGNMENTS).get("splits", {}).get("prefix_characters")
    if made_with != prefix_characters:
        raise UserError(
            f"{folder}: was imported with prefix_characters={made_with}, now it is {prefix_characters}: "
            f"set prefix_characters={made_with}, or do without that earlier import"
        )
    assignments = Assignments()
    for row in read_arrow(folder / ASSIGNMENTS, 10_000) if (folder / ASSIGNMENTS).exists() else ():
        (assignments.prompts if row["what"] == "prompt" else assignments.users)[row["key"]] = SPLITS.index(row["split"])
    return assignments


def write_assignments(folder: Path, assignments: Assignments) -> None:
    """Every prompt and user with its split, sorted, so that the order of the rows that were read does not matter."""
    import pyarrow as pa

    schema = pa.schema([("what", pa.string()), ("key", pa.uint64()), ("split", pa.string())])
    writer = ArrowWriter(folder / ASSIGNMENTS, schema)
    for what, known in (("prompt", assignments.prompts), ("user", assignments.users)):
        for key in sorted(known):
            writer.add({"what": what, "key": key, "split": SPLITS[known[key]]}, 32)
    writer.close()

"""The folder that `rlhf import` writes and that training reads: records in their own form, JSON Lines.

    out/<kind>/<split>.jsonl   the records of a kind and split
        rejects.jsonl  report.json
        assignments.jsonl      which prompts and users belong to which split, for later imports
        dataset.json           the manifest: sha256 of every file; written last, so that without it nothing is trusted

`importer.py` writes such a folder, `reading.py` reads it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import Field

from rlhf.data.records import KINDS, Record
from rlhf.data.splits import SPLITS, Assignments, with_split
from rlhf.errors import UserError
from rlhf.system.files import hash_files, sha256_file, sync, write_json, write_jsonl
from rlhf.system.schemas import Digest, Inside, Schema, read_checked

ASSIGNMENTS = "assignments.jsonl"
MANIFEST = "dataset.json"


def to_line(record: Record) -> str:
    """A record as one line of JSON. Raises: ValueError, TypeError or RecursionError if its metadata hold what JSON has not."""
    text = json.dumps(record.model_dump(), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
    text.encode("utf-8")  # refuses lone surrogates
    return text


def create(path: Path) -> TextIO:
    """A new file of lines, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w", encoding="utf-8", newline="\n")


def seal(folder: Path, status: str, about: dict[str, Any]) -> None:
    """Sync a folder whose files are all there to the disk, and write its manifest; `status` is complete or partial."""
    for path in (folder, *folder.rglob("*")):
        sync(path)
    hashes = {name: {"sha256": digest} for name, digest in hash_files(folder, skip=(MANIFEST,)).items()}
    write_json(folder / MANIFEST, {"rlhf_import": 2, "status": status, **about, "files": hashes})
    sync(folder)


class _Manifest(Schema):
    """dataset.json: which files belong to an import, and how it was made."""

    rlhf_import: Literal[2]  # the version
    status: Literal["complete", "partial"]
    files: Annotated[dict[Inside, dict[Literal["sha256"], Digest]], Field(min_length=1)]


def is_import(folder: Path) -> bool:
    """Whether a folder is marked as an import; `verify` checks whether it is complete."""
    path = folder / MANIFEST
    if not path.is_file():  # reading a pipe of that name would block
        return False
    with path.open("rb") as file:
        return b'"rlhf_import"' in file.read(200)


def verify(folder: Path, allow_partial: bool = True) -> None:
    """Check that all files of an import are present and unchanged. Raises: UserError that names the first file that is
    not; for a folder that is no import; and for an import that had too many rejects, unless that is allowed.
    """
    again = "run `rlhf import` again"
    manifest = read_checked(folder / MANIFEST, _Manifest, again) if is_import(folder) else None
    if manifest is None:
        raise UserError(f"{folder}: no finished import there (it has no {MANIFEST}): {again}")
    if manifest["status"] == "partial" and not allow_partial:
        remedy = "correct its rows and import again, or train on what was accepted with data.allow_partial=true"
        raise UserError(f"{folder}: an import with more rejects than were allowed: {remedy}")
    for name, about in manifest["files"].items():
        path = folder / name
        if not path.exists() or sha256_file(path) != about["sha256"]:
            raise UserError(f"{path}: missing, or changed since it was imported: {again}")


def read_records(folder: Path) -> Iterator[Record]:
    """The records of an import by kind and split, each with the split of its file."""
    for kind, record in KINDS.items():
        for split in SPLITS:
            for line in read_lines(folder / kind / f"{split}.jsonl"):
                yield with_split(record.model_validate(json.loads(line)), split)


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a file that `create` opened; none if there is no such file."""
    if path.is_file():
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from file


def read_assignments(folder: Path) -> Assignments:
    """What an import decided. Raises: UserError if the folder is no import."""
    verify(folder)
    rows = map(json.loads, read_lines(folder / ASSIGNMENTS))
    return {(row["what"], row["key"]): row["split"] for row in rows}


def write_assignments(folder: Path, assignments: Assignments) -> None:
    """Every prompt and user with its split, sorted, so that the order of the rows that were read does not matter."""
    rows = ({"what": what, "key": key, "split": split} for (what, key), split in sorted(assignments.items()))
    write_jsonl(folder / ASSIGNMENTS, rows)

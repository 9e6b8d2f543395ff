"""The file of labels: records of the import format, appended one line at a time and synced before they are acknowledged.

The page gives each submission an id: a client that got no answer sends it again, and it is stored once. A line that a killed
server left incomplete was never acknowledged; it is removed when the file is opened.
"""

import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from rlhf.data.records import KINDS, Demonstration, Ranking, Record, first_problem
from rlhf.errors import UserError
from rlhf.system.files import disk_error, writing

Labelled = TypeVar("Labelled", Ranking, Demonstration)
# The beginnings of a line. An incomplete last line must begin like one; otherwise another program wrote the file.
STARTS = tuple(f'{{"kind": "{kind.model_fields["kind"].default}", '.encode() for kind in (Ranking, Demonstration))


class LabelStore:
    """One file of labels, held by one process."""

    def __init__(self, path: Path):
        self.path, self.lock = path, threading.Lock()
        self.records: list[Record] = []
        self.submissions: dict[tuple[str, str | None, str], Record] = {}  # by kind, labeler and submission
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{path}: another server writes it: stop that one, or choose another serve.labels=…"
            ) from None
        self._read()

    def _read(self) -> None:
        if not self.path.is_file():
            raise UserError(f"{self.path}: not a regular file: choose another serve.labels=…")
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                self._know(KINDS[row["kind"]].model_validate(row))
            except (ValueError, KeyError, TypeError) as error:
                self._refuse(number, first_problem(error)[1] if isinstance(error, ValidationError) else "not a record")
        if not any(start.startswith(data[len(whole) :][: len(start)]) for start in STARTS):
            self._refuse(len(lines) + 1, "not a record")
        if len(whole) < len(data):
            os.ftruncate(self.file, len(whole))
            os.fsync(self.file)

    def _refuse(self, number: int, problem: str) -> NoReturn:
        raise UserError(f"{self.path}:{number}: {problem}: mend the line, or choose another serve.labels=…") from None

    def _know(self, record: Record) -> None:
        self.records.append(record)
        submission = record.metadata.get("submission")
        if isinstance(submission, str):
            self.submissions[record.kind, getattr(record, "labeler", None), submission] = record

    def append(self, record: Labelled) -> Labelled:
        """Write a record, unless its submission is stored; returns the stored one. Raises: UserError if the disk cannot be written."""
        key = (record.kind, record.labeler, record.metadata["submission"])
        line = (json.dumps(record.model_dump(mode="json"), ensure_ascii=False) + "\n").encode()
        with self.lock:
            if (known := self.submissions.get(key)) is not None:
                return known  # type: ignore[return-value]
            size = os.fstat(self.file).st_size
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(self.file, left) :]
                os.fsync(self.file)
            except OSError as error:
                os.ftruncate(self.file, size)  # remove the incomplete line
                raise disk_error(error, self.path) from error
            self._know(record)
        return record

    def known(self, labeler: str, submission: str) -> Any:
        """The ranking of a stored submission, or None."""
        with self.lock:
            return self.submissions.get(("ranking", labeler, submission))

    def close(self) -> None:
        os.close(self.file)

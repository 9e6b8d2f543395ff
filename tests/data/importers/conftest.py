"""Rows through the real import: their records, and the rejects of a bad row next to a good one."""

from collections.abc import Callable
from typing import Any

import pytest

from rlhf.data.inputs import Source
from rlhf.data.reading import find_format, load_all, read
from rlhf.data.records import Record


@pytest.fixture
def load(write_jsonl) -> Callable[..., list[Record]]:
    """The records of rows that are all good, of the format that is recognised: `load(format, row, …)`."""

    def run(format: str, *rows: dict[str, Any]) -> list[Record]:
        records, info = load_all(write_jsonl(rows))
        assert info[0].format == format
        return records

    return run


@pytest.fixture
def rejects(write_jsonl) -> Callable[..., list[tuple[str, str]]]:
    """(field, message) of each reject in a file of a good row and a bad one: `rejects(format, good, bad)`."""

    def run(format: str, good: dict[str, Any], bad: dict[str, Any]) -> list[tuple[str, str]]:
        path = write_jsonl([good, bad])
        source = Source(str(path), path)
        made = list(read(source, find_format("auto", "data.format")))
        found = [one for one in made if one.problem]
        assert source.format == format and {reject.line for reject in found} == {2}
        assert any(one.records for one in made)
        return [(reject.field, reject.problem) for reject in found]

    return run

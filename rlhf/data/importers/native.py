"""The import format itself: rows with a `kind`. Records validate themselves, so nothing is converted here."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.importers import Format
from rlhf.data.records import KINDS, read_record


def recognise(row: Mapping[str, Any]) -> str | None:
    """A kind that is spelt wrong counts too: such a row is a native one with a mistake."""
    return f"key kind is {row['kind']!r}" if isinstance(row.get("kind"), str) and "prompt" in row else None


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield dict(row)


FORMAT = Format(
    "native", f"key kind ({', '.join(KINDS)}) and the keys of that record", recognise, convert, read=read_record
)

"""An instruction with a person's answer (`text`) and a model's (`decoded`), as Dolly's with a model beside it.

One demonstration of the person's answer. Nobody compared the two, so they are no pair; the model's answer
stays under `metadata.decoded`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import demonstration
from rlhf.data.importers import Format, other_keys, require_text


def recognise(row: Mapping[str, Any]) -> str | None:
    wanted = ("instruction", "text", "decoded")
    return "keys instruction, text and decoded" if all(isinstance(row.get(key), str) for key in wanted) else None


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One demonstration."""
    asked, answered = require_text(row, "instruction"), require_text(row, "text")
    yield demonstration(asked, answered, other_keys(row, "instruction", "text"))


FORMAT = Format("decoded", "keys instruction, text (a person's answer) and decoded (a model's)", recognise, convert)

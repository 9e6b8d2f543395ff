"""Headers and cells of tables: names of columns, and cells as JSON values."""

import math
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from rlhf.data.records import first_repeat
from rlhf.errors import UserError


def check_header(cells: Sequence[Any], name: str, line: int) -> list[str]:
    """The names of the columns, without white space around them.

    Raises: UserError if one is empty, appears twice or is not text.
    """
    names = ["" if cell is None else str(cell).strip() for cell in cells]
    empty = [i for i, one in enumerate(names, start=1) if not one]
    if empty:
        where = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
        came = f"columns {where} have" if len(empty) > 1 else f"column {where} has"
        raise UserError(f"{name}:{line}: {came} no name in the header: want a name for each column")
    if (twice := first_repeat(names)) is not None:
        raise UserError(f'{name}:{line}: the header names "{twice}" twice: rename one of these columns')
    if any("\0" in one for one in names):
        raise UserError(f"{name}:{line}: the header contains NUL bytes: if the file is UTF-16, set encoding=utf-16")
    return names


def plain(value: Any) -> Any:
    """A cell as a JSON value; NaN, which means an empty cell, is None.

    Raises: ValueError for a value that JSON cannot represent.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if math.isinf(value):
                raise ValueError("got an infinite number, want a finite one")
            return None if math.isnan(value) else value
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return plain(int(value) if value == value.to_integral_value() else float(value))
        case bytes():
            try:
                return value.decode("utf-8")
            except UnicodeDecodeError:
                raise ValueError("got bytes that are no UTF-8 text: leave this column out") from None
        case dict():
            return {str(key): plain(one) for key, one in value.items()}
        case list() | tuple():
            return [plain(one) for one in value]
    raise ValueError(f"got a {type(value).__name__}, want text, a number, a list or an object")

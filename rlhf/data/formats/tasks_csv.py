"""Labelling tasks that `rlhf sample` wrote as CSV and that labelers filled in."""

from collections.abc import Iterator
from typing import Any

from rlhf.data.formats.shapes import (
    BadRow,
    Values,
    as_json,
    is_empty,
    is_list,
    judged,
    number,
    other_keys,
    ranking_of,
    read_phrase,
    require,
    without_empty,
)
from rlhf.data.records import shown
from rlhf.data.tasks import unguarded

_COMMON = ("item", "prompt", "labeler", "ids", "about")
_SIDES = ("left", "right")
_LEAVE = "leave this column as it was written (a spreadsheet cuts cells at 32,767 characters)"


def is_tasks_csv(row: Values) -> bool:
    """Whether a row is a task that `rlhf sample sample.tool=csv` wrote."""
    pair = row.keys() >= {*_SIDES, "winner"}
    return all(key in row for key in _COMMON) and (pair or row.keys() >= {"response_1", "score_1"})


def _cell_text(value: Any) -> str:
    """A cell as text, without the apostrophe that guards against formulas; a spreadsheet's number as the text that it shows."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else unguarded(str(value))


def from_tasks_csv(row: Values) -> Iterator[dict[str, Any]]:
    """The ranking of a row; null if nobody has filled it in, as in a task. Raises: BadRow."""
    require(is_tasks_csv(row), "", list(row), "item, prompt, labeler, ids, about, and winner or score_1 …")
    about = as_json(row["about"])
    parts = [about.get(name, {}) for name in ("responses", "metadata")] if isinstance(about, dict) else []
    require(len(parts) == 2 and is_list(parts, dict), "about", row["about"], f"the JSON of rlhf sample: {_LEAVE}")
    known, metadata = parts
    pair = "winner" in row
    ids = _cell_text(row["ids"]).split()
    columns = list(_SIDES) if pair else [f"response_{n}" for n in range(1, len(ids) + 1)]
    fits = len(ids) == len(columns) and all(column in row for column in columns)
    require(fits, "ids", row["ids"], f"an id for each response: {_LEAVE}")
    require(set(ids) <= known.keys(), "ids", row["ids"], f"some of {shown(list(known))}, which about knows: {_LEAVE}")
    ranking = None
    if not pair:
        scores = {}
        for column, name in enumerate(ids, 1):
            if not is_empty(score := row.get(f"score_{column}")):
                scores[name] = number(score, f"score_{column}", "a number, or nothing")
        ranking = ranking_of(scores, best="highest") if scores else None
    elif not is_empty(row["winner"]):
        verdict = read_phrase(_cell_text(row["winner"]), 2)
        if verdict is None:
            raise BadRow("winner", f"got {shown(row['winner'])}, want left, right or tie")
        ranking = judged(verdict.winner, ids)["ranking"]
    item = _cell_text(row["item"])
    labeler = None if is_empty(row["labeler"]) else _cell_text(row["labeler"]).strip()
    used = [*_COMMON, *(key for key in row if key in (*_SIDES, "winner") or key.startswith(("response_", "score_")))]
    more = without_empty(other_keys(row, *used))
    yield {
        "kind": "ranking",
        "id": (item if labeler is None else f"{item}:{labeler}") if item else None,
        "prompt": about.get("dialogue") or _cell_text(row["prompt"]),
        "responses": [
            {"id": name, "text": _cell_text(row[column]), **known[name]}
            for name, column in zip(ids, columns, strict=True)
        ],
        "ranking": ranking,
        "labeler": labeler,
        # Pairs of one item and labeler are joined by it; rankings are not joined.
        "metadata": metadata | ({"item": item} if pair else {}) | ({"columns": more} if more else {}),
    }

"""Tables that `rlhf sample sample.tool=csv` wrote and people have filled in: one row per ranking, or one per pair.

The column `about` holds what a labeler need not see, and gives back each response's id, policy and metadata, and
the turns of the prompt. Any other table goes through `format=table`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import is_list, ranking_of, require
from rlhf.data.conversion.paths import as_json
from rlhf.data.conversion.verdicts import as_number, is_empty, ordered, read_phrase
from rlhf.data.importers import BadRow, Format, other_keys
from rlhf.data.records import shown
from rlhf.data.tasks import unguarded

COMMON = ("item", "prompt", "labeler", "ids", "about")
SIDES = ("left", "right")
_LEAVE = "leave this column as it was written (a spreadsheet cuts cells at 32,767 characters)"


def recognise(row: Mapping[str, Any]) -> str | None:
    """Why a row is a task that `rlhf sample` wrote; None if it is not."""
    if not all(key in row for key in COMMON):
        return None
    if all(key in row for key in (*SIDES, "winner")):
        return "tasks of rlhf sample: keys item, ids, about, winner"
    if "response_1" in row and "score_1" in row:
        return "tasks of rlhf sample: keys item, ids, about, score_1"
    return None


def _text(value: Any) -> str:
    """A cell as text, without the apostrophe that guards against formulas. An empty one is a response that says nothing, a
    spreadsheet's number is the text that it shows.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else unguarded(str(value))


def _about(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What is known of the responses by id, the task's metadata, and the prompt. Raises: BadRow."""
    about = as_json(row["about"])
    parts = [about.get(name, {}) for name in ("responses", "metadata")] if isinstance(about, dict) else []
    require(is_list(parts, dict), "about", row["about"], f"the JSON of rlhf sample: {_LEAVE}")
    responses, metadata = parts
    prompt = about.get("dialogue")
    return responses, metadata, _text(row["prompt"]) if prompt is None else prompt


def _responses(row: Mapping[str, Any], columns: list[str], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The responses with their ids, in the order of `columns`. Raises: BadRow."""
    responses = []
    for name, column in zip(_text(row["ids"]).split(), columns, strict=True):
        about = known.get(name)
        if not isinstance(about, dict):
            raise BadRow("ids", f"got {shown(row['ids'])}, but about knows {shown(list(known))}: {_LEAVE}")
        responses.append({"id": name, "text": _text(row[column]), **about})
    return responses


def _by_scores(row: Mapping[str, Any], columns: list[str], ids: list[str]) -> list[list[str]] | None:
    scores = {}
    for name, column in zip(ids, columns, strict=True):
        value = row.get(column.replace("response", "score"))
        if is_empty(value):
            continue
        number = as_number(value)
        if number is None:
            raise BadRow(column.replace("response", "score"), f"got {shown(value)}, want a number, or nothing")
        scores[name] = number
    return ranking_of(scores, best="highest") if scores else None


def _by_winner(row: Mapping[str, Any], ids: list[str]) -> list[list[str]] | None:
    if is_empty(row["winner"]):
        return None
    verdict = read_phrase(_text(row["winner"]), 2)
    if verdict is None:
        raise BadRow("winner", f"got {shown(row['winner'])}, want left, right or tie")
    return ordered(verdict.winner, ids)


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The ranking of a row; null if nobody has filled it in, as in a task.

    Raises: BadRow.
    """
    if recognise(row) is None:
        raise BadRow("", f"got the keys {shown(list(row), 200)}, want {FORMAT.wants}")
    known, metadata, prompt = _about(row)
    pair = "winner" in row and all(side in row for side in SIDES)
    ids = _text(row["ids"]).split()
    columns = list(SIDES) if pair else [f"response_{n}" for n in range(1, len(ids) + 1)]
    missing = [column for column in columns if column not in row]
    require(not missing and len(ids) == len(columns), "ids", row["ids"], f"an id for each response: {_LEAVE}")
    responses = _responses(row, columns, known)
    item = _text(row["item"])
    labeler = None if is_empty(row["labeler"]) else _text(row["labeler"]).strip()
    used = [*COMMON, *(key for key in row if key in (*SIDES, "winner") or key.startswith(("response_", "score_")))]
    more = {key: value for key, value in other_keys(row, *used).items() if not is_empty(value)}
    yield {
        "kind": "ranking",
        "id": (item if labeler is None else f"{item}:{labeler}") if item else None,
        "prompt": prompt,
        "responses": responses,
        "ranking": _by_winner(row, ids) if pair else _by_scores(row, columns, ids),
        "labeler": labeler,
        # Pairs of one item and labeler are joined by it; rankings are not joined.
        "metadata": metadata | ({"item": item} if pair else {}) | ({"columns": more} if more else {}),
    }


FORMAT = Format(
    "tasks_csv",
    "a table of rlhf sample: item, prompt, labeler, ids, about, and winner or score_1 …",
    recognise,
    convert,
    joins=True,
)

"""Converts a row of a table to records, given the meaning of its columns. `importers/table.py` reads the settings,
`verdicts.py` the words of judgements, and `paths.py` nested columns.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from rlhf.data.conversion.foreign import ROLES, Turns, best_of, chat_turns, letters, one_answer, ranking_of, response_of
from rlhf.data.conversion.paths import MISSING, as_json, lookup, without
from rlhf.data.conversion.verdicts import TIE, Vocabulary, as_number, is_empty, read_thumb
from rlhf.data.importers import BadRow
from rlhf.data.importers.kto import RATINGS
from rlhf.data.records import shown

# What a record of each kind says in fields of its own; else it is metadata.
_FIELDS = {"demonstration": ("labeler",), "prompt": ("user",), "ranking": ("created", "labeler")}


@dataclass(frozen=True, slots=True)
class Mapped:
    """The columns by meaning, each a list of paths; and how judgements are read."""

    columns: Mapping[str, tuple[str, ...]]
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    thumbs: bool = False  # whether the rating is a verdict, not a number from 1 to 7

    def of(self, name: str) -> tuple[str, ...]:
        return self.columns.get(name, ())

    def one(self, row: Mapping[str, Any], name: str) -> str | None:
        """The text of a column that a row may leave empty."""
        [path] = self.of(name) or ("",)
        value = value_at(row, path) if path else None
        return None if is_empty(value) else _text(value, path)

    def recognise(self, row: Mapping[str, Any]) -> str:
        """Every row matches; returns how the file is read."""
        if not self.of("winner"):
            return "columns as named"
        return f"columns as named; {', '.join(self.of('winner'))}: {self.vocabulary.described()}"

    def convert(self, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The records of one row: several if several labelers judged it.

        Raises: BadRow if a cell does not fit the meaning of its column, or nobody judged.
        """
        judgements = list(self._rankings(row))  # first: for a row without a judgement no other message matters
        kind = "ranking" if judgements else "demonstration" if self.of("response") else "prompt"
        rest: Mapping[str, Any] = row
        for name, paths in self.columns.items():
            for path in paths if name not in ("winner", "rating") else self._read_judgements(row, name):
                rest = without(rest, path) or {}
        common: dict[str, Any] = {"kind": kind, "prompt": self._prompt(row), "id": self.one(row, "id")}
        about = {
            name: value for name in ("user", "created", "labeler") if (value := self._about(row, name)) is not None
        }
        common |= {name: about.pop(name) for name in _FIELDS[kind] if name in about}
        if kind == "demonstration":
            common["response"] = _response("", lookup(row, self.of("response")[0]), self.of("response")[0])["text"]
        for judgement in judgements or [{"metadata": {}}]:
            record = common | judgement | {"metadata": _merged(rest, about | judgement["metadata"])}
            if "labeler" in judgement and record["id"] is not None:
                record["id"] = f"{record['id']}:{judgement['labeler']}"
            yield record

    def _read_judgements(self, row: Mapping[str, Any], name: str) -> list[str]:
        """The judgement columns that the record contains completely; an empty one, or a thumb, stays in the metadata."""
        if name == "rating":
            return [] if self.thumbs else list(self.of(name))
        return [path for path in self.of(name) if not is_empty(value_at(row, path))]

    def _about(self, row: Mapping[str, Any], name: str) -> str | None:
        value = self.one(row, name)
        if value is None or name != "created" or as_number(value) is None:
            return value
        since_1970 = float(value)
        seconds = since_1970 / 1000 if abs(since_1970) > 1e11 else since_1970  # large numbers are milliseconds
        try:
            return datetime.fromtimestamp(seconds, UTC).isoformat()
        except (ValueError, OverflowError, OSError):
            return value

    # --- the prompt

    def _prompt(self, row: Mapping[str, Any]) -> Turns:
        parts: list[Any] = []  # turns, and texts
        paths = self.of("prompt")
        for path in paths:
            value = value_at(row, path)
            if value is None:
                continue
            if (chat := _chat(value)) is not None:
                parts += chat_turns(chat, path)
            elif text := (_text(value, path) if len(paths) == 1 else _text(value, path).strip()):
                parts.append(text)
        turns: Turns = []
        for are_texts, run in groupby(parts, lambda part: isinstance(part, str)):
            group = list(run)
            turns += [{"role": "user", "content": "\n\n".join(group)}] if are_texts else group
        if not turns:
            raise BadRow(paths[0], f"got nothing, want the prompt{_whole_row(row)}: remove the row or fill it in")
        system = self.one(row, "system")
        return turns if system is None else [{"role": "system", "content": system}, *turns]

    # --- judgements

    def _rankings(self, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if self.of("rating"):
            yield self._rated(row)
        elif self.of("ranked"):
            cells = [cell for cell in cells_of(row, self.of("ranked")) if not is_empty(cell[1])]
            if len(cells) < 2:
                raise BadRow(self.of("ranked")[0], f"got {len(cells)} responses, want two or more{_whole_row(row)}")
            made = _responses(cells)
            yield {"responses": made, "ranking": [[one["id"]] for one in made], "metadata": {}}
        elif self.of("scores"):
            yield self._scored(row)
        elif self.of("winner"):
            yield from self._judged(row)
        elif self.of("responses"):
            cells = [cell for cell in cells_of(row, self.of("responses")) if not is_empty(cell[1])]
            if not cells:
                raise BadRow(self.of("responses")[0], f"got nothing, want responses{_whole_row(row)}")
            yield {"responses": _responses(cells), "ranking": None, "metadata": {}}

    def _judged(self, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        judgements = [(path, value) for path in self.of("winner") if not is_empty(value := value_at(row, path))]
        if not judgements:
            raise BadRow(self.of("winner")[0], _unjudged("a verdict", row))
        cells = cells_of(row, self.of("responses"))
        if all(is_empty(value) for _, value in cells):
            raise BadRow(self.of("responses")[0], "got no text in any response, want what was judged")
        responses = _responses(cells)
        names = [path for path, _ in cells]
        ids, texts = [one["id"] for one in responses], [one["text"] for one in responses]
        for path, value in judgements:
            try:
                verdict = self.vocabulary.read(value, names, texts)
            except ValueError as error:
                raise BadRow(path, str(error)) from error
            metadata = {"preference_scale": value} if self.vocabulary.scale or verdict.strength is not None else {}
            if verdict.strength is not None:
                metadata["strength"] = verdict.strength
            labeler = {"labeler": path} if len(self.of("winner")) > 1 else {}
            order = {"ranking": [ids]} if verdict.winner == TIE else best_of(ids[verdict.winner], ids)
            yield {"responses": responses, **order, "metadata": metadata, **labeler}

    def _scored(self, row: Mapping[str, Any]) -> dict[str, Any]:
        cells, given = cells_of(row, self.of("responses")), cells_of(row, self.of("scores"), needed=False)
        if len(cells) != len(given):
            raise BadRow(self.of("scores")[0], f"got {len(given)} scores, want {len(cells)}: one per response")
        filled = [
            (cell, score)
            for cell, score in zip(cells, given, strict=True)
            if not (is_empty(cell[1]) and is_empty(score[1]))
        ]
        responses = _responses([cell for cell, _ in filled])
        scores = {
            response["id"]: _number(*score)
            for response, (_, score) in zip(responses, filled, strict=True)
            if not is_empty(score[1])
        }
        if not scores:
            raise BadRow(self.of("scores")[0], _unjudged("a number for each response", row))
        order = ranking_of(scores, best="highest")
        return {"responses": responses, "ranking": order, "metadata": {"scores": scores}}

    def _rated(self, row: Mapping[str, Any]) -> dict[str, Any]:
        [path], [answer] = self.of("rating"), self.of("response")
        value = value_at(row, path)
        if is_empty(value):
            raise BadRow(path, _unjudged("a number from 1 to 7 or a verdict", row))
        number = as_number(value)
        thumb = read_thumb(value) if self.thumbs or number is None else None
        if thumb is not None:
            rating: float = RATINGS[thumb]
        elif number is not None and not self.thumbs and 1 <= number <= 7:
            rating = int(number) if number.is_integer() else number
        else:
            thumbs = "good or bad (yes, no, true, false, 1, 0, …)"
            wanted = thumbs if self.thumbs else "a number from 1 to 7, or good or bad"
            raise BadRow(path, f"got {shown(value)}, want {wanted}")
        extra = {} if self.thumbs or thumb is None else {"rating": value}
        responses = [_response("a", lookup(row, answer), answer)]
        return {"responses": responses, "ratings": {"a": rating}, "metadata": extra}


def _merged(rest: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of a record; if a column has the name of one of our keys, the column takes precedence."""
    return {(f"table.{key}" if key in rest else key): value for key, value in ours.items()} | dict(rest)


def _whole_row(row: Mapping[str, Any]) -> str:
    return " (the whole row is empty)" if all(is_empty(value) for value in row.values()) else ""


def _unjudged(wanted: str, row: Mapping[str, Any]) -> str:
    return f"got nothing, want {wanted}{_whole_row(row)}: nobody judged this row, remove it or fill it in"


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """The value of a column; None if the row lacks it."""
    value = lookup(row, path)
    return None if value is MISSING else value


def _text(value: Any, path: str) -> str:
    """A cell as text; a number as its digits.

    Raises: BadRow if it is a list or an object.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value)  # "True": a spreadsheet or pandas may have converted that word to a truth value
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    inside = f"{path}.0" if isinstance(value, list) else f"{path}.{next(iter(value), '…')}" if value else path
    raise BadRow(path, f"got {shown(value)}, want text: name what is inside, as {inside}")


def _chat(value: Any) -> list[Any] | None:
    """The turns in a cell, a list or a single one, also as JSON text; None if it has none."""
    value = as_json(value)
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        return None
    return value if all("role" in turn or "from" in turn for turn in value) else None


def _response(name: str, value: Any, path: str) -> dict[str, Any]:
    """One response: text, or an assistant's turn, alone or in a list of one. An empty cell is an empty answer."""
    if value is MISSING:
        raise BadRow(path, "missing: want the response")
    chat = _chat(value)
    if chat is None:
        return {"id": name, "text": "" if value is None else _text(value, path)}
    if len(chat) != 1:
        roles = ", ".join(ROLES.get(str(turn.get("role", turn.get("from"))), "?") for turn in chat)
        raise BadRow(path, f"got turns {roles}, want one turn of the assistant: name it, as {path}.-1.content")
    return response_of(name, one_answer(chat[0], path))


def _responses(cells: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [_response(name, value, path) for name, (path, value) in zip(letters(len(cells)), cells, strict=True)]


def cells_of(row: Mapping[str, Any], paths: Sequence[str], *, needed: bool = True) -> list[tuple[str, Any]]:
    """(path, value) of several columns, or of the items of the list in a single one.

    Raises: BadRow if a needed column is missing, or the single one is not a list.
    """
    cells = [(path, lookup(row, path)) for path in paths]
    for path, value in cells:
        if value is MISSING and needed:
            raise BadRow(path, f"missing{_whole_row(row)}: want a response")
    if len(cells) > 1:
        return [(path, None if value is MISSING else value) for path, value in cells]
    path, value = cells[0]
    items = as_json(value)
    if value is MISSING or is_empty(value):
        return []
    if not isinstance(items, list):
        raise BadRow(path, f"got {shown(value)}, want a list: or name a column for each")
    return [(f"{path}.{i}", item) for i, item in enumerate(items)]


def _number(path: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadRow(path, f"got {shown(value)}, want a number") from None
    if not math.isfinite(number):
        raise BadRow(path, f"got {shown(value)}, want a finite number")
    return int(number) if number.is_integer() and abs(number) < 2**53 else number

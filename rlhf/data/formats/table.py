"""`format=table`: rows whose columns are named on the command line, from any CSV, spreadsheet, Parquet or JSON file.

What the columns are decides what a row gives: a ranking (responses with winners, scores or none of both; columns ranked
best first; one rated response), a demonstration, or a prompt. A nested value has a dotted path: `answers.0.text`,
`answers.*.text` for every item of a list; a key that contains dots takes precedence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import Any

from rlhf.config.commands import ColumnsConfig, WordsConfig
from rlhf.config.compose import nearest
from rlhf.config.setting import listed
from rlhf.data.formats.shapes import (
    RATINGS,
    BadRow,
    Format,
    Turns,
    Values,
    as_json,
    as_number,
    best_of,
    chat_turns,
    is_empty,
    letters,
    one_answer,
    ranking_of,
    response_of,
    user_turn,
    with_system,
)
from rlhf.data.formats.verdicts import TIE, Vocabulary, normal, read_thumb
from rlhf.data.records import first_repeat, shown
from rlhf.errors import UserError

MISSING = object()  # no such path; an existing null is None
WANTS = "any rows, with their columns named by columns.*"
# What a record of each kind says in fields of its own; else it is metadata.
_FIELDS = {"demonstration": ("labeler",), "prompt": ("user",), "ranking": ("created", "labeler")}
_NOBODY = "nobody judged this row, remove it or fill it in"


# --- paths -----------------------------------------------------------------------------------------------------------


def lookup(value: Any, path: str) -> Any:
    """The value at a path, or MISSING; JSON in a text is parsed."""
    value = as_json(value)
    if isinstance(value, Mapping):
        for key, rest in _ways(path):
            if key in value and (inner := value[key] if rest is None else lookup(value[key], rest)) is not MISSING:
                return inner
        return MISSING
    if not isinstance(value, Sequence) or isinstance(value, str):
        return MISSING
    step, _, rest_of_path = path.partition(".")
    if step == "*":
        items = [lookup(one, rest_of_path) for one in value] if rest_of_path else list(value)
        there = not items or any(one is not MISSING for one in items)
        return [None if one is MISSING else one for one in items] if there else MISSING
    index = _index(step, len(value))
    if index is None:
        return MISSING
    return lookup(value[index], rest_of_path) if rest_of_path else value[index]


def without(value: Any, path: str) -> Any:
    """A copy of a row without the value at the path; objects and lists that become empty are removed too, as None."""
    if isinstance(value, Mapping):
        for key, rest in _ways(path):
            if key in value and (rest is None or lookup(value[key], rest) is not MISSING):
                left = None if rest is None else without(value[key], rest)
                kept = {k: left if k == key else v for k, v in value.items() if k != key or left is not None}
                return kept or None
    elif isinstance(value, list):
        step, _, rest_of_path = path.partition(".")
        index = _index(step, len(value))
        chosen = range(len(value)) if step == "*" else [] if index is None else [index]
        items = [
            one if i not in chosen else without(one, rest_of_path) if rest_of_path else None
            for i, one in enumerate(value)
        ]
        return items if any(one is not None for one in items) else None
    return value


def _ways(path: str) -> list[tuple[str, str | None]]:
    """The ways to read a path as a key and the rest, longest key first."""
    parts = path.split(".")
    return [(path, None), *((".".join(parts[:i]), ".".join(parts[i:])) for i in range(len(parts) - 1, 0, -1))]


def _index(step: str, length: int) -> int | None:
    """A list's index, from the end if negative; None if it is not a number or there is no such item."""
    if not step.removeprefix("-").isdecimal() or not step.isascii() or len(step) > 9:
        return None
    return int(step) % length if -length <= int(step) < length else None


def value_at(row: Values, path: str) -> Any:
    """The value of a column; None if the row lacks it."""
    value = lookup(row, path)
    return None if value is MISSING else value


# --- the settings ----------------------------------------------------------------------------------------------------


def make_table_format(columns: ColumnsConfig, words: WordsConfig) -> Format:
    """The format that these settings describe. Raises: UserError with every setting that is missing or does not fit."""
    paths = {one.name: tuple(map(str, listed(getattr(columns, one.name)))) for one in fields(columns)}
    mapped = {name: given for name, given in paths.items() if given}
    problems = _contradictions(mapped)
    vocabulary = Vocabulary(_words(words, mapped, problems))
    if problems:
        raise UserError("format=table: " + "; ".join(problems))
    return _format(Mapped(mapped, vocabulary))


def _format(mapped: "Mapped") -> Format:
    return Format("table", WANTS, mapped.recognise, mapped.convert, prepare=partial(_prepare, mapped))


def _contradictions(mapped: Mapping[str, tuple[str, ...]]) -> list[str]:
    repeats = {name: twice for name, paths in mapped.items() if (twice := first_repeat(paths)) is not None}
    problems = [f"columns.{name} names {twice} twice: want each column once" for name, twice in repeats.items()]
    if "prompt" not in mapped:
        problems.append("columns.prompt is not set: want the column with the request")
    forms = [name for name in ("response", "responses", "ranked") if name in mapped]
    if len(forms) > 1:
        problems.append(f"columns.{' and columns.'.join(forms)} are given: want one of them")
    for name, other in (("winner", "responses"), ("scores", "responses"), ("rating", "response")):
        if name in mapped and other not in mapped:
            problems.append(f"columns.{name} needs columns.{other}: name what was judged")
    if "winner" in mapped and "scores" in mapped:
        problems.append("columns.winner and columns.scores are given: want one of them")
    answers, scores = mapped.get("responses", ()), mapped.get("scores", ())
    if len(scores) > 1 and len(answers) > 1 and len(scores) != len(answers):
        problems.append(f"columns.scores has {len(scores)} names, columns.responses {len(answers)}: want as many")
    if len(mapped.get("winner", ())) > 1 and "labeler" in mapped:
        problems.append("columns.labeler with several columns.winner: want one, since each column is a labeler")
    return problems


def _words(words: WordsConfig, mapped: Mapping[str, tuple[str, ...]], problems: list[str]) -> dict[str, int]:
    outcome_of: dict[str, int] = {}
    for given, outcome in ((words.first, 0), (words.second, 1), (words.tie, TIE)):
        for word in listed(given):
            if outcome_of.setdefault(normal(word), outcome) != outcome:
                problems.append(f"words: {normal(word)} has two meanings: want each word once")
    if outcome_of and "winner" not in mapped:
        problems.append("words.* need columns.winner: name the column that holds them")
    if outcome_of and not {0, 1} <= set(outcome_of.values()):
        problems.append("words.* are not complete: want words.first and words.second, and words.tie if there are ties")
    if outcome_of and len(mapped.get("responses", ())) > 2:
        problems.append("words.* with more than two columns.responses: put the names of these columns as the winner")
    return outcome_of


def _prepare(mapped: "Mapped", name: str, rows: Sequence[Values]) -> Format:
    """The format after a look at a file's first rows. Raises: UserError if a column is not there, or numbers are ambiguous."""
    missing = [
        f"columns.{setting}={path}: {name} has no such column{nearest(path, list(rows[0])) or f': it has {shown(list(rows[0]), 200)}'}"
        for setting, paths in mapped.columns.items()
        for path in paths
        if all(lookup(row, path) is MISSING for row in rows)
    ]
    if missing:
        raise UserError("; ".join(missing))
    judged: list[tuple[Any, int]] = []
    for row in rows if mapped.of("winner") else ():
        try:
            k = len(cells_of(row, mapped.of("responses")))
        except BadRow:
            continue
        judged += [(value_at(row, path), k) for path in mapped.of("winner")] if k > 1 else []
    try:
        vocabulary = mapped.vocabulary.looked_at(judged)
    except ValueError as error:
        where = f"columns.winner={','.join(mapped.of('winner'))}: {name}, first {len(rows)} rows"
        raise UserError(f"{where}: {error}") from error
    ratings = [value_at(row, path) for path in mapped.of("rating") for row in rows]
    numbers = {number for value in ratings if (number := as_number(value)) is not None}
    if numbers == {1}:
        raise UserError(
            f"columns.rating={mapped.of('rating')[0]}: {name}, first {len(rows)} rows: got only the number 1: is it good, "
            "or the lowest of 1 to 7? write good and bad, or other numbers"
        )
    thumbs = numbers <= {-1, 0, 1} and (bool(numbers) or any(read_thumb(value) is not None for value in ratings))
    return _format(replace(mapped, vocabulary=vocabulary, thumbs=thumbs))


# --- a row -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mapped:
    """The columns by meaning, each a list of paths; and how judgements are read."""

    columns: Mapping[str, tuple[str, ...]]
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    thumbs: bool = False  # whether the rating is a verdict, not a number from 1 to 7

    def of(self, name: str) -> tuple[str, ...]:
        return self.columns.get(name, ())

    def one(self, row: Values, name: str) -> str | None:
        """The text of a column that a row may leave empty."""
        value = value_at(row, self.of(name)[0]) if self.of(name) else None
        return None if is_empty(value) else _text(value, self.of(name)[0])

    def recognise(self, row: Values) -> str:
        """Every row matches; returns how the file is read."""
        winners = self.of("winner")
        return "columns as named" + (f"; {', '.join(winners)}: {self.vocabulary.described()}" if winners else "")

    def convert(self, row: Values) -> Iterator[dict[str, Any]]:
        """The records of one row, several if several labelers judged it. Raises: BadRow, also if nobody judged."""
        judgements = list(self._rankings(row))  # first: for a row without a judgement no other message matters
        kind = "ranking" if judgements else "demonstration" if self.of("response") else "prompt"
        rest: Any = row
        for name, paths in self.columns.items():
            for path in paths:  # an empty verdict, and a thumb, stay in the metadata
                if (name == "winner" and is_empty(value_at(row, path))) or (name == "rating" and self.thumbs):
                    continue
                rest = without(rest, path) or {}
        about = {key: v for key in ("user", "created", "labeler") if (v := self.one(row, key)) is not None}
        if "created" in about and (seconds := as_number(about["created"])) is not None:
            about["created"] = _time(seconds) or about["created"]
        common: dict[str, Any] = {"kind": kind, "prompt": self._prompt(row), "id": self.one(row, "id")}
        common |= {name: about.pop(name) for name in _FIELDS[kind] if name in about}
        if kind == "demonstration":
            common["response"] = _response("", lookup(row, self.of("response")[0]), self.of("response")[0])["text"]
        for judgement in judgements or [{"metadata": {}}]:
            ours = about | judgement["metadata"]  # if a column has the name of one of our keys, it takes precedence
            metadata = {(f"table.{key}" if key in rest else key): value for key, value in ours.items()} | rest
            record = common | judgement | {"metadata": metadata}
            if "labeler" in judgement and record["id"] is not None:
                record["id"] = f"{record['id']}:{judgement['labeler']}"
            yield record

    def _prompt(self, row: Values) -> Turns:
        parts: list[Any] = []  # turns, and texts
        paths = self.of("prompt")
        for path in paths:
            value = value_at(row, path)
            if (chat := _chat(value)) is not None:
                parts += chat_turns(chat, path)
            elif value is not None:
                text = _text(value, path) if len(paths) == 1 else _text(value, path).strip()
                parts += [text] if text else []
        turns: Turns = []
        for are_texts, run in groupby(parts, lambda part: isinstance(part, str)):
            group = list(run)
            turns += user_turn("\n\n".join(group)) if are_texts else group
        if not turns:
            raise BadRow(paths[0], f"got nothing, want the prompt{_whole_row(row)}: remove the row or fill it in")
        return with_system(self.one(row, "system"), turns)

    def _rankings(self, row: Values) -> Iterator[dict[str, Any]]:
        if self.of("rating"):
            yield self._rated(row)
        elif self.of("scores"):
            yield self._scored(row)
        elif self.of("winner"):
            yield from self._judged(row)
        elif self.of("ranked") or self.of("responses"):
            name = "ranked" if self.of("ranked") else "responses"
            cells = [cell for cell in cells_of(row, self.of(name)) if not is_empty(cell[1])]
            least = 2 if name == "ranked" else 1
            if len(cells) < least:
                came = f"got {len(cells)} responses, want {least} or more{_whole_row(row)}"
                raise BadRow(self.of(name)[0], came)
            made = _responses(cells)
            ranking = [[one["id"]] for one in made] if name == "ranked" else None
            yield {"responses": made, "ranking": ranking, "metadata": {}}

    def _judged(self, row: Values) -> Iterator[dict[str, Any]]:
        winners = self.of("winner")
        judgements = [(path, value) for path in winners if not is_empty(value := value_at(row, path))]
        if not judgements:
            raise BadRow(winners[0], f"got nothing, want a verdict{_whole_row(row)}: {_NOBODY}")
        cells = cells_of(row, self.of("responses"))
        if all(is_empty(value) for _, value in cells):
            raise BadRow(self.of("responses")[0], "got no text in any response, want what was judged")
        responses = _responses(cells)
        ids, texts = [one["id"] for one in responses], [one["text"] for one in responses]
        for path, value in judgements:
            try:
                verdict = self.vocabulary.read(value, [path for path, _ in cells], texts)
            except ValueError as error:
                raise BadRow(path, str(error)) from error
            metadata = {"preference_scale": value} if self.vocabulary.scale or verdict.strength is not None else {}
            metadata |= {} if verdict.strength is None else {"strength": verdict.strength}
            order = {"ranking": [ids]} if verdict.winner == TIE else best_of(ids[verdict.winner], ids)
            labeler = {"labeler": path} if len(winners) > 1 else {}
            yield {"responses": responses, **order, "metadata": metadata, **labeler}

    def _scored(self, row: Values) -> dict[str, Any]:
        answers, given = cells_of(row, self.of("responses")), cells_of(row, self.of("scores"), needed=False)
        if len(answers) != len(given):
            raise BadRow(self.of("scores")[0], f"got {len(given)} scores, want {len(answers)}: one per response")
        filled = [
            (answer, score)
            for answer, score in zip(answers, given, strict=True)
            if not (is_empty(answer[1]) and is_empty(score[1]))
        ]
        responses = _responses([answer for answer, _ in filled])
        scores: dict[str, float] = {}
        for response, (_, (path, value)) in zip(responses, filled, strict=True):
            if is_empty(value):
                continue
            if (number := as_number(value)) is None:
                raise BadRow(path, f"got {shown(value)}, want a number")
            scores[response["id"]] = _plain(number)
        if not scores:
            wanted = f"got nothing, want a number for each response{_whole_row(row)}: {_NOBODY}"
            raise BadRow(self.of("scores")[0], wanted)
        return {"responses": responses, "ranking": ranking_of(scores, best="highest"), "metadata": {"scores": scores}}

    def _rated(self, row: Values) -> dict[str, Any]:
        [path], [answer] = self.of("rating"), self.of("response")
        value = value_at(row, path)
        if is_empty(value):
            raise BadRow(path, f"got nothing, want a number from 1 to 7 or a verdict{_whole_row(row)}: {_NOBODY}")
        number = as_number(value)
        thumb = read_thumb(value) if self.thumbs or number is None else None
        if thumb is None and (number is None or self.thumbs or not 1 <= number <= 7):
            thumbs = "good or bad (yes, no, true, false, 1, 0, …)"
            wanted = thumbs if self.thumbs else "a number from 1 to 7, or good or bad"
            raise BadRow(path, f"got {shown(value)}, want {wanted}")
        rating = RATINGS[thumb] if thumb is not None else _plain(number or 0)
        extra = {} if self.thumbs or thumb is None else {"rating": value}
        return {"responses": [_response("a", lookup(row, answer), answer)], "ratings": {"a": rating}, "metadata": extra}


def _plain(number: float) -> float:
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _time(seconds: float) -> str | None:
    """A time given as seconds since 1970, or as milliseconds, which are larger numbers."""
    try:
        return datetime.fromtimestamp(seconds / 1000 if abs(seconds) > 1e11 else seconds, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return None


def _whole_row(row: Values) -> str:
    return " (the whole row is empty)" if all(is_empty(value) for value in row.values()) else ""


def _text(value: Any, path: str) -> str:
    """A cell as text; a number as its digits. Raises: BadRow if it is a list or an object."""
    if isinstance(value, str | bool | int | float):
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
    return (
        {"id": name, "text": "" if value is None else _text(value, path)}
        if chat is None
        else response_of(name, one_answer(chat, path))
    )


def _responses(cells: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [_response(name, value, path) for name, (path, value) in zip(letters(len(cells)), cells, strict=True)]


def cells_of(row: Values, paths: Sequence[str], *, needed: bool = True) -> list[tuple[str, Any]]:
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

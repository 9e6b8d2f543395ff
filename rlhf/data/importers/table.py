"""`format=table`: rows whose columns are named on the command line, from any CSV, spreadsheet, Parquet or JSON file.

What the columns are decides what a row gives: a ranking (responses with winners, scores or none of both; columns
ranked best first; one rated response), a demonstration, or a prompt. `make_format` takes the settings;
`Format.prepare` then looks at the first rows of each file, since 0 and 1 alone do not say what they mean. How a row
is turned is in `mapped.py`.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from rlhf.config.commands import ColumnsConfig, WordsConfig
from rlhf.config.setting import listed
from rlhf.data.conversion.mapped import Mapped, cells_of, value_at
from rlhf.data.conversion.paths import MISSING, lookup
from rlhf.data.conversion.verdicts import TIE, Vocabulary, as_number, normal, read_thumb
from rlhf.data.importers import BadRow, Format
from rlhf.data.records import first_repeat, shown
from rlhf.errors import UserError

_WANTS = "any rows, with their columns named by columns.*"
_NEAREST = 3  # column names that an error suggests
_PATHS = 300  # columns of a file that are looked at for suggestions


def make_format(columns: ColumnsConfig, words: WordsConfig) -> Format:
    """The format that these settings describe.

    Raises: UserError with every setting that is missing or does not fit the others.
    """
    paths = {field.name: tuple(map(str, listed(getattr(columns, field.name)))) for field in fields(columns)}
    mapped = {name: given for name, given in paths.items() if given}
    problems = _contradictions(mapped)
    vocabulary = Vocabulary(_words(words, mapped, problems))
    if problems:
        raise UserError("format=table: " + "; ".join(problems))
    return _format(Mapped(mapped, vocabulary))


def _format(mapped: Mapped) -> Format:
    return Format("table", _WANTS, mapped.recognise, mapped.convert, prepare=partial(_prepare, mapped))


def _contradictions(mapped: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What is missing, and what contradicts."""
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
    if answers and len(scores) > 1 and len(answers) > 1 and len(scores) != len(answers):
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


def _prepare(mapped: Mapped, name: str, rows: Sequence[Mapping[str, Any]]) -> Format:
    """The format after a look at a file's first rows: are its columns there, and what do its numbers mean.

    Raises: UserError if a column is not there, or if numbers could mean two things.
    """
    missing = [
        f"columns.{setting}={path}: {name} has no such column{_nearest(path, rows)}"
        for setting, paths in mapped.columns.items()
        for path in paths
        if all(lookup(row, path) is MISSING for row in rows)
    ]
    if rows and missing:
        raise UserError("; ".join(missing))
    judged = []
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
    return _format(replace(mapped, vocabulary=vocabulary, thumbs=_holds_thumbs(mapped, name, rows)))


def _holds_thumbs(mapped: Mapped, name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rating's numbers are verdicts: 0 or -1 occurs, and nothing but these and 1.

    Raises: UserError if every number is 1, which is the worst rating and the better verdict.
    """
    values = [value_at(row, path) for path in mapped.of("rating") for row in rows]
    numbers = {number for value in values if (number := as_number(value)) is not None}
    if numbers == {1}:
        raise UserError(
            f"columns.rating={mapped.of('rating')[0]}: {name}, first {len(rows)} rows: got only the number 1: is it good, "
            "or the lowest of 1 to 7? write good and bad, or other numbers"
        )
    words = not numbers and any(read_thumb(value) is not None for value in values)
    return words or (bool(numbers) and numbers <= {-1, 0, 1})


def _nearest(path: str, rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(one for row in rows[:20] for one in _all_paths(row)))[:_PATHS]
    lower = {one.casefold(): one for one in reversed(names)}
    close = difflib.get_close_matches(path.casefold(), list(lower), n=_NEAREST, cutoff=0.5)
    last = re.split(r"[. _]", path.casefold())[-1]
    close += [key for key in lower if last and last in key and key not in close][: max(0, _NEAREST - len(close))]
    listed = [lower[key] for key in close] or names[:8]
    said = "did you mean" if close else "it has"
    return f": {said} {', '.join(shown(one)[1:-1] for one in listed)}" + ("?" if close else "")


def _all_paths(value: Any, depth: int = 3) -> Iterator[str]:
    """The names that could be given, nested ones too."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, inner in items:
        yield str(key)
        if depth > 1:
            yield from (f"{key}.{rest}" for rest in _all_paths(inner, depth - 1))


def _unnamed(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    raise BadRow("columns", "got none, want the columns named: set columns.prompt=… and what else the file holds")


FORMAT = Format("table", _WANTS, lambda row: None, _unnamed)

"""`format=table`: rows whose columns are named on the command line, from any CSV, spreadsheet, Parquet or JSON file.

The named columns decide what a row becomes: a ranking (responses with winners, with scores or with neither; columns ranked
best first), a demonstration, or a prompt. A nested value has a dotted path: `answers.0.text`, or
`answers.*.text` for every item of a list. A column whose own name is the path takes precedence.

If `words` are set, only they are read as verdicts. Otherwise `read_phrase` reads the usual spellings, and a number is a
position (1 … K, 0 a tie) only if the column contains the number K, since 0 and 1 alone could mean two things.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from rlhf.config.commands import ColumnsConfig, WordsConfig
from rlhf.config.compose import nearest
from rlhf.config.setting import listed
from rlhf.data.formats.shapes import (
    TIE,
    BadRow,
    Format,
    Values,
    as_json,
    as_number,
    chat_turns,
    is_chat,
    is_empty,
    is_list,
    judged,
    letters,
    name_end,
    number,
    one_answer,
    other_keys,
    ranking_of,
    read_phrase,
    require,
    response_of,
    with_system,
)
from rlhf.errors import UserError
from rlhf.system.schemas import shown
from rlhf.system.terminal import one_line

MISSING = object()  # no such path; an existing null is None
WANTS = "any rows, with their columns named by columns.*"
# By kind: the columns that become fields of the record; in the other kinds they are metadata.
_FIELDS = {"demonstration": ("labeler",), "prompt": ("user",), "ranking": ("created", "labeler")}
_IN_WORDS = "a, b or tie, in words or as a column's name"
_NOBODY = "nobody judged this row, remove it or fill it in"


def lookup(value: Any, path: str) -> Any:
    """The value at a path, or MISSING; JSON in a text is parsed."""
    value = as_json(value)
    step, _, rest = path.partition(".")
    if isinstance(value, Mapping):
        if path in value:
            return value[path]
        return lookup(value[step], rest) if rest and step in value else MISSING
    if not isinstance(value, list):
        return MISSING
    if step == "*":
        items = [lookup(one, rest) if rest else one for one in value]
        return [None if one is MISSING else one for one in items] if any(i is not MISSING for i in items) else MISSING
    try:
        item = value[int(step)]
    except (ValueError, IndexError):
        return MISSING
    return lookup(item, rest) if rest else item


def value_at(row: Values, path: str) -> Any:
    """The value of a column; None if the row lacks it."""
    value = lookup(row, path)
    return None if value is MISSING else value


def normal(value: Any) -> str:
    """A word in the form for comparison: "1", 1 and 1.0 are one word; case and outer white space are ignored."""
    value_as_number = as_number(value)
    return str(value).strip().casefold() if value_as_number is None else f"{value_as_number:.15g}"


def counted(values: Sequence[Any], most: int = 8) -> str:
    """The distinct words of a column with their counts, for a message."""
    words = Counter(normal(value) for value in values if not is_empty(value))
    counts = [f"{one_line(word, 60)} ({count:,}x)" for word, count in words.most_common(most)]
    return ", ".join(counts + ["…"] * (len(words) > most))


def say_words(values: Sequence[Any] = ()) -> str:
    """What to do about verdicts that have no meaning: the settings to copy, with the commonest two words as an example."""
    common = [word for word, _ in Counter(str(v).strip() for v in values if not is_empty(v)).most_common(2)]
    names = [shlex.quote(f"words.{side}={word}") for side, word in zip(("first", "second"), common, strict=False)]
    if len(names) < 2:
        return "say what each means with words.first=… words.second=… words.tie=…"
    return f"say what each means, for example with {' '.join(names)} (and words.tie=… for a tie)"


# --- the settings ----------------------------------------------------------------------------------------------------


def make_table_format(columns: ColumnsConfig, words: WordsConfig) -> Format:
    """The format that these settings describe. Raises: UserError with every setting that is missing or does not fit."""
    paths = {one.name: tuple(map(str, listed(getattr(columns, one.name)))) for one in fields(columns)}
    mapped = {name: given for name, given in paths.items() if given}
    answers = mapped.get("responses", ())
    sides = ((words.first, 0), (words.second, 1), (words.tie, TIE))
    outcomes = {normal(word): outcome for given, outcome in sides for word in listed(given)}
    problems: list[str] = []
    if "prompt" not in mapped:
        problems.append("columns.prompt is not set: want the column with the request")
    for names in (("response", "responses", "ranked"), ("winner", "scores")):
        if len(forms := [f"columns.{name}" for name in names if name in mapped]) > 1:
            problems.append(f"{' and '.join(forms)} are given: want one of them")
    for name, other in (("winner", "responses"), ("scores", "responses")):
        if name in mapped and other not in mapped:
            problems.append(f"columns.{name} needs columns.{other}: name what was judged")
    if len(mapped.get("winner", ())) > 1 and "labeler" in mapped:
        problems.append("columns.labeler with several columns.winner: want one, since each column is a labeler")
    ends = [name_end(path) for path in answers]
    if "winner" in mapped and not outcomes and ends != sorted(ends) and sorted(ends) in (["a", "b"], ["1", "2"]):
        problems.append(
            f"columns.responses: want the order {', '.join(sorted(answers, key=name_end))}: a or 1 as a winner means the first"
        )
    if outcomes and ("winner" not in mapped or len(answers) > 2):
        problems.append("words.* need columns.winner and two columns.responses")
    if outcomes and not {0, 1} <= set(outcomes.values()):
        problems.append("words.* are not complete: want words.first and another words.second, and words.tie for ties")
    if problems:
        raise UserError("format=table: " + "; ".join(problems))
    return _format(ColumnMap(mapped, outcomes))


def _format(columns: "ColumnMap", note: str = "") -> Format:
    return Format("table", WANTS, columns.convert, prepare=partial(_prepare, columns), note=note)


def _prepare(columns: "ColumnMap", name: str, rows: Sequence[Values]) -> Format:
    """The format after a look at a file's first rows. Raises: UserError if a column is not there, or numbers are ambiguous."""
    keys = list(rows[0])
    missing = [
        f"columns.{setting}={path}: {name} has no such column{nearest(path, keys) or f': it has {shown(keys, 200)}'}"
        for setting, paths in columns.paths.items()
        for path in paths
        if all(lookup(row, path) is MISSING for row in rows)
    ]
    if missing:
        raise UserError("; ".join(missing))

    winners = columns.of("winner")
    if not winners:
        return _format(columns)

    def ambiguous(said: Sequence[Any]) -> UserError:
        where = f"columns.winner={','.join(winners)}: {name}, first {len(rows)} rows"
        return UserError(f"{where}: got {counted(said)}: {say_words(said)}")

    said = [value for row in rows for value in columns.said(row).values()]
    positions = {n for value in said if (n := as_number(value)) is not None} if not columns.words else set()
    k = 0  # the most responses of a row
    for row in rows:
        with suppress(BadRow):
            k = max(k, len(columns.cells(row, "responses")))
    if positions and not (k in positions and min(positions) >= 0 and max(positions) <= k):
        raise ambiguous(said)
    chosen = replace(columns, numbers=bool(positions))
    unread = [value for row in rows for value in chosen.unread(row)]
    if 2 * len(unread) > len(said) or any(name_end(str(value)) == "0" for value in unread):  # model_0: counted from 0
        raise ambiguous(unread)
    meaning = {0: "first", 1: "second", TIE: "tie"}
    words = ", ".join(f"{word} ({meaning[outcome]})" for word, outcome in columns.words.items())
    words = words or ("numbers: 1 the first, 2 the second, 0 a tie" if positions else _IN_WORDS)
    return _format(chosen, f"{', '.join(winners)}: {words}")


# --- a row -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """The columns by meaning, each a list of paths; and how judgements are read."""

    paths: Mapping[str, tuple[str, ...]]
    words: Mapping[str, int] = field(default_factory=dict)  # normal word -> 0, 1 or TIE; empty: `read_phrase`
    numbers: bool = False  # whether numbers are positions

    def of(self, name: str) -> tuple[str, ...]:
        return self.paths.get(name, ())

    def one(self, row: Values, name: str) -> Any:
        """The value of a column that a row may leave empty."""
        value = value_at(row, self.of(name)[0]) if self.of(name) else None
        return None if is_empty(value) else value

    def cells(self, row: Values, name: str) -> dict[str, Any]:
        """The cells of several columns, or the items of the list in a single one, by path."""
        paths = self.of(name)
        if len(paths) > 1:
            cells = {path: lookup(row, path) for path in paths}
            absent = [path for path, value in cells.items() if value is MISSING]
            require(not absent or name != "responses", ", ".join(absent), None, "a response")
            return {path: None if value is MISSING else value for path, value in cells.items()}
        items = as_json(value_at(row, paths[0]))
        require(isinstance(items, list | None), paths[0], items, "a list, or one column per response")
        return {f"{paths[0]}.{i}": item for i, item in enumerate(items or [])}

    def said(self, row: Values) -> dict[str, Any]:
        """The verdicts of a row by column."""
        return {path: value for path in self.of("winner") if not is_empty(value := value_at(row, path))}

    def convert(self, row: Values) -> Iterator[dict[str, Any]]:
        """The records of one row, several if several labelers judged it. Raises: BadRow, also if nobody judged."""
        judgements = list(self._rankings(row))
        kind = "ranking" if judgements else "demonstration" if self.of("response") else "prompt"
        kept = [path for path in self.of("winner") if is_empty(value_at(row, path))]
        used = [path for paths in self.paths.values() for path in paths if path not in kept]
        rest = other_keys(row, *used)
        about = {key: str(v) for key in ("user", "created", "labeler") if (v := self.one(row, key)) is not None}
        if (seconds := as_number(about.get("created"))) is not None:  # since 1970, or milliseconds
            about["created"] = datetime.fromtimestamp(seconds / (1000 if seconds > 1e11 else 1), UTC).isoformat()
        name = self.one(row, "id")
        common: dict[str, Any] = {"kind": kind, "prompt": self._prompt(row), "id": None if name is None else str(name)}
        common |= {key: about.pop(key) for key in _FIELDS[kind] if key in about}
        if kind == "demonstration":
            path = self.of("response")[0]
            common["response"] = _response("", value_at(row, path), path)["text"]
        for judgement in judgements or [{"metadata": {}}]:
            record = common | judgement | {"metadata": about | judgement["metadata"] | rest}
            if len(self.of("winner")) > 1 and record["id"] is not None:
                record["id"] = f"{record['id']}:{judgement['labeler']}"
            yield record

    def _prompt(self, row: Values) -> Any:
        paths = self.of("prompt")
        first = as_json(value_at(row, paths[0]))
        if len(paths) == 1 and (chat := _chat(first)):
            turns: Any = chat_turns(chat, paths[0])
        else:
            texts = [_text(value, path) for path in paths if (value := value_at(row, path)) is not None]
            turns = texts[0] if len(texts) == 1 else "\n\n".join(text.strip() for text in texts if text.strip())
        return with_system(self.one(row, "system"), turns)

    def _rankings(self, row: Values) -> Iterator[dict[str, Any]]:
        if self.of("scores"):
            yield self._scored(row)
        elif self.of("winner"):
            yield from self._judged(row)
        elif self.of("ranked") or self.of("responses"):
            name = "ranked" if self.of("ranked") else "responses"
            made = _responses({path: cell for path, cell in self.cells(row, name).items() if not is_empty(cell)})
            least = 2 if name == "ranked" else 1
            require(len(made) >= least, self.of(name)[0], [one["text"] for one in made], f"{least} or more responses")
            ranking = [[one["id"]] for one in made] if name == "ranked" else None
            yield {"responses": made, "ranking": ranking, "metadata": {}}

    def _judged(self, row: Values) -> Iterator[dict[str, Any]]:
        winners, said = self.of("winner"), self.said(row)
        if not said:
            raise BadRow(winners[0], f"got nothing, want a verdict: {_NOBODY}")
        cells = self.cells(row, "responses")
        responses = _responses(cells)
        require(any(one["text"] for one in responses), self.of("responses")[0], None, "the responses that were judged")
        for path, value in said.items():
            winner = self._verdict(value, path, list(cells), [one["text"] for one in responses])
            in_words = as_number(value) is None and not self.words
            labeler = {"labeler": path} if len(winners) > 1 else {}
            metadata = {"preference_scale": value} if in_words else {}
            yield {"responses": responses, **judged(winner, letters(len(cells))), "metadata": metadata, **labeler}

    def unread(self, row: Values) -> list[Any]:
        """The verdicts of a row that have no meaning."""
        unread: list[Any] = []
        with suppress(BadRow):  # of the responses
            cells = self.cells(row, "responses")
            texts = [one["text"] for one in _responses(cells)]
            for path, value in self.said(row).items():
                try:
                    self._verdict(value, path, list(cells), texts)
                except BadRow:
                    unread.append(value)
        return unread

    def _verdict(self, value: Any, path: str, names: list[str], texts: list[str]) -> int:
        """What a cell says: one of `words`; else a column's name, a position, a known spelling or a response's text."""
        word, k, position = normal(value), len(names), as_number(value)
        if self.words:
            require(word in self.words, path, value, f"one of {', '.join(self.words)}: add it to one of words.*")
            return self.words[word]
        same = [i for i, text in enumerate(texts) if text.strip().casefold() == word]
        by_name = [i for i, name in enumerate(names) if normal(name) == word]
        verdict = read_phrase(value, k) if isinstance(value, str) else None
        if self.numbers and position in (*range(k + 1), *((1.5,) if k == 2 else ())):
            verdict = TIE if position in (0, 1.5) else int(position or 0) - 1
        if len(by_name) == 1:
            verdict = by_name[0]
        elif len(same) == 1 and verdict is None:
            verdict = same[0]
        if verdict is None or (same and same != [verdict]):
            wanted = f"1 to {k}, 0 a tie" if self.numbers else _IN_WORDS
            raise BadRow(path, f"got {shown(value)}, want {wanted}{', not a text' if same else ''}: {say_words()}")
        return verdict

    def _scored(self, row: Values) -> dict[str, Any]:
        answers, given = self.cells(row, "responses"), self.cells(row, "scores")
        wanted = f"{len(answers)} scores, one per response"
        require(len(answers) == len(given), self.of("scores")[0], list(given), wanted)
        both = zip(answers.items(), given.items(), strict=True)
        filled = [pair for pair in both if not all(is_empty(cell) for _, cell in pair)]
        named = list(zip(letters(len(filled)), filled, strict=True))
        responses = [_response(name, answer, path) for name, ((path, answer), _) in named]
        scores = {name: number(score, path) for name, (_, (path, score)) in named if not is_empty(score)}
        if not scores:
            raise BadRow(self.of("scores")[0], f"got nothing, want a number for each response: {_NOBODY}")
        return {"responses": responses, "ranking": ranking_of(scores, best="highest"), "metadata": {"scores": scores}}


def _text(value: Any, path: str) -> str:
    """A cell as text; a number as its digits. Raises: BadRow if it is a list or an object."""
    inside = f"text: name what is inside, as {path}.0" if isinstance(value, list) else "text"
    require(isinstance(value, str | bool | int | float), path, value, inside)
    return str(value)


def _chat(value: Any) -> list[Any] | None:
    """The turns in a cell, a list or a single one, also as JSON text; None if it has none."""
    value = as_json(value)
    turns = [value] if isinstance(value, dict) else value
    return turns if is_chat(turns) or (is_list(turns, dict) and all("from" in turn for turn in turns)) else None


def _response(name: str, value: Any, path: str) -> dict[str, Any]:
    """One response: text, or an assistant's turn, alone or in a list of one. An empty cell is an empty answer."""
    if (chat := _chat(value)) is not None:
        return response_of(name, one_answer(chat, path))
    return {"id": name, "text": "" if value is None else _text(value, path)}


def _responses(cells: Mapping[str, Any]) -> list[dict[str, Any]]:
    named = zip(letters(len(cells)), cells.items(), strict=True)
    return [_response(name, value, path) for name, (path, value) in named]


# --- the proposed column map -----------------------------------------------------------------------------------------

_PROMPT = re.compile("prompt|instruction|question|query|request|input|frage|^q$", re.I)
_ANSWER = re.compile("answer|response|completion|output|reply|summary|antwort", re.I)
_WORSE = re.compile("worse|worst|reject|lose|bad|schlecht", re.I)
_ASIDE = re.compile("(^|_)(id|source|hash|sha256|model|original|lang(uage)?|is|tokens|length|score|rating)(_|$)", re.I)
_VERDICT = re.compile("winner|label|prefer|choice|better|vote|verdict|annotator|urteil", re.I)


def propose_columns(rows: Sequence[Values]) -> str:
    """Proposed settings of `format=table` for such rows, guessed from the columns' names."""
    texts = [key for key in rows[0] if any(isinstance(row.get(key), str) for row in rows)]
    named = [key for key in texts if not _ASIDE.search(key)]
    prompts = [key for key in named if _PROMPT.search(key)]
    prompts = prompts[: 1 + (prompts[:2] == ["instruction", "input"])]
    answers = [key for key in named if _ANSWER.search(key) and key not in prompts]
    answers = answers or [key for key in named if re.search("chosen|reject", key, re.I)]
    winners = [key for key in rows[0] if _VERDICT.search(key) and key not in (*prompts, *answers)]
    winners.sort(key=lambda key: key.lower() == "annotator")  # a person's name beside a verdict
    proposed = [f"columns.prompt={_setting(prompts) or '…'}"]
    if len(answers) == 1:
        proposed += [f"columns.response={_setting(answers)}"]
    elif answers:
        worse = [name for name in answers if _WORSE.search(name)]
        if worse and not winners:
            proposed.append(f"columns.ranked={_setting([*(name for name in answers if name not in worse), *worse])}")
        else:
            proposed += [f"columns.responses={_setting(answers)}", f"columns.winner={_setting(winners[:1]) or '…'}"]
    return " ".join(proposed)


def _setting(names: Sequence[str]) -> str:
    text = ",".join(names) if len(names) < 2 else f"[{','.join(names)}]"
    return f"'{text}'" if re.search(r"[\s\[]", text) else text

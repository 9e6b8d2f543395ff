"""`format=table`: rows whose columns are named on the command line, from any CSV, spreadsheet, Parquet or JSON file.

The named columns decide what a row becomes: a ranking (responses with winners, with scores or with neither; columns
ranked best first), a demonstration, or a prompt. A nested value has a dotted path, see `lookup`.

If `words` are set, only they are read as verdicts. Otherwise `read_phrase` reads the usual spellings, and a number is a
position (1 … K, 0 a tie) only if the column contains the number K, since 0 and 1 alone could mean two things.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
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
    judged,
    letters,
    name_end,
    number,
    other_keys,
    ranking_of,
    read_phrase,
    require,
    with_system,
)
from rlhf.errors import UserError
from rlhf.system.schemas import shown
from rlhf.system.terminal import one_line

MISSING = object()  # no such path; an existing null is None
WANTS = "any rows, with their columns named by columns.*"
_IN_WORDS = "a, b or tie, in words or as a column's name"
_NOBODY = "nobody judged this row, remove it or fill it in"
_SAY_WORDS = "say what each means with words.first=… words.second=… words.tie=…"


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


def make_table_format(columns: ColumnsConfig, words: WordsConfig) -> Callable[[str, Sequence[Values]], Format]:
    """How files get the format that these settings describe. Raises: UserError with every setting that is missing or does not fit."""
    paths = {one.name: tuple(map(str, listed(getattr(columns, one.name)))) for one in fields(columns)}
    answers, winners = paths["responses"], paths["winner"]
    sides = ((words.first, 0), (words.second, 1), (words.tie, TIE))
    outcomes = {normal(word): outcome for given, outcome in sides for word in listed(given)}
    forms, judgements = (
        [f"columns.{name}" for name in names if paths[name]]
        for names in (("response", "responses", "ranked"), ("winner", "scores"))
    )
    ordered = sorted(answers, key=name_end)
    ends = [name_end(path) for path in ordered]
    several = len(winners) > 1 and paths["labeler"]
    swapped = winners and not outcomes and ordered != list(answers) and ends in (["a", "b"], ["1", "2"])
    misplaced = outcomes and not (winners and len(answers) <= 2)
    incomplete = outcomes and not {0, 1} <= set(outcomes.values())
    checks: list[tuple[Any, str]] = [
        (not paths["prompt"], "columns.prompt is not set: want the column with the request"),
        *((len(given) > 1, f"{' and '.join(given)} are given: want one of them") for given in (forms, judgements)),
        *((not answers, f"{given} needs columns.responses: name what was judged") for given in judgements),
        (several, "columns.labeler with several columns.winner: want one, since each column is a labeler"),
        (swapped, f"columns.responses: want the order {', '.join(ordered)}: a or 1 as a winner means the first"),
        (misplaced, "words.* need columns.winner and two columns.responses"),
        (incomplete, "words.* are not complete: want words.first and another words.second, and words.tie for ties"),
    ]
    if problems := [problem for wrong, problem in checks if wrong]:
        raise UserError("format=table: " + "; ".join(problems))
    return partial(_prepare, paths, outcomes)


def _prepare(paths: dict[str, tuple[str, ...]], words: dict[str, int], name: str, rows: Sequence[Values]) -> Format:
    """The format after a look at a file's first rows. Raises: UserError if a column is not there, or verdicts are not clear."""
    keys = list(rows[0])
    missing = [
        f"columns.{setting}={path}: {name} has no such column{nearest(path, keys) or f': it has {shown(keys, 200)}'}"
        for setting, given in paths.items()
        for path in given
        if all(lookup(row, path) is MISSING for row in rows)
    ]
    if missing:
        raise UserError("; ".join(missing))
    columns, winners, note = ColumnMap(paths, words), paths["winner"], ""
    if winners:
        columns.numbers, looked = True, []
        for row in rows:
            with suppress(BadRow):
                looked.append(columns.judge(row))
        said = [verdict for _, verdicts in looked for verdict in verdicts.values()]
        positions = {n for value, _ in said if (n := as_number(value)) is not None} if not words else set()
        k = max((len(responses) for responses, _ in looked), default=0)
        clear = not positions or (k in positions and min(positions) >= 0 and max(positions) <= k)
        columns.numbers = bool(positions)
        unread = [value for value, winner in said if winner is None or not clear]
        if 2 * len(unread) > len(said) or any(name_end(str(v)) == "0" for v in unread):  # model_0: counted from 0
            where = f"columns.winner={','.join(winners)}: {name}, first {len(rows)} rows"
            raise UserError(f"{where}: {_ask_for_words(unread)}")
        meaning = ("first", "second", "tie")  # TIE is -1
        note = ", ".join(f"{word} ({meaning[outcome]})" for word, outcome in words.items())
        note = note or ("numbers: 1 the first, 2 the second, 0 a tie" if columns.numbers else _IN_WORDS)
        note = f"{', '.join(winners)}: {note}"
    return Format("table", WANTS, columns.convert, why="asked for", note=note)


def _ask_for_words(unread: list[Any]) -> str:
    """The distinct words with their counts, and the settings to copy."""
    counts = Counter(normal(value) for value in unread).most_common()
    words = [f"{one_line(word, 60)} ({count:,}x)" for word, count in counts[:8]] + ["…"] * (len(counts) > 8)
    example = shlex.join(f"words.{side}={word}" for side, (word, _) in zip(("first", "second"), counts, strict=False))
    remedy = f"say what each means, for example with {example} (and words.tie=… for a tie)"
    return f"got {', '.join(words)}: {remedy if len(counts) > 1 else _SAY_WORDS}"


@dataclass(slots=True)
class ColumnMap:
    """The columns by meaning, each a list of paths; and how judgements are read."""

    paths: Mapping[str, tuple[str, ...]]
    words: Mapping[str, int]  # normal word -> 0, 1 or TIE; empty: `read_phrase`
    numbers: bool = False  # whether numbers are positions

    def one(self, row: Values, name: str) -> Any:
        """The value of a column that a row may leave empty."""
        value = value_at(row, self.paths[name][0]) if self.paths[name] else None
        return None if is_empty(value) else value

    def cells(self, row: Values, name: str) -> dict[str, Any]:
        """The cells of several columns, or the items of the list in a single one, by path."""
        paths = self.paths[name]
        if len(paths) > 1:
            absent = [path for path in paths if lookup(row, path) is MISSING]
            require(not absent or name != "responses", ", ".join(absent), None, "a response")
            return {path: value_at(row, path) for path in paths}
        items = as_json(value_at(row, paths[0]))
        require(isinstance(items, list | None), paths[0], items, "a list, or one column per response")
        return {f"{paths[0]}.{i}": item for i, item in enumerate(items or [])}

    def convert(self, row: Values) -> Iterator[dict[str, Any]]:
        """The records of one row, several if several labelers judged it. Raises: BadRow, also if nobody judged."""
        judgements = list(self._rankings(row))
        kind = "ranking" if judgements else "demonstration" if self.paths["response"] else "prompt"
        rest = other_keys(row, *(path for paths in self.paths.values() for path in paths))
        # a record moves those of them for which it has no field to its metadata
        named = ((key, self.one(row, key)) for key in ("id", "user", "created", "labeler"))
        common: dict[str, Any] = {key: str(value) for key, value in named if value is not None}
        if (seconds := as_number(common.get("created"))) is not None:  # since 1970, or milliseconds
            common["created"] = datetime.fromtimestamp(seconds / (1000 if seconds > 1e11 else 1), UTC).isoformat()
        common |= {"kind": kind, "prompt": self._prompt(row)}
        if kind == "demonstration":
            common["response"] = _text(value_at(row, path := self.paths["response"][0]), path)
        for judgement in judgements or [{"metadata": {}}]:
            record = common | judgement | {"metadata": judgement["metadata"] | rest}
            if len(self.paths["winner"]) > 1 and "id" in record:
                record["id"] = f"{record['id']}:{judgement['labeler']}"
            yield record

    def _prompt(self, row: Values) -> Any:
        paths = self.paths["prompt"]
        turns: Any = as_json(value_at(row, paths[0]))
        turns = [turns] if isinstance(turns, dict) else turns
        if len(paths) == 1 and is_chat(turns):
            turns = chat_turns(turns, paths[0])
        else:
            texts = [_text(value, path) for path in paths if (value := value_at(row, path)) is not None]
            turns = texts[0] if len(texts) == 1 else "\n\n".join(text.strip() for text in texts if text.strip())
        return with_system(self.one(row, "system"), turns)

    def _rankings(self, row: Values) -> Iterator[dict[str, Any]]:
        if self.paths["scores"]:
            yield self._scored(row)
        elif self.paths["winner"]:
            yield from self._judged(row)
        elif name := next((name for name in ("ranked", "responses") if self.paths[name]), None):
            made = _responses({path: cell for path, cell in self.cells(row, name).items() if not is_empty(cell)})
            least, texts = 2 if name == "ranked" else 1, [one["text"] for one in made]
            require(len(made) >= least, self.paths[name][0], texts, f"{least} or more responses")
            ranking = [[one["id"]] for one in made] if name == "ranked" else None
            yield {"responses": made, "ranking": ranking, "metadata": {}}

    def judge(self, row: Values) -> tuple[list[dict[str, Any]], dict[str, tuple[Any, int | None]]]:
        """A row's responses, and by column of winners its verdict and the one that it means (or TIE); None if that is not clear."""
        said = {path: value for path in self.paths["winner"] if not is_empty(value := value_at(row, path))}
        if not said:
            raise BadRow(self.paths["winner"][0], f"got nothing, want a verdict: {_NOBODY}")
        responses = _responses(cells := self.cells(row, "responses"))
        texts = [one["text"] for one in responses]
        require(any(texts), self.paths["responses"][0], None, "the responses that were judged")
        return responses, {path: (value, self._verdict(value, list(cells), texts)) for path, value in said.items()}

    def _judged(self, row: Values) -> Iterator[dict[str, Any]]:
        responses, verdicts = self.judge(row)
        k = len(responses)
        wanted = f"1 to {k}, 0 a tie" if self.numbers else _IN_WORDS
        wanted = f"one of {', '.join(self.words)}" if self.words else wanted
        for path, (value, winner) in verdicts.items():
            if winner is None:
                raise BadRow(path, f"got {shown(value)}, want {wanted}: {_SAY_WORDS}")
            labeler = {"labeler": path} if len(self.paths["winner"]) > 1 else {}
            metadata = {"preference_scale": value} if as_number(value) is None and not self.words else {}
            yield {"responses": responses, **judged(winner, letters(k)), "metadata": metadata, **labeler}

    def _verdict(self, value: Any, names: list[str], texts: list[str]) -> int | None:
        """What a cell says: one of `words`; else a column's name, a position, a known spelling or a response's text."""
        word, k, position = normal(value), len(names), as_number(value)
        if self.words:
            return self.words.get(word)
        same = [i for i, text in enumerate(texts) if text.strip().casefold() == word]
        by_name = [i for i, name in enumerate(names) if normal(name) == word]
        verdict = read_phrase(value, k) if isinstance(value, str) else None
        if self.numbers and position in (*range(k + 1), *((1.5,) if k == 2 else ())):
            verdict = TIE if position in (0, 1.5) else int(position or 0) - 1
        if len(by_name) == 1:
            verdict = by_name[0]
        elif len(same) == 1 and verdict is None:
            verdict = same[0]
        return None if same and same != [verdict] else verdict  # a text that means another one is not clear

    def _scored(self, row: Values) -> dict[str, Any]:
        answers, given = self.cells(row, "responses"), self.cells(row, "scores")
        wanted = f"{len(answers)} scores, one per response"
        require(len(answers) == len(given), self.paths["scores"][0], list(given), wanted)
        both = zip(answers.items(), given.items(), strict=True)
        filled = [pair for pair in both if not all(is_empty(cell) for _, cell in pair)]
        responses = _responses(dict(answer for answer, _ in filled))
        named = zip(letters(len(filled)), filled, strict=True)
        scores = {name: number(score, path) for name, (_, (path, score)) in named if not is_empty(score)}
        if not scores:
            raise BadRow(self.paths["scores"][0], f"got nothing, want a number for each response: {_NOBODY}")
        return {"responses": responses, "ranking": ranking_of(scores, best="highest"), "metadata": {"scores": scores}}


def _text(value: Any, path: str) -> str:
    """A cell as text; a number as its digits. Raises: BadRow if it is a list or an object."""
    inside = f"text: name what is inside, as {path}.0" if isinstance(value, list) else "text"
    require(isinstance(value, str | bool | int | float), path, value, inside)
    return str(value)


def _responses(cells: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells as responses; an empty one is an empty answer."""
    named = zip(letters(len(cells)), cells.items(), strict=True)
    return [{"id": name, "text": "" if value is None else _text(value, path)} for name, (path, value) in named]


_PROMPT = re.compile("prompt|instruction|question|query|request|input|frage|^q$", re.I)
_ANSWER = re.compile("answer|response|completion|output|reply|summary|antwort|chosen|reject", re.I)
_WORSE = re.compile("worse|worst|reject|lose|bad|schlecht", re.I)
_ASIDE = re.compile("(^|_)(id|source|hash|sha256|model|original|lang(uage)?|is|tokens|length|score|rating)(_|$)", re.I)
_VERDICT = re.compile("winner|label|prefer|choice|better|vote|verdict|annotator|urteil", re.I)


def propose_columns(rows: Sequence[Values]) -> str:
    """Proposed settings of `format=table` for such rows, guessed from the columns' names."""
    texts = [key for key in rows[0] if any(isinstance(row.get(key), str) for row in rows) and not _ASIDE.search(key)]
    prompts = [key for key in texts if _PROMPT.search(key)]
    prompts = prompts[: 1 + (prompts[:2] == ["instruction", "input"])]
    answers = [key for key in texts if _ANSWER.search(key) and key not in prompts]
    winners = [key for key in rows[0] if _VERDICT.search(key) and key not in (*prompts, *answers)]
    winners.sort(key=lambda key: key.lower() == "annotator")  # a person's name beside a verdict
    proposed = {"prompt": prompts}
    if len(answers) == 1:
        proposed["response"] = answers
    elif not winners and any(map(_WORSE.search, answers)):
        proposed["ranked"] = sorted(answers, key=lambda name: bool(_WORSE.search(name)))
    elif answers:
        proposed |= {"responses": answers, "winner": winners[:1]}
    said = ((name, f"[{','.join(names)}]" if len(names) > 1 else "".join(names)) for name, names in proposed.items())
    return " ".join(f"columns.{name}={shlex.quote(value) if value else '…'}" for name, value in said)

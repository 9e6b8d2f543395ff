"""The meaning of a labeler's word: which of K responses is better, a tie, and by how much if the scale has steps.

Words given on the command line decide alone. Otherwise one table of spellings counts; a number says a position (1 … K, 0 a
tie) only if the column holds the number K, since 0 and 1 alone could mean two things.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rlhf.data.formats.shapes import as_number, is_empty
from rlhf.data.records import shown

TIE = -1
_STRAY = 0.05  # share of a column's numbers that may be mistakes
_SIDES = {"first": 0, "one": 0, "left": 0, "second": 1, "two": 1, "right": 1, "third": 2, "three": 2}
_NOUN = "(?:model|response|assistant|completion|answer|output|option|candidate|text|summary|system|choice|side|chatbot)"
_SIDE = f"(?:the )?(?:{_NOUN} ?)?(?P<side>[a-z]|[1-9]|{'|'.join(_SIDES)})(?: one| {_NOUN})?"
_DEGREES = {
    "slightly": 1,
    "somewhat": 1,
    "a bit": 1,
    "a little": 1,
    "marginally": 1,
    "moderately": 2,
    "much": 3,
    "far": 3,
}
_DEGREES |= {"significantly": 3, "clearly": 3, "strongly": 3, "a lot": 3}
_WORD = "better|preferred|best|wins|win|won|worse|loses|lost"
_PHRASE = re.compile(rf"{_SIDE}(?:(?: is| was)?(?: (?P<degree>{'|'.join(_DEGREES)}))? (?P<word>{_WORD})(?: than .*)?)?")
_SIGNS = re.compile(f"(?:{_NOUN} ?)?([ab12]) ?(>+|<+|=+|~|≈) ?(?:{_NOUN} ?)?([ab12])")
_TIES = re.compile(
    "tie|tied|a tie|draw|equal|equally (?:good|bad)|both|neither|same|the same|about (?:equal|the same)|no preference|"
    "no difference|(?:tie )?both ?(?:are )?(?:good|bad)"
)
_GOOD = re.compile(
    "true|yes|y|good|up|likes?|liked|positive|accept(ed|able)?|desirable|correct|helpful|pass|thumbs up|👍|1"
)
_BAD = re.compile(
    "false|no|n|bad|down|dislikes?|disliked|negative|reject(ed)?|unacceptable|undesirable|incorrect|unhelpful|fail|"
    "thumbs down|👎|0|-1"
)
_SAY = "say what each means with words.first=… words.second=… words.tie=…"


class Verdict(NamedTuple):
    """Which response is better, from 0, or TIE; by how much (1 slightly, 2, 3 much), if the word states it."""

    winner: int
    strength: float | None = None


def ordered(winner: int, ids: list[str]) -> list[list[str]]:
    """Two responses in the order of a verdict."""
    return [ids] if winner == TIE else [[ids[winner]], [ids[1 - winner]]]


def normal(value: Any) -> str:
    """A word in the form for comparison: "1", 1 and 1.0 are one word; case and outer white space are ignored."""
    value_as_number = as_number(value)
    return str(value).strip().casefold() if value_as_number is None else f"{value_as_number:.15g}"


def read_thumb(value: Any) -> bool | None:
    """A verdict on one response, good or bad; None if it is neither."""
    word = re.sub(r"[\s_]+", " ", normal(value))
    return True if _GOOD.fullmatch(word) else False if _BAD.fullmatch(word) else None


def read_phrase(text: str, k: int) -> Verdict | None:
    """A spelling that names one of K responses or a tie; None if it does neither. A bare number is none."""
    words = re.sub(r"[\s_\-/,;:.!?()\[\]\"'*]+", " ", text.casefold()).strip()
    if _TIES.fullmatch(words):
        return Verdict(TIE)
    if match := _SIGNS.fullmatch(words):
        one, other = (int(side in "b2") for side in (match[1], match[3]))
        if one == other or match[2][0] in "=~≈":
            return Verdict(TIE) if one != other else None
        return Verdict(one if match[2][0] == ">" else other, len(match[2]))
    match = _PHRASE.fullmatch(words)
    if match is None or words.isdecimal():
        return None
    word, name = match["word"], match["side"]
    side = _SIDES[name] if name in _SIDES else int(name) - 1 if name.isdecimal() else ord(name) - ord("a")
    worse = word in ("worse", "loses", "lost")
    if side >= k or (worse and k != 2):
        return None
    return Verdict(1 - side if worse else side, _DEGREES.get(match["degree"], 2) if word else None)


def counted(values: Sequence[Any], most: int = 8) -> str:
    """The distinct words of a column with their counts, for a message."""
    words = Counter(normal(value) for value in values if not is_empty(value))
    listed = [f"{shown(word)[1:-1]} ({count:,}x)" for word, count in words.most_common(most)]
    return ", ".join(listed + ["…"] * (len(words) > most))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How one file's judgements are read."""

    words: Mapping[str, int] = field(default_factory=dict)  # normal word -> 0, 1 or TIE; empty: the table of spellings
    numbers: bool = False  # whether numbers are positions
    scale: bool = False  # whether some of the file's words state by how much

    def looked_at(self, cells: Sequence[tuple[Any, int]]) -> "Vocabulary":
        """The vocabulary for many judgements, each with the K of its row. Raises: ValueError if numbers could mean two things."""
        seen = [(value, k) for value, k in cells if not is_empty(value)]
        if self.words or not seen:
            return self
        phrases = [read_phrase(value, k) for value, k in seen if isinstance(value, str)]
        numbers = [(number, k) for value, k in seen if (number := as_number(value)) is not None]
        strays = sum(not 0 <= n <= k for n, k in numbers)  # a slip in one row makes it a reject, no more
        if numbers and (strays > _STRAY * len(numbers) or not any(n == k for n, k in numbers)):
            raise ValueError(f"got {counted([value for value, _ in seen])}: {_SAY}")
        return replace(
            self, numbers=bool(numbers), scale=any(p is not None and p.strength is not None for p in phrases)
        )

    def read(self, value: Any, names: Sequence[str], texts: Sequence[str]) -> Verdict:
        """One cell's verdict over the responses whose columns and texts these are. Raises: ValueError if it is unknown."""
        word = normal(value)
        if self.words:
            if word in self.words:
                return Verdict(self.words[word])
            raise ValueError(f"got {shown(value)}, want {self.described()}: add it to one of words.*")
        verdict = self._usual(value, names)
        same = [i for i, text in enumerate(texts) if isinstance(value, str) and text.strip() == value.strip()]
        if same and (verdict is None or [verdict.winner] != same):
            if verdict is not None or len(same) > 1:
                raise ValueError(f"got {shown(value)}, which is also the text of a response: say it with words.*")
            return Verdict(same[0])
        if verdict is None:
            raise ValueError(f"got {shown(value)}, want {self.described()}: {_SAY}")
        return verdict

    def _usual(self, value: Any, names: Sequence[str]) -> Verdict | None:
        by_name = [i for i, name in enumerate(names) if normal(name) == normal(value)]
        if len(by_name) == 1:
            return Verdict(by_name[0])
        number = as_number(value)
        if number is None:
            return read_phrase(value, len(names)) if isinstance(value, str) else None
        if not self.numbers or number not in (*range(len(names) + 1), *((1.5,) if len(names) == 2 else ())):
            return None
        return Verdict(TIE if number in (0, 1.5) else int(number) - 1)

    def described(self) -> str:
        """A short description of how judgements are read."""
        if self.words:
            names = {0: "first", 1: "second", TIE: "tie"}
            return ", ".join(f"{word} ({names[outcome]})" for word, outcome in self.words.items())
        if self.numbers:
            return "numbers: 1 the first, 2 the second, 0 a tie"
        return "a, b or tie, in words or as a column's name" + (", with steps of preference" if self.scale else "")

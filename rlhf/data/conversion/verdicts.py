"""The meaning of a labeler's word: which of K responses is better, a tie, and by how much if the scale has steps.

If words are given on the command line, only those count. Otherwise common phrases are read ("model_a", "B is slightly
better", "left", "A>>B", "tie (bothbad)"), and numbers are read by all numbers of the column:

- some number is K (2 of two responses): 1 is the first, K the last, 0 a tie, and 1.5 of two as well;
- some number is negative, of two responses: a scale from the first (below 0) to the second (above 0), 0 a tie;
- anything else, above all only 0 and 1, could mean two things and is refused: set words.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlhf.data.records import shown

TIE = -1
_NOUN = (
    "(?:model|response|assistant|completion|answer|output|option|candidate|text|summary|reply|system|generation|"
    "sample|choice|side|version|chatbot)"
)
_SIDES = "[a-z]|[1-9]|one|two|three|first|second|third|left|right"
_SLIGHT = "slightly|somewhat|a bit|a little|marginally|mildly|barely"
_STRONG = "much|far|a lot|significantly|clearly|strongly|considerably|definitely|vastly"
_DEGREE = f"(?P<degree>{_SLIGHT}|{_STRONG}|moderately)"
_SIDE = f"(?:the )?(?:{_NOUN} ?)?(?P<side>{_SIDES})(?: (?:one|{_NOUN}))?"
_PHRASES = tuple(
    re.compile(pattern)
    for pattern in (
        f"{_SIDE}",
        f"(?:{_SIDE})(?: is| was)?(?: {_DEGREE})? (?P<word>better|preferred|best|wins|win|won|worse|loses|lost)"
        f"(?: than .*)?",
        f"(?:i )?(?:{_DEGREE} )?(?P<word>prefer|preferred|better|choose) {_SIDE}",
    )
)
_SIGNS = re.compile(f"(?:{_NOUN} ?)?(?P<one>a|b|1|2) ?(?P<sign>>+|<+|=+|~|≈) ?(?:{_NOUN} ?)?(?P<other>a|b|1|2)")
_TIES = re.compile(
    "(?:a )?(?:tie|draw)|tied|equal|equally(?: good| bad)?|both|neither|(?:the |about the )?same|(?:about|roughly) equal|"
    "no (?:preference|difference)|(?:tied? )?both ?(?:are )?(?:good|bad)"
)
_WORDS = {"one": 0, "first": 0, "left": 0, "two": 1, "second": 1, "right": 1, "three": 2, "third": 2}
_GOOD = re.compile(
    "true|yes|y|good|up|likes?|liked|positive|accept(?:ed|able)?|desirable|correct|helpful|pass|thumbs up|👍|1"
)
_BAD = re.compile(
    "false|no|n|bad|down|dislikes?|disliked|negative|reject(?:ed)?|unacceptable|undesirable|incorrect|unhelpful|fail|"
    "thumbs down|👎|0|-1"
)
_NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d{1,20})?")
_SHOWN = 6
_STRAY = 0.05  # share of a column's numbers that may be mistakes


class Verdict(NamedTuple):
    """Which response is better, from 0, or `TIE`; by how much (1 slightly, 2, 3 much), if the word states it."""

    winner: int
    strength: float | None = None


def ordered(winner: int, ids: list[str]) -> list[list[str]]:
    """Two responses in the order of a verdict."""
    return [ids] if winner == TIE else [[ids[winner]], [ids[1 - winner]]]


def normal(value: Any) -> str:
    """A word in the form for comparison: "1", 1 and 1.0 are one word; case and outer white space are ignored."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value).strip().casefold()
    if _NUMBER.fullmatch(text):
        number = float(text)
        return str(int(number)) if number.is_integer() else repr(number)
    return text


def is_empty(value: Any) -> bool:
    """Whether a cell holds no judgement."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def read_thumb(value: Any) -> bool | None:
    """A verdict on one response, good or bad; None if it is neither."""
    word = re.sub(r"[\s_]+", " ", normal(value))
    return True if _GOOD.fullmatch(word) else False if _BAD.fullmatch(word) else None


def as_number(value: Any) -> float | None:
    """A number, or text that is one; true and false are not numbers."""
    text = normal(value)
    return float(text) if not isinstance(value, bool) and _NUMBER.fullmatch(text) else None


def read_phrase(text: str, k: int) -> Verdict | None:
    """A phrase that names one of K responses or a tie; None if it does neither. A bare number is not a phrase."""
    words = re.sub(r"[\s_\-/,;:.!?()\[\]\"'*]+", " ", text.casefold()).strip()
    if _TIES.fullmatch(words):
        return Verdict(TIE)
    if match := _SIGNS.fullmatch(words):
        return _compared(match)
    for pattern in _PHRASES:
        if (match := pattern.fullmatch(words)) and not words.isdecimal():
            side = _side(match["side"])
            groups = match.groupdict()
            worse = groups.get("word") in ("worse", "loses", "lost")
            if side >= k or (worse and k != 2):
                return None
            strength = _strength(groups.get("degree")) if "word" in groups else None
            return Verdict(1 - side if worse else side, strength)
    return None


def _side(word: str) -> int:
    return _WORDS[word] if word in _WORDS else int(word) - 1 if word.isdecimal() else ord(word) - ord("a")


def _strength(degree: str | None) -> int:
    return 2 if degree is None or degree == "moderately" else 1 if degree in _SLIGHT.split("|") else 3


def _compared(match: re.Match[str]) -> Verdict | None:
    """ "A>>B" and its like."""
    one, other = _side(match["one"]), _side(match["other"])
    if one == other:
        return None
    if match["sign"][0] in "=~≈":
        return Verdict(TIE)
    steps = len(match["sign"])
    return Verdict(one if match["sign"][0] == ">" else other, steps)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How one file's judgements are read."""

    words: Mapping[str, int] = field(default_factory=dict)  # normal word -> 0, 1 or TIE; None: the usual words
    numbers: str = "undecided"  # positions (1 … K), signed, or undecided
    scale: bool = False  # whether some of the file's words state by how much

    def looked_at(self, cells: Sequence[tuple[Any, int]]) -> "Vocabulary":
        """The vocabulary for many judgements, each with the K of its row.

        Raises: ValueError if their numbers could mean two things.
        """
        if self.words:
            return self
        seen = [(value, k) for value, k in cells if not is_empty(value)]
        phrases = [read_phrase(value, k) for value, k in seen if isinstance(value, str)]
        scale = any(phrase is not None and phrase.strength is not None for phrase in phrases)
        pairs = [(number, k) for value, k in seen if (number := as_number(value)) is not None]
        numbers = sorted({number for number, _ in pairs})
        if not numbers:
            return Vocabulary(self.words, self.numbers, scale)
        rare = _STRAY * len(pairs)  # a mistake in one row makes it a reject, but must not reverse the scale of all
        negative, beyond = (sum(test(*pair) for pair in pairs) for test in (lambda n, k: n < 0, lambda n, k: n > k))
        if negative > rare and all(k == 2 for _, k in pairs):
            return Vocabulary(self.words, "signed", scale or max(abs(numbers[0]), numbers[-1]) > 1)
        if not negative and beyond <= rare and any(number == k for number, k in pairs):
            return Vocabulary(self.words, "places", scale)
        raise ValueError(ambiguous(numbers, max(k for _, k in pairs)))

    def read(self, value: Any, names: Sequence[str], texts: Sequence[str]) -> Verdict:
        """One cell's verdict over the responses whose columns and texts these are.

        Raises: ValueError if it is unknown or ambiguous.
        """
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
            raise ValueError(f"got {shown(value)}, want {self.described()}: say what it means with words.*")
        return verdict

    def _usual(self, value: Any, names: Sequence[str]) -> Verdict | None:
        word = normal(value)
        by_name = [i for i, name in enumerate(names) if normal(name) == word]
        if len(by_name) == 1:
            return Verdict(by_name[0])
        number = as_number(value)
        if number is not None:
            return self._number(number, len(names))
        if isinstance(value, bool) or not isinstance(value, str):
            if isinstance(value, bool):
                raise ValueError(f"got {word}: is that the first response? say words.first={word}, words.second=…")
            return None
        return read_phrase(value, len(names))

    def _number(self, number: float, k: int) -> Verdict | None:
        if self.numbers == "signed":
            strength = abs(number) if self.scale and number else None
            return Verdict(TIE if number == 0 else 0 if number < 0 else 1, strength)
        if self.numbers == "undecided" and number in (0, 1) and k > 1:
            raise ValueError(ambiguous([number], k))
        if number == 0 or (number == 1.5 and k == 2):
            return Verdict(TIE)
        return Verdict(int(number) - 1) if number.is_integer() and 1 <= number <= k else None

    def described(self) -> str:
        """A short description of how judgements are read."""
        if self.words:
            names = {0: "first", 1: "second", TIE: "tie"}
            return ", ".join(f"{word} ({names[outcome]})" for word, outcome in self.words.items())
        numbers = {
            "places": "numbers: 1 the first, 2 the second, 0 a tie",
            "signed": "numbers: below 0 the first, above 0 the second, 0 a tie",
            "undecided": "a, b or tie, in words or as a column's name",
        }
        return numbers[self.numbers] + (", with steps of preference" if self.scale else "")


def ambiguous(numbers: Sequence[float], k: int) -> str:
    """Why such numbers are refused, and what to do."""
    listed = [normal(number) for number in numbers[:_SHOWN]] + ["…"] * (len(numbers) > _SHOWN)
    came = " and ".join(listed) if len(listed) < 3 else ", ".join(listed)
    asks = "is 0 the first response or a tie?" if 0 in numbers else "is 1 the first response or the second?"
    if k > 2:
        return f"got the numbers {came} for {k} responses: {asks} put the names of the responses' columns instead"
    if max(numbers) > k or min(numbers) < 0:
        asks = "which end is the first response?"
    return f"got only the numbers {came}: {asks} say words.first=… words.second=… words.tie=…"

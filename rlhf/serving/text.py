"""The text of tokens as they arrive: complete characters only, no possible beginning of a stop string, each character once."""

from collections.abc import Sequence
from typing import Any

WINDOW = 8  # tokens before the new ones that are decoded with them, since neighbours may change a token's spelling


class TextStream:
    """The text of a response that can be shown so far."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int], stops: Sequence[str] = (), offsets: bool = False):
        self.decode, self.end_tokens, self.stops = tokenizer.backend_tokenizer.decode, end_tokens, tuple(stops)
        self.one_by_one = offsets or bool(stops)
        self.ids: list[int] = []
        self.text = ""  # of the first `decoded` ids
        self.decoded = 0
        self.shown = 0  # characters returned so far
        self.ends: list[int] = []  # per id, the length of the text with it; if `offsets`
        self.stopped = False

    def add(self, ids: Sequence[int], over: bool = False) -> str:
        """The new characters after more tokens; after a stop string or the end, the last ones."""
        if self.stopped:
            return ""
        for part in [[token] for token in ids] if self.one_by_one else [ids]:
            self.ids += part
            self._decode(final=False)
            if self._find_stop():
                break
        if over and not self.stopped:
            self._decode(final=True)
            self._find_stop()
        limit = len(self.text) if over or self.stopped else len(self.text) - self._held_back()
        piece, self.shown = self.text[self.shown : limit], max(self.shown, limit)
        return piece

    def _decode(self, final: bool) -> None:
        start = max(0, self.decoded - WINDOW)
        before, after = self._spell(start, self.decoded), self._spell(start, len(self.ids))
        if final or not after.endswith("�"):  # an incomplete character waits for the next token
            self.text += after[len(before) :]
            self.decoded = len(self.ids)
        while len(self.ends) < len(self.ids):
            self.ends.append(len(self.text))

    def _spell(self, start: int, end: int) -> str:
        return self.decode([i for i in self.ids[start:end] if i not in self.end_tokens], skip_special_tokens=True)

    def _find_stop(self) -> bool:
        """Cut the text before the first stop string in the text not yet shown."""
        longest = max(map(len, self.stops), default=0)
        start = max(0, self.shown - longest)
        places = [place for stop in self.stops if (place := self.text.find(stop, start)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True
        return self.stopped

    def _held_back(self) -> int:
        """The number of last characters that may be the beginning of a stop string."""
        lengths = (n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        return max(lengths, default=0)

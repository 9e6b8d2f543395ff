"""A response's text while its tokens are drawn."""

from collections.abc import Collection, Sequence
from typing import Any


class TextStream:
    """The text of tokens as they arrive: complete characters only, no possible beginning of a stop string, each character once."""

    def __init__(self, tokenizer: Any, ends: Collection[int], stops: Sequence[str] = ()):
        self.decode, self.ends, self.stops = tokenizer.backend_tokenizer.decode, ends, stops
        self.ids: list[int] = []
        self.text = ""
        self.shown = 0  # characters returned so far
        self.stopped = False

    def add(self, ids: Sequence[int], over: bool = False) -> str:
        """The new characters after more tokens; after a stop string or the end, the last ones."""
        before = len(self.ids)
        self.ids += ids
        self.text = self.spell(len(self.ids))
        if self._stop() is not None:  # the response ends with the first token that completes a stop string
            for count in range(before + 1, len(self.ids) + 1):
                self.text = self.spell(count)
                if (stop := self._stop()) is not None:
                    self.ids, self.text, self.stopped = self.ids[:count], self.text[:stop], True
                    break
        limit = len(self.text)
        if not over and not self.stopped:
            limit = len(self.text.rstrip("�"))  # an incomplete character waits for the next token
            ends = (n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
            limit = min(limit, len(self.text) - max(ends, default=0))
        piece, self.shown = self.text[self.shown : limit], max(self.shown, limit)
        return piece

    def spell(self, count: int) -> str:
        """The text of the first tokens."""
        ids = [i for i in self.ids[:count] if i not in self.ends]
        return self.decode(ids, skip_special_tokens=True)

    def _stop(self) -> int | None:
        """Where the first stop string begins."""
        return min((place for stop in self.stops if (place := self.text.find(stop)) >= 0), default=None)

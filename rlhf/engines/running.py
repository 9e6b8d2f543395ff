"""A running batch whose sequences join and leave between tokens, and the text of each meanwhile: the sampler for a
server. Models that are not ours are stepped one sequence at a time, each with its own cache.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rlhf.engines.choosing import Choice, Key, choose_tokens, default_batch, hashed, uniforms_at
from rlhf.engines.decoder import GROWTH, Decoder, power_of_two
from rlhf.model.interface import lm

PREFILL_TOKENS = 2048  # tokens of prompts that are read between two tokens of the others; one prompt may be longer


@dataclass(slots=True, eq=False)
class Response:
    """One response in progress."""

    prompt: list[int]
    choice: Choice
    seed: int
    key: Key
    max_new_tokens: int
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cache: Any = None  # of a model that is not ours

    @property
    def ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.ends

    @property
    def finished(self) -> bool:
        return self.ended or len(self.tokens) == self.max_new_tokens

    @property
    def columns(self) -> int:
        """The columns of keys and values that it may need."""
        return len(self.prompt) + self.max_new_tokens


class RunningBatch:
    """Responses of one model that are drawn together, at most `rows` at once."""

    def __init__(self, model: Any, rows: int):
        self.model, self.rows = model.eval(), rows
        self.responses: list[Response] = []  # in the order of the rows
        self.decoder = Decoder(model) if lm(model).native else None
        self.device = next(model.parameters()).device
        self.most_rows = lru_cache(lambda blocks: default_batch(model, blocks * GROWTH))

    def __len__(self) -> int:
        return len(self.responses)

    def fitting(self, waiting: Sequence[Response]) -> list[Response]:
        """The first of the waiting responses, as many as can join at the next step: by rows, memory and the length of prompts."""
        new: list[Response] = []
        for one in waiting[: self.rows - len(self)]:
            together = [*self.responses, *new, one]
            rows = self.most_rows(-(-max(other.columns for other in together) // GROWTH))
            tokens = sum(len(other.prompt) for other in [*new, one])
            if len(together) > max(rows, 1) or (new and tokens > PREFILL_TOKENS):
                break
            new.append(one)
        return new

    @torch.inference_mode()
    def advance(self, new: Sequence[Response] = ()) -> None:
        """Draw one more token of every response, none of which may be finished, and the first one of new ones."""
        if self.decoder is None:
            logits = torch.cat([self._forward(one) for one in [*self.responses, *new]])
        else:
            if new:
                rows = power_of_two(len(self) + len(new))
                self.decoder.reserve(rows, max(one.columns for one in [*self.responses, *new]))
            last = torch.tensor([one.tokens[-1] for one in self.responses], dtype=torch.int64, device=self.device)
            logits = self.decoder.advance(last, [one.prompt for one in new])
        self.responses += new
        self._choose(logits)

    @torch.inference_mode()
    def leave(self, response: Response) -> None:
        """Take a response out, finished or not."""
        row = self.responses.index(response)
        if self.decoder is not None:
            self.decoder.drop(torch.arange(len(self.responses), device=self.device) == row)
        self.responses[row], response.cache = self.responses[-1], None
        self.responses.pop()

    def _forward(self, one: Response) -> Tensor:
        """Logits (1, V) of a model that is not ours after one more token of a response; without a cache its whole text is read."""
        known = inspect.signature(self.model.forward).parameters
        more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        text = one.prompt + one.tokens
        if one.cache is not None:
            if "position_ids" in known:  # some classes count from 0 in each call
                more["position_ids"] = torch.tensor([[len(text) - 1]], device=self.device)
            text = text[-1:]
        output = self.model(torch.tensor([text], device=self.device), past_key_values=one.cache, use_cache=True, **more)
        one.cache = getattr(output, "past_key_values", None)  # some classes have none
        return output.logits[:, -1]

    def _choose(self, logits: Tensor) -> None:
        """Draw a token per row; rows with the same sampling settings are drawn together."""
        alike, responses = dict[Choice, list[int]](), self.responses
        for row, one in enumerate(responses):
            alike.setdefault(one.choice, []).append(row)
        hashes = [hashed(one.seed, one.key) for one in responses]
        uniforms = uniforms_at(hashes, [len(one.tokens) for one in responses]).to(self.device)
        for choice, rows in alike.items():
            some = slice(None) if len(rows) == len(responses) else rows
            tokens, logp = choose_tokens(logits[some], uniforms[some], choice)
            for row, token, value in zip(rows, tokens.tolist(), logp.tolist(), strict=True):
                responses[row].tokens.append(token)
                responses[row].logprobs.append(value)


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
        return self.decode([i for i in self.ids[:count] if i not in self.ends], skip_special_tokens=True)

    def _stop(self) -> int | None:
        """Where the first stop string begins."""
        return min((place for stop in self.stops if (place := self.text.find(stop)) >= 0), default=None)

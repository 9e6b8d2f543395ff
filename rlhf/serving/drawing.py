"""From a request to its responses: prompts as tokens, places in the engine's queue, text as it is drawn."""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlhf.config.setting import LEAST_TEMPERATURE
from rlhf.data.chat_template import encode_prompt
from rlhf.data.splits import prompt_key
from rlhf.data.tokenizer import encode_text
from rlhf.engines.choosing import Choice, Key
from rlhf.errors import UserError
from rlhf.serving.engine import Engine, Generation
from rlhf.serving.errors import RefusedError
from rlhf.serving.models import ServedModel
from rlhf.serving.streaming import merged
from rlhf.serving.text import TextStream

STOP_SECONDS = 0.1  # seconds between two searches for a stop string in a response that is not streamed
T = TypeVar("T")
SHORT = 4000  # longest prompt (characters) that is encoded directly: a longer one would delay the others


@dataclass(frozen=True, slots=True)
class Wish:
    """The sampling settings of a request."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stops: tuple[str, ...] = ()
    alternatives: int = 0  # number of alternatives per token that are requested
    offsets: bool = False  # whether the position of each token in the text is requested


@dataclass(slots=True)
class Piece:
    """New text of one response and the positions of its tokens; the reason if it has ended."""

    index: int
    text: str
    first: int
    last: int
    finish: str | None


class Drawn:
    """The responses to one request. `close` always frees their places."""

    def __init__(
        self, engine: Engine, model: ServedModel, prompts: Sequence[list[int]], keys: Sequence[Key], wish: Wish
    ):
        greedy = wish.temperature < LEAST_TEMPERATURE
        choice = Choice(1.0 if greedy else wish.temperature, wish.top_p, greedy=greedy)
        self.engine, self.model = engine, model
        self.seed = secrets.randbits(32) if wish.seed is None else wish.seed
        self.prompt_tokens = sum(map(len, prompts))
        self.generations, self.texts = [], []
        for prompt, key in zip(prompts, keys, strict=True):
            length = _room(model, prompt, wish.max_tokens)
            for j in range(wish.n):
                response_key = (*key, j) if isinstance(key, tuple) else (key, j)
                one = Generation(prompt, choice, self.seed, response_key, length, model.ends, wish.alternatives)
                self.generations.append(one)
                self.texts.append(TextStream(model.tokenizer, model.ends, wish.stops, wish.offsets))
        if len(self.generations) > engine.rows + engine.queue:
            raise RefusedError(
                400, f"{len(self.generations)} responses at once: want at most {engine.rows + engine.queue}"
            )
        engine.submit(model.name, self.generations)

    @property
    def completion_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)

    def close(self) -> None:
        self.engine.cancel(self.generations)

    async def pieces(self, index: int, pause: float | None = None) -> AsyncIterator[Piece]:
        """One response piece by piece; the last piece has the reason of its end.

        pause: least seconds before a piece; None: the first at once, the others at the engine's interval.
        """
        one, text = self.generations[index], self.texts[index]
        seen = 0
        while True:
            count = await one.more(seen, pause if pause is not None else self.engine.pause if seen else 0.0)
            over = one.finished and count == len(one.tokens)
            piece = text.add(one.tokens[seen:count], over)
            finish = None
            if text.stopped or over:
                finish = "stop" if text.stopped or one.ended else "length"
            elif one.over:  # cancelled: the client has gone
                finish = "stop"
            yield Piece(index, piece, seen, len(text.ids), finish)
            if finish:
                self.engine.cancel([one])
                return
            seen = count

    async def all_pieces(self) -> AsyncIterator[Piece]:
        """The pieces of all responses in the order of their arrival."""
        if len(self.generations) == 1:
            async for piece in self.pieces(0):
                yield piece
            return
        async for _, piece in merged([self.pieces(i) for i in range(len(self.generations))]):
            yield piece

    async def whole(self) -> list[str | None]:
        """Wait for all responses; returns the reason of each one's end."""
        reasons: list[str | None] = [None] * len(self.generations)
        pause = STOP_SECONDS if self.texts[0].stops else math.inf
        for index in range(len(self.generations)):
            async for piece in self.pieces(index, pause):
                reasons[index] = piece.finish
        return reasons


async def encoded(function: Callable[[ServedModel, Any], T], model: ServedModel, prompt: Any) -> T:
    """`chat_prompt` or `text_prompt`; a long prompt is encoded in a thread."""
    text = prompt if isinstance(prompt, str) else "".join(str(getattr(part, "content", "")) for part in prompt)
    if len(text) <= SHORT:
        return function(model, prompt)
    return await asyncio.to_thread(function, model, prompt)


def chat_prompt(model: ServedModel, messages: Sequence[Any]) -> tuple[list[int], Key]:
    """A dialogue's tokens, and the key under which `rlhf generate` draws its responses. Raises: RefusedError."""
    try:
        return encode_prompt(model.tokenizer, messages), ("generate", prompt_key(messages))
    except UserError as error:
        raise RefusedError(400, str(error), "messages") from None


def text_prompt(model: ServedModel, prompt: str | list[int]) -> tuple[list[int], Key]:
    """A text's tokens, or the tokens given, and their key. Raises: RefusedError."""
    ids = encode_text(model.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise RefusedError(400, "the prompt is empty: want at least one token", "prompt")
    if wrong := [i for i in ids if not 0 <= i < model.vocabulary]:
        raise RefusedError(400, f"token {wrong[0]}: the vocabulary has {model.vocabulary}", "prompt")
    return ids, ("completion", prompt if isinstance(prompt, str) else tuple(prompt))


def _room(model: ServedModel, prompt: list[int], asked: int | None) -> int:
    """The most tokens of a response. Raises: RefusedError if the context is too short for it."""
    room = model.context - len(prompt)
    length = min(model.max_new_tokens, room) if asked is None else asked
    if room < 1 or length > room:
        raise RefusedError(
            400,
            f"the model's context is {model.context} tokens: the prompt has {len(prompt)}"
            + (f" and max_tokens is {asked}" if asked is not None else "")
            + ": shorten it",
            "messages",
            "context_length_exceeded",
        )
    return length

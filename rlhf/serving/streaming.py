"""From a request to its responses: prompts as tokens, and text as it is drawn, whole or as server-sent events."""

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from fastapi.responses import Response as HttpResponse

from rlhf.config.setting import LEAST_TEMPERATURE
from rlhf.data.chat_template import encode_prompt
from rlhf.data.records import Message
from rlhf.data.splits import prompt_key
from rlhf.data.tokenizer import encode_text
from rlhf.engines.choosing import Choice
from rlhf.engines.running import Response
from rlhf.engines.text_stream import TextStream
from rlhf.errors import UserError
from rlhf.serving.model_thread import Generation, ModelThread, ServedModel
from rlhf.serving.schemas import Sampling
from rlhf.serving.security import Receive, RefusedError, Scope, Send

STOP_SECONDS = 0.1  # seconds between two searches for a stop string in a response that is not streamed
PIECES_PER_SECOND = 300  # pieces per second of all streams together: with more streams, each has longer pieces

Prompt = tuple[list[int], tuple]  # tokens, and the key of their responses' random numbers
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


async def chat_prompt(model: ServedModel, messages: Sequence[Message]) -> Prompt:
    """A dialogue's tokens, and the key under which `rlhf generate` draws its responses. Raises: RefusedError."""
    try:
        ids = await asyncio.to_thread(encode_prompt, model.tokenizer, messages)
    except UserError as error:
        raise RefusedError(400, str(error), "messages") from None
    return ids, ("generate", prompt_key(messages))


async def completion_prompt(model: ServedModel, prompt: str | list[int]) -> Prompt:
    """A text's tokens, or the tokens given, and their key. Raises: RefusedError."""
    ids = prompt if isinstance(prompt, list) else await asyncio.to_thread(encode_text, model.tokenizer, prompt)
    if not ids:
        raise RefusedError(400, "the prompt is empty: want at least one token", "prompt")
    if wrong := [i for i in ids if not 0 <= i < model.vocabulary]:
        raise RefusedError(400, f"token {wrong[0]}: the vocabulary has {model.vocabulary}", "prompt")
    return ids, ("completion", tuple(prompt) if isinstance(prompt, list) else prompt)


class Chunk(NamedTuple):
    """New text of one response and the positions of its tokens; the reason if it has ended."""

    place: int
    text: str
    first: int
    last: int
    finish: str | None


class Completion:
    """The responses to one request: `asked.n` to each prompt. `close` always frees their places.

    alternatives: the number of alternatives to report with each token. Raises: RefusedError if the responses do not fit the
    model's context, the server's limits or its queue.
    """

    def __init__(
        self, thread: ModelThread, prompts: Sequence[tuple[ServedModel, Prompt]], asked: Sampling, alternatives: int = 0
    ):
        temperature = 1.0 if asked.temperature is None else asked.temperature
        greedy = temperature < LEAST_TEMPERATURE
        choice = Choice(1.0 if greedy else temperature, asked.top_p or 1.0, greedy=greedy)
        self.thread, self.stops = thread, asked.stops()
        self.seed = secrets.randbits(32) if asked.seed is None else asked.seed
        self.prompt_tokens = sum(len(ids) for _, (ids, _) in prompts)
        self.changed, self.generations = asyncio.Event(), list[Generation]()
        for model, (ids, key) in prompts:
            length = room_of(model, ids, asked.max_tokens, thread.most_tokens)
            for j in range(asked.n or 1):
                response = Response(ids, choice, self.seed, (*key, j), length, model.ends, alternatives)
                self.generations.append(Generation(model, response, self.changed))
        self.texts = [TextStream(one.model.tokenizer, one.model.ends, self.stops) for one in self.generations]
        thread.submit(self.generations)

    @property
    def completion_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)

    def close(self) -> None:
        self.thread.cancel(self.generations)

    async def chunks(self, pause: float | None = None) -> AsyncIterator[Chunk]:
        """The responses piece by piece, in the order of arrival; the last chunk of each has the reason of its end.

        pause: least seconds before a chunk; None: the first at once, the others so that all streams together have
        PIECES_PER_SECOND. Raises: ModelFailedError.
        """
        for one in self.generations:
            one.due = 0.0 if pause is None else time.monotonic() + pause
        unfinished = set(range(len(self.generations)))
        while unfinished:
            self.changed.clear()
            for index in sorted(unfinished):
                if (chunk := self._next_chunk(index)) is not None:
                    every = len(self.thread) / PIECES_PER_SECOND if pause is None else pause
                    self.generations[index].due = time.monotonic() + every
                    if chunk.finish:
                        unfinished.remove(index)
                        self.thread.cancel([self.generations[index]])
                    yield chunk
            if unfinished:
                await self.changed.wait()

    def _next_chunk(self, index: int) -> Chunk | None:
        """What is new of a response, if it is due."""
        one, text = self.generations[index], self.texts[index]
        response, seen = one.response, len(text.ids)
        over, count = one.over, len(response.logprobs)  # in this order: the last token comes before the end
        if one.error is not None:
            raise one.error
        complete = response.finished and count == len(response.tokens)
        if not over and not complete and (count == seen or time.monotonic() < one.due):
            return None
        piece = text.add(response.tokens[seen:count], complete)
        finish = None
        if text.stopped or complete:
            finish = "stop" if text.stopped or response.ended else "length"
        elif over:  # cancelled: the client has gone
            finish = "stop"
        return Chunk(index, piece, seen, len(text.ids), finish)

    async def whole(self) -> list[Chunk]:
        """Wait for all responses; each as one chunk."""
        reasons = {}
        async for chunk in self.chunks(STOP_SECONDS if self.stops else math.inf):
            reasons[chunk.place] = chunk.finish
        return [Chunk(i, text.text, 0, len(text.ids), reasons[i]) for i, text in enumerate(self.texts)]


def room_of(model: ServedModel, prompt: list[int], asked: int | None, limit: int) -> int:
    """The most tokens of a response. Raises: RefusedError if the context or the server's limit is too small for it."""
    room = model.context - len(prompt)
    if asked is not None and asked > limit:
        raise RefusedError(400, f"max_tokens={asked}: this server allows at most {limit}", "max_tokens")
    length = min(model.max_new_tokens, room) if asked is None else asked
    if room < 1 or length > room:
        more = f" and max_tokens is {asked}" if asked is not None else ""
        message = f"the model's context is {model.context} tokens: the prompt has {len(prompt)}{more}: shorten it"
        raise RefusedError(400, message, "messages", "context_length_exceeded")
    return length


# ------------------------------------------------------------------------------------------------- events


class EventStream(HttpResponse):
    """A response of events, each (text, whether more follows), which ends the completion when the client disconnects."""

    def __init__(self, completion: Completion, events: AsyncIterator[tuple[str, bool]]):
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.completion, self.events = completion, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(client_gone(receive))
        leaving.add_done_callback(lambda _: self.completion.close())
        try:
            start: dict[str, Any] | None = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            async for text, more in self.events:
                if start is not None:  # with the first event, in one write
                    await send(start)
                    start = None
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
        finally:
            leaving.cancel()


async def client_gone(receive: Callable[[], Any]) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def event(body: dict[str, Any]) -> str:
    """One event as it is sent."""
    return f"data: {to_json(body)}\n\n"

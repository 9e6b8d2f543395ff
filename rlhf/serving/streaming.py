"""Server-sent events: text drawn while a client reads slowly becomes one event; drawing stops when the client disconnects."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from fastapi.responses import Response

from rlhf.serving.security import Receive, Scope, Send

T = TypeVar("T")
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Stream(Response):
    """A response of events, each (text, whether more follows). leave: stops the source of the events."""

    def __init__(self, leave: Callable[[], None], events: AsyncIterator[tuple[str, bool]]):
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.leave, self.events = leave, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(client_gone(receive))
        leaving.add_done_callback(lambda _: self.leave())
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
    return f"data: {_to_json(body)}\n\n"


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """The items of several iterators as they arrive, each with the number of its iterator."""
    done = object()
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(maxsize=len(streams))

    async def follow(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                await queue.put((index, item))
            await queue.put((index, done))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(follow(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is done:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()

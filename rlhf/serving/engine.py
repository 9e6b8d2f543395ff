"""The thread that runs the models: it draws every request's next token together, and scores between tokens.

A request is a `Generation`. It waits in its model's queue, joins the running batch when there is room for its keys and
values, and leaves when it is finished or its client has gone. The web server's coroutines are woken after each token; they
read what is there at their own pace, so that a slow reader holds up nobody.
"""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

from rlhf.model.generate import default_batch
from rlhf.model.gpt import GPTForCausalLM
from rlhf.model.packed import packed_weights
from rlhf.model.slots import Response, RunningBatch
from rlhf.terminal import one_line, say

PREFILL_TOKENS = 2048  # of prompts that are read between two tokens of the others; one prompt may be longer
T = TypeVar("T")


class QueueFullError(Exception):
    """As many requests wait as may."""


class ModelFailedError(Exception):
    """A model raised an error while it drew a response, or the server is stopping."""


class Generation:
    """One response on its way; made and read in an event loop, drawn in the engine's thread."""

    def __init__(self, response: Response):
        self.response = response
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.error: BaseException | None = None
        self.cancelled = self.over = False

    async def more(self, seen: int) -> int:
        """Wait until there are more than `seen` tokens, or there will be none; returns how many there are.

        Raises: ModelFailedError.
        """
        while True:
            self.changed.clear()
            over, count = self.over, len(self.response.logprobs)  # in this order: the last token comes before the end
            if self.error is not None:
                raise ModelFailedError("the model failed on this request") from self.error
            if count > seen or over:
                return count
            await self.changed.wait()


class _Lane:
    """One model: what runs and what waits."""

    def __init__(self, model: Any, rows: int):
        self.model, self.rows = model, rows
        self.batch = RunningBatch(model, rows)
        self.running: list[Generation] = []
        self.waiting: deque[Generation] = deque()


class Engine:
    """Runs the models of a server, at most `rows` responses of each at a time; up to `queue` more wait."""

    def __init__(self, models: dict[str, Any], rows: int, queue: int):
        self.lanes = {name: _Lane(model, rows) for name, model in models.items()}
        self.queue, self.rows = queue, rows
        self.jobs: deque[tuple[Callable[[], Any], Future]] = deque()
        self.wake = threading.Condition()
        self.stopping = False
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    # ------------------------------------------------------------------------------- called from other threads

    def submit(self, model: str, generations: list[Generation]) -> None:
        """Queue the responses of one request. Raises: QueueFullError."""
        lane = self.lanes[model]
        with self.wake:
            room = self.rows - len(lane.running) + self.queue - len(lane.waiting)
            if self.stopping or len(generations) > room:
                raise QueueFullError
            lane.waiting += generations
            self.wake.notify()

    def cancel(self, generations: list[Generation]) -> None:
        """Take responses out that nobody waits for any more."""
        with self.wake:
            for one in generations:
                one.cancelled = True
            self.wake.notify()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function of the models between two tokens. Raises: QueueFullError."""
        future: Future[T] = Future()
        with self.wake:
            if self.stopping or len(self.jobs) >= self.queue:
                raise QueueFullError
            self.jobs.append((function, future))
            self.wake.notify()
        return future

    def load(self) -> dict[str, tuple[int, int]]:
        """Responses that run and that wait, per model."""
        with self.wake:
            return {name: (len(lane.running), len(lane.waiting)) for name, lane in self.lanes.items()}

    def stop(self) -> None:
        """End the thread; what it has not finished fails."""
        with self.wake:
            self.stopping = True
            self.wake.notify()
        self.thread.join()

    # -------------------------------------------------------------------------------------- the engine's thread

    def _run(self) -> None:
        with ExitStack() as packed:
            for lane in self.lanes.values():
                if isinstance(lane.model, GPTForCausalLM):
                    packed.enter_context(packed_weights(lane.model, self.rows))
            while True:
                with self.wake:
                    self.wake.wait_for(self._has_work)
                    if self.stopping:
                        break
                    job = self.jobs.popleft() if self.jobs else None
                if job is not None:
                    _do(*job)
                for lane in self.lanes.values():
                    self._advance(lane)
        for lane in self.lanes.values():
            self._fail(lane, ModelFailedError("the server is stopping"))
        while self.jobs:
            self.jobs.popleft()[1].cancel()

    def _has_work(self) -> bool:
        return self.stopping or bool(self.jobs) or any(lane.running or lane.waiting for lane in self.lanes.values())

    def _advance(self, lane: _Lane) -> None:
        """One more token of each running response of a model; new ones join first, and draw their first."""
        try:
            self._leave(lane)
            if lane.running:
                lane.batch.step()
            new = self._admit(lane)
            if new:
                lane.batch.join([one.response for one in new])
        except Exception as error:  # one bad request must not end the others' server
            say(f"serve: {type(error).__name__}: {one_line(error)}", sys.stderr)
            self._fail(lane, error)
            lane.batch = RunningBatch(lane.model, self.rows)
            return
        _wake(lane.running)
        self._leave(lane)

    def _leave(self, lane: _Lane) -> None:
        """Take out what is finished or not wanted any more."""
        over = [one for one in lane.running if one.cancelled or one.response.finished]
        for one in over:
            lane.batch.leave(one.response)
            one.over = True
        with self.wake:
            gone = {id(one) for one in over}
            lane.running = [one for one in lane.running if id(one) not in gone]
            lane.waiting = deque(one for one in lane.waiting if not one.cancelled)
        _wake(over)

    def _admit(self, lane: _Lane) -> list[Generation]:
        """The first of the queue, as many as there is room for in the batch and in memory."""
        new: list[Generation] = []
        tokens = 0
        with self.wake:
            while lane.waiting and len(lane.running) < self.rows:
                response = lane.waiting[0].response
                tokens += len(response.prompt)
                columns = max(one.response.columns for one in [*lane.running, lane.waiting[0]])
                fits = len(lane.running) < default_batch(lane.model, columns)
                if lane.running and (not fits or (new and tokens > PREFILL_TOKENS)):
                    break
                new.append(lane.waiting.popleft())
                lane.running.append(new[-1])
        return new

    def _fail(self, lane: _Lane, error: BaseException) -> None:
        with self.wake:
            failed = [*lane.running, *lane.waiting]
            lane.running, lane.waiting = [], deque()
        for one in failed:
            one.error, one.over = error, True
        _wake(failed)


def _do(function: Callable[[], Any], future: Future) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _wake(generations: list[Generation]) -> None:
    """Wake the coroutines that wait for these, each event loop once."""
    loops = {id(one.loop): one.loop for one in generations}
    for loop in loops.values():
        own = [one.changed for one in generations if one.loop is loop]
        try:
            loop.call_soon_threadsafe(_set_all, own)
        except RuntimeError:  # the loop is closed: nobody waits
            continue


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()

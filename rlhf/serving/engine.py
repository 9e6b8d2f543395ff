"""The web server's end of the process that runs the models: requests to it, and its results.

A request's responses are `Generation`s. A thread reads the worker's messages, one per step for all responses, and wakes the
coroutines that are due: those whose response has ended, and those whose last piece is old enough. Each reads at its own pace,
so a slow reader delays nobody.
"""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.engines.choosing import Choice, Key
from rlhf.errors import UserError
from rlhf.serving.errors import RefusedError

PIECES_PER_SECOND = 300  # pieces per second of all streams together: with more streams, each has longer pieces
# Seconds between two looks for results. A thread that waited in `recv` would have to be woken by the worker at every step,
# which can cost the worker a tenth of a step.
LOOK_SECONDS = 0.002
ENDED = "the models' process has ended: start the server again"


class QueueFullError(RefusedError):
    def __init__(self) -> None:
        super().__init__(429, "the queue is full: try again in a moment", code="rate_limit_exceeded", retry_after=1)


class ModelFailedError(RefusedError):
    """A model raised an error during sampling, or the server is stopping."""

    def __init__(self, message: str = "the model failed on this request"):
        super().__init__(500, message)


class Generation:
    """One response in progress; created and read in an event loop, drawn by the worker."""

    def __init__(
        self,
        prompt: list[int],
        choice: Choice,
        seed: int,
        key: Key,
        length: int,
        ends: frozenset[int],
        alternatives: int,
    ):
        self.asked = (prompt, choice, seed, key, length, ends, alternatives)  # the fields of a `Response`
        self.length, self.ends, self.alternatives = length, ends, alternatives
        self.model, self.number = "", -1
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[list[tuple[int, float]]] = []
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.due = 0.0  # when the next tokens are due
        self.error: ModelFailedError | None = None
        self.over = False

    @property
    def ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.ends

    @property
    def finished(self) -> bool:
        return self.ended or len(self.tokens) == self.length

    async def more(self, seen: int, pause: float) -> int:
        """Wait for more than `seen` tokens, at least `pause` seconds, or for the end; returns their number.

        Raises: ModelFailedError.
        """
        self.due = time.monotonic() + pause if seen else 0.0
        while True:
            self.changed.clear()
            over, count = self.over, len(self.logprobs)  # in this order: the last token comes before the end
            if self.error is not None:
                raise self.error
            if over or (count > seen and time.monotonic() >= self.due):
                return count
            await self.changed.wait()


class Engine:
    """Draws responses in another process, at most `rows` per model at a time; up to `queue` more wait."""

    def __init__(self, pipe: Connection, rows: int, queue: int, process: Any = None):
        self.pipe, self.rows, self.queue, self.process = pipe, rows, queue, process
        self.numbers = itertools.count()
        self.sending, self.lock = threading.Lock(), threading.Lock()
        self.generations: dict[int, Generation] = {}
        self.futures: dict[int, Future] = {}
        self.taken: Counter[str] = Counter()  # responses that run or wait, by model
        self.ended = False
        self.thread = threading.Thread(target=self._read, name="engine", daemon=True)
        self.thread.start()

    def submit(self, model: str, generations: list[Generation]) -> None:
        """Queue the responses of one request. Raises: QueueFullError, ModelFailedError."""
        with self.lock:
            if self.ended:
                raise ModelFailedError(ENDED)
            if self.taken[model] + len(generations) > self.rows + self.queue:
                raise QueueFullError
            self.taken[model] += len(generations)
            for one in generations:
                one.model, one.number = model, next(self.numbers)
                self.generations[one.number] = one
        self._send(("draw", model, [(one.number, one.asked) for one in generations]))

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Cancel responses that nobody waits for."""
        if numbers := [one.number for one in generations if not one.over]:
            self._send(("cancel", numbers))

    async def call(self, name: str, *arguments: Any) -> Any:
        """The result of a task that the worker runs between two tokens. Raises: QueueFullError, ModelFailedError."""
        future: Future[Any] = Future()
        with self.lock:
            if self.ended:
                raise ModelFailedError(ENDED)
            if len(self.futures) >= self.queue:
                raise QueueFullError
            number = next(self.numbers)
            self.futures[number] = future
        self._send(("task", number, name, arguments))
        return await asyncio.wrap_future(future)

    @property
    def pause(self) -> float:
        """Seconds between two pieces of a stream."""
        return len(self.generations) / PIECES_PER_SECOND

    def stop(self) -> None:
        """End the worker; unfinished responses fail."""
        self.ended = True
        self._send(None)
        self.thread.join(timeout=5)
        if self.process is not None:
            self.process.join(timeout=5)
            self.process.terminate()

    def _send(self, message: tuple | None) -> None:
        try:
            with self.sending:
                self.pipe.send(message)
        except OSError:  # the worker has ended; the reading thread reports it to those who wait
            return

    # -------------------------------------------------------------------------------------- the thread that reads

    def _read(self) -> None:
        try:
            while True:
                while (self.generations or self.futures) and not self.pipe.poll():
                    time.sleep(LOOK_SECONDS)
                self._hear(self.pipe.recv())
        except (EOFError, OSError):
            pass
        with self.lock:
            self.ended = True
            failed, futures = list(self.generations), list(self.futures.values())
        self._close(failed, ModelFailedError(ENDED))
        for future in futures:
            future.set_exception(ModelFailedError(ENDED))

    def _hear(self, news: Any) -> None:
        """Store the results of a step, and wake the coroutines that are due."""
        due, now = [], time.monotonic()
        for number, token, logprob, top in news.drawn:
            one = self.generations[number]
            one.tokens.append(token)
            if top is not None:
                one.tops.append(top)
            one.logprobs.append(logprob)  # last, because its length tells readers how much is complete
            if now >= one.due:
                due.append(one)
        _wake(due)
        self._close(news.over, None)
        self._close(news.failed, ModelFailedError())
        for number, value, mistake in news.results:
            with self.lock:
                future = self.futures.pop(number)
            if mistake is None:
                future.set_result(value)
            else:
                future.set_exception(UserError(mistake) if mistake else ModelFailedError())

    def _close(self, numbers: list[int], error: ModelFailedError | None) -> None:
        with self.lock:
            closed = [self.generations.pop(number) for number in numbers]
            self.taken.subtract(one.model for one in closed)
        for one in closed:
            one.error, one.over = error, True
        _wake(closed)


def _wake(generations: list[Generation]) -> None:
    """Wake the coroutines that wait for these, each event loop once."""
    for loop in {one.loop for one in generations}:
        try:
            loop.call_soon_threadsafe(_set_all, [one.changed for one in generations if one.loop is loop])
        except RuntimeError:  # the loop is closed: nobody waits
            continue


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


def start_engine(
    config: Config, stages: list[tuple[str, Path, str]], rows: int, queue: int
) -> tuple[Engine, dict[str, tuple[int, int | None]]]:
    """A process with the models (name, folder of the run, stage), and their sizes of vocabulary and context.

    Raises: UserError if one cannot be loaded.
    """
    from rlhf.serving.worker import work

    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, config, stages, rows), name="models", daemon=True)
    process.start()
    theirs.close()
    try:
        sizes = pipe.recv()
    except EOFError:
        raise UserError("serve: the models' process ended while it loaded them: is there enough memory?") from None
    if isinstance(sizes, str):
        raise UserError(sizes)
    return Engine(pipe, rows, queue, process), sizes

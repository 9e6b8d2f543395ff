"""Distributes work to processes, with results in the order of the work and a bounded number of pieces in progress."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.errors import UserError

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class WorkerError(UserError):
    """A process of the pool died."""


def _begin() -> None:
    """In a new worker: leave Ctrl-C to the parent, end when it ends, and import the modules that the work needs."""
    from multiprocessing import connection, parent_process

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        sentinel = parent.sentinel

        def watch() -> None:
            connection.wait([sentinel])
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
    from rlhf.data.importing.batches import warm_up

    warm_up()


class Pool:
    """`processes` workers, started with the first work that is worth distributing; none if it is 1."""

    def __init__(self, processes: int):
        self.processes = processes
        self._executor: ProcessPoolExecutor | None = None

    def in_order(
        self, work: Callable[[Any, Piece], Result], plan: Any, pieces: Iterable[Piece], share: bool = True
    ) -> Iterator[tuple[Piece, Result]]:
        """Each piece with work(plan, piece), in order; in this process if there is one piece, or work is not distributed.

        Raises: WorkerError if a process dies, e.g. because memory ran out.
        """
        pieces = iter(pieces)
        begin = list(islice(pieces, 2))
        if self.processes == 1 or not share or len(begin) < 2:
            for piece in chain(begin, pieces):
                yield piece, work(plan, piece)
            return
        from concurrent.futures.process import BrokenProcessPool

        under_way: deque[tuple[Piece, Future[Result]]] = deque()
        executor = self._start()
        try:
            for piece in chain(begin, pieces):
                under_way.append((piece, executor.submit(work, plan, piece)))
                if len(under_way) > self.processes + 1:
                    first, future = under_way.popleft()
                    yield first, future.result()
            while under_way:
                first, future = under_way.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise WorkerError("a worker process died, perhaps because memory ran out: set processes=1") from error

    def _start(self) -> "ProcessPoolExecutor":
        if self._executor is None:
            import multiprocessing
            from concurrent.futures import ProcessPoolExecutor

            # Spawned, since a forked child would inherit the threads' locks of the libraries.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.processes, mp_context=context, initializer=_begin)
        return self._executor

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

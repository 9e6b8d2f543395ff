"""Runs a sink (W&B, TensorBoard) in another thread, so that no slow or broken service delays training.

One thread makes the queued calls in order. If a table fails, a warning is printed once and tables stop; any other call that
fails stops the sink. The sinks are in `wandb_run.py` and `tensorboard.py`; `writers.py` writes the files.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

# Calls that may wait while a service is slow; beyond that new ones are dropped, with a warning.
QUEUE_CALLS = 20_000
TABLES = ("samples", "table")

Rows = list[dict[str, Any]]


class Sink:
    """A service that shows the numbers. Methods that a sink does not override do nothing."""

    def log(self, row: Mapping[str, float], step: int) -> None:
        """One line of metrics, its axes among them."""

    def samples(self, rows: Rows, step: int) -> None:
        """Generated text, one dict per response."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A small table."""

    def summary(self, values: Mapping[str, float]) -> None:
        """Final numbers."""

    def finish(self, failed: bool) -> None:
        """Write everything; it is the last call."""


class Background(Sink):
    """A sink in its own thread. `start` makes the sink there, since starting may hang too."""

    def __init__(self, name: str, start: Callable[[], Sink], finish_timeout: float) -> None:
        self._name, self._finish_timeout = name, finish_timeout
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(QUEUE_CALLS)
        self._dropped = 0
        self._broken = self._no_tables = self._given_up = False
        self._thread = threading.Thread(target=self._work, args=(start,), name=f"tracking {name}", daemon=True)
        self._thread.start()

    def _work(self, start: Callable[[], Sink]) -> None:
        doing = "start"
        try:
            sink = start()
            while doing != "finish":
                doing, arguments = self._queue.get()
                try:
                    if not (self._no_tables and doing in TABLES):
                        getattr(sink, doing)(*arguments)
                except Exception as error:
                    # Online, a table needs responses from the service and a number does not.
                    if doing not in TABLES:
                        raise
                    self._no_tables = True
                    self._tell("show " + doing, error, "continuing without its tables")
        except Exception as error:
            self._broken = True
            self._tell(doing, error, "continuing without it")

    def _tell(self, doing: str, error: Exception, consequence: str) -> None:
        if self._given_up:
            return
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = f"{consequence}, metrics.jsonl and samples.jsonl have everything"
        logger.warning("%s could not %s (%s): %s", self._name, doing, reason, remedy)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._broken or not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((name, arguments))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning("%s does not keep up: lines are dropped from it, metrics.jsonl has them", self._name)

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._call("log", row, step)

    def samples(self, rows: Rows, step: int) -> None:
        self._call("samples", rows, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._call("table", name, columns, rows)

    def summary(self, values: Mapping[str, float]) -> None:
        self._call("summary", values)

    def finish(self, failed: bool) -> None:
        """Waits until everything is written, but at most `finish_timeout` seconds."""
        until = time.monotonic() + self._finish_timeout
        if not self._broken and self._thread.is_alive():
            with contextlib.suppress(queue.Full):  # unlike a line, it waits for a free place in the queue
                self._queue.put(("finish", (failed,)), timeout=self._finish_timeout)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._broken = self._given_up = True
            remedy = "continuing without it, metrics.jsonl has everything"
            logger.warning("%s did not finish in %.0f s: %s", self._name, self._finish_timeout, remedy)

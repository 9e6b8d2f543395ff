"""Ctrl-C, SIGTERM and SIGHUP: a training loop ends after the current step, with a checkpoint; anything else ends at once.

Either way the exit code is 130, which `rlhf.system.exits` gives for a KeyboardInterrupt. Nothing here writes a checkpoint: a loop
calls `stop_requested()` after each step. Imports neither torch nor hydra.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from rlhf.system.processes import is_first

EXIT_CODE = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed, or its connection lost
# Seconds within which two signals are one: Ctrl-C reaches a stage from the terminal and from what started the stage.
SAME_SECONDS = 1.0

_requested_at: float | None = None  # when a signal requested that the running loop stop
_interrupted_at: float | None = None  # when a signal began to end this process


def stop_requested() -> bool:
    """Whether a signal has requested that the loop stop after the current step."""
    return _requested_at is not None


def request_stop() -> None:
    """Request a stop as a signal within `finish_step` does; for a process of a launch in which another received the signal."""
    global _requested_at
    _requested_at = _requested_at or time.monotonic()


def interrupt_on_signals() -> None:
    """From now on each of SIGNALS raises KeyboardInterrupt; one more, a second or more later, ends the process at once.

    A signal that the process was told to ignore (nohup, a job in the background) stays ignored.
    """
    global _interrupted_at
    if threading.current_thread() is not threading.main_thread():
        return
    _interrupted_at = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _interrupted_at
        drop_lost_terminal()
        now = time.monotonic()
        if _interrupted_at is None:
            _interrupted_at = now
            raise KeyboardInterrupt
        if now - _interrupted_at > SAME_SECONDS:
            os._exit(EXIT_CODE)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def drop_lost_terminal() -> None:
    """Discard output to a terminal that is gone: its error would keep a stage from writing its checkpoint."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def leave(code: int) -> NoReturn:
    """Flush the output, then end this process at once, without the interpreter's shutdown."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(code)


@contextlib.contextmanager
def finish_step(name: str) -> Iterator[None]:
    """Within it, the first signal makes `stop_requested()` true and is reported in one line; a second ends the process.

    name: the stage's name, with which the line begins. A signal that the process ignores (nohup, a background job) stays
    ignored, and threads other than the main one change nothing.
    Raises: KeyboardInterrupt at its end if a stop was requested and the loop has not raised it itself.
    """
    global _requested_at, _interrupted_at
    _requested_at = None
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(text: str) -> None:
        if is_first():
            with contextlib.suppress(
                OSError
            ):  # not through Python's buffers, which the interrupted code may be writing
                os.write(2, text.encode())

    def handle(number: int, frame: FrameType | None) -> None:
        global _requested_at
        drop_lost_terminal()
        now = time.monotonic()
        if _requested_at is None:
            _requested_at = now
            tell(f"\n{name}: stopping after this step, with a checkpoint; repeat to stop at once\n")
        elif now - _requested_at > SAME_SECONDS:
            tell(f"\n{name}: stopped; the same command resumes from the last checkpoint\n")
            os._exit(EXIT_CODE)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
        if stop_requested():
            raise KeyboardInterrupt
    finally:
        for number in taken:
            signal.signal(number, before[number])
        _interrupted_at, _requested_at = _requested_at, None

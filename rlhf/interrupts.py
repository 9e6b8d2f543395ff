"""Ctrl-C and SIGTERM: a training loop ends after the step under way, with a checkpoint; everything else ends at once.

Either way the exit code is 130, which `rlhf.cli` gives for a KeyboardInterrupt. Nothing here writes a checkpoint: a loop
asks `stop_requested()` after each step. Imports neither torch nor hydra.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from rlhf.processes import is_first

EXIT_CODE = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds within which two signals are one: Ctrl-C reaches a stage from the terminal and from what started the stage.
SAME_SECONDS = 1.0

_requested_at: float | None = None


def stop_requested() -> bool:
    """Whether a signal has asked the loop to end after the step under way."""
    return _requested_at is not None


def request_stop() -> None:
    """As a signal does within `finish_step`: for the other processes of a launch, of which one has seen a signal."""
    global _requested_at
    _requested_at = _requested_at or time.monotonic()


def terminate_as_interrupt() -> None:
    """From now on SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def leave(code: int) -> NoReturn:
    """End this process at once, without the interpreter's own end; what was printed is out."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def finish_step(name: str) -> Iterator[None]:
    """Within it, the first signal only makes `stop_requested()` true and is told in one line; a second one ends the process.

    name: of the stage, which begins the line. A signal that the process was told to ignore (nohup, a job in the
    background) stays ignored, and other threads than the main one change nothing.
    Raises: KeyboardInterrupt at its end where a stop was requested and the loop has not raised it itself.
    """
    global _requested_at
    _requested_at = None
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        global _requested_at
        now = time.monotonic()
        if _requested_at is None:
            _requested_at = now
            _tell(f"\n{name}: stopping after this step, with a checkpoint; once more to end at once\n")
        elif now - _requested_at > SAME_SECONDS:
            _tell(f"\n{name}: ended at once; the same command resumes from the last checkpoint\n")
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
        _requested_at = None


def _tell(text: str) -> None:
    """Past Python's buffers, which the interrupted code may be in the middle of writing; the first of several processes."""
    if not is_first():
        return
    with contextlib.suppress(OSError):
        os.write(2, text.encode())

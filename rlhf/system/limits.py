"""Limits on the time and memory of a block of Python, for untrusted code such as chat templates."""

import contextlib
import ctypes
import resource
import threading
import time
from collections.abc import Iterator

from rlhf.system.memory import status

EVERY = 0.5  # seconds between two checks

_deadlines: dict[int, float] = {}  # thread: its deadline
_lock = threading.Lock()
_watchdog: threading.Thread | None = None
_limited: list[tuple[int, int]] = []  # the process's own limit on memory, once per active block


class _Late(BaseException):
    """Stops a block. It is no `Exception`, so that an `except Exception` in the block (Jinja's compiler) cannot drop it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises: TimeoutError in this thread if the block takes longer. One call into a library in C cannot be interrupted."""
    global _watchdog
    thread = threading.get_ident()
    with _lock:
        if _watchdog is None or not _watchdog.is_alive():  # a fork does not copy the thread
            _watchdog = threading.Thread(target=_watch, daemon=True)
            _watchdog.start()
        _deadlines[thread] = time.monotonic() + seconds
    try:
        yield
    except _Late:
        raise TimeoutError from None
    finally:
        with _lock:
            _deadlines.pop(thread, None)


def _watch() -> None:
    while True:
        time.sleep(EVERY)
        with _lock:
            late = [thread for thread, deadline in _deadlines.items() if time.monotonic() > deadline]
            for thread in late:
                del _deadlines[thread]
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Late))


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Raises: MemoryError if the process's memory grows by more than `size` bytes within the block.

    Memory that other threads take meanwhile counts too. Linux only; elsewhere there is no limit.
    """
    with _lock:
        soft, hard = _limited[0] if _limited else resource.getrlimit(resource.RLIMIT_AS)
        _limited.append((soft, hard))
        if held := status("VmSize"):
            bounds = [limit for limit in (held + size, soft, hard) if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    finally:
        with _lock:
            before = _limited.pop()
            if not _limited:
                resource.setrlimit(resource.RLIMIT_AS, before)

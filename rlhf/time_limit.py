"""A limit on the time that a piece of Python may take, in any thread: for what others wrote, such as chat templates."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

EVERY = 0.5  # seconds between two looks

_deadlines: dict[int, float] = {}  # thread: when it is to be done
_lock = threading.Lock()
_watchdog: threading.Thread | None = None


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises: TimeoutError in this thread if the block takes longer. One call into a library in C cannot be interrupted."""
    global _watchdog
    thread = threading.get_ident()
    with _lock:
        if _watchdog is None or not _watchdog.is_alive():  # after a fork it is not
            _watchdog = threading.Thread(target=_watch, daemon=True)
            _watchdog.start()
        _deadlines[thread] = time.monotonic() + seconds
    try:
        yield
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
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))

"""How a command ends: errors as one line, signals, exit codes. A bug still shows its traceback.

Exit codes: 0 done; 2 a mistake of the user or an error of the system that the user can fix; 130 interrupted by Ctrl-C,
SIGTERM or SIGHUP; 141 nothing reads the output any more. A signal ends a training loop after its current step, with a
checkpoint, and anything else at once. Imports neither torch nor hydra.
"""

import contextlib
import errno
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from rlhf.errors import UserError
from rlhf.system.processes import LOST_PROCESS, is_first, process_count, rank
from rlhf.system.terminal import one_line, say, write

MISTAKE, INTERRUPTED, NO_READER = 2, 130, 141
REPORT_SECONDS = 5.0  # seconds in which rank 0 alone reports an error that every rank has
_RIGHT = "give this user the right to read and write it, or name another place"
REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _RIGHT),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space, or write elsewhere"),
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed, or its connection lost
# Seconds within which two signals are one: Ctrl-C reaches a stage from the terminal and from what started the stage.
SAME_SECONDS = 1.0

_signalled_at: float | None = None  # when the first signal came


@contextlib.contextmanager
def ending(interrupted: str = "interrupted") -> Iterator[None]:
    """End the process with these exit codes if the block raises. interrupted: the message after Ctrl-C or a signal."""
    try:
        yield
    except UserError as error:
        fail(str(error))
    except BrokenPipeError:
        end(NO_READER)
    except (KeyboardInterrupt, Exception) as error:
        # libraries that import lazily turn KeyboardInterrupt into an error of theirs
        if isinstance(error, KeyboardInterrupt) or _signalled_at is not None:
            if is_first():
                with contextlib.suppress(OSError):
                    write(f"\nrlhf: {interrupted}\n", sys.stderr)
            end(INTERRUPTED)
        if process_count() > 1 and any(sign in str(error) for sign in LOST_PROCESS):
            time.sleep(REPORT_SECONDS)  # so that the launcher can name it and stop this process
            fail("another process of this launch has ended: see its own message or the launcher's")
        if os.environ.get("HYDRA_FULL_ERROR") in (None, "", "0") and (message := describe(error)) is not None:
            fail(message)
        let_first_rank_report()
        raise


def describe(error: Exception) -> str | None:
    """One line for an error of the system that says what to do; None for any other error, which is a bug."""
    if isinstance(error, UnicodeError):
        return f"{one_line(str(error), 200)}: convert the text to UTF-8; if it is, set a UTF-8 locale (LC_ALL=C.UTF-8)"
    kind = type(error).__name__
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error):
        reason = one_line(str(error), 200) or "the system gave no more"
        return f"out of memory ({reason}): set memory.budget_gb to less, data.max_tokens or lora.rank=16; `rlhf plan` says what fits"
    if type(error).__module__.partition(".")[0] == "yaml":
        return f"{one_line(str(error), 500)}: correct this YAML file"
    if not isinstance(error, OSError):
        return None
    remedy = REMEDIES.get(error.errno or 0, "check it, then run the same command again")
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}: {remedy}"


def fail(message: str) -> NoReturn:
    """Report a mistake in one line, and end with exit code 2."""
    let_first_rank_report()
    report(message if is_first() else f"process {rank()}: {message}")
    end(MISTAKE)


def report(message: str) -> None:
    """Print one line on standard error."""
    with contextlib.suppress(OSError):
        say(f"rlhf: error: {one_line(message, 4000)}", sys.stderr)


def let_first_rank_report() -> None:
    """If ranks fail for the same reason, only rank 0 reports it; the launcher stops the rest meanwhile."""
    if not is_first():
        time.sleep(REPORT_SECONDS)


def end(code: int, at_once: bool = False) -> NoReturn:
    """End this process. at_once: without the interpreter's shutdown, as one of several ends, since an orderly end would
    wait for the others or abort without them.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # drop what cannot be written: the interpreter would report it again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if at_once or process_count() > 1:
        os._exit(code)
    sys.exit(code)


def interrupt_on_signals(message: str = "interrupted") -> None:
    """From here on each of SIGNALS raises KeyboardInterrupt; one more, a second or more later, ends the process at
    once.

    So does the first within an import, a destructor or a callback, where Python or C++ would drop or replace the
    exception.
    """

    def leave_now() -> None:
        tell(f"\nrlhf: {message}\n")
        os._exit(INTERRUPTED)

    def interrupt() -> None:
        if any(frame.f_code.co_filename.startswith("<frozen importlib") for frame, _ in traceback.walk_stack(None)):
            leave_now()
        raise KeyboardInterrupt

    def dropped(error: Any) -> None:
        leave_now() if error.exc_type is KeyboardInterrupt else sys.__unraisablehook__(error)

    if _handle(interrupt, lambda: None):
        sys.unraisablehook = dropped


def tell(text: str) -> None:
    """Print on standard error, not through Python's buffers, which the interrupted code may be writing."""
    if is_first():
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


@contextlib.contextmanager
def finish_step(name: str) -> Iterator[None]:
    """Within it, the first signal makes `stop_requested()` true and is reported in one line; a second ends the process.

    name: the stage's. Raises: KeyboardInterrupt at its end if a stop was requested and the loop has not raised it
    itself.
    """
    before = _handle(
        lambda: tell(f"\n{name}: stopping after this step, with a checkpoint; repeat to stop at once\n"),
        lambda: tell(f"\n{name}: stopped; the same command resumes from the last checkpoint, if there is one\n"),
    )
    try:
        yield
        if stop_requested():
            raise KeyboardInterrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_requested() -> bool:
    """Within `finish_step`: whether a signal has requested that the loop stop after the current step."""
    return _signalled_at is not None


def _handle(first: Callable[[], None], later: Callable[[], None]) -> dict[int, Any]:
    """Have the first signal call `first`, and one SAME_SECONDS later call `later` and end the process; returns the
    handlers before.

    Signals that the process ignores already (nohup, a job in the background) stay ignored.
    """
    global _signalled_at
    _signalled_at = None

    def handle(number: int, frame: FrameType | None) -> None:
        global _signalled_at
        drop_lost_terminal()
        if _signalled_at is None:
            _signalled_at = time.monotonic()
            first()
        elif time.monotonic() - _signalled_at > SAME_SECONDS:
            later()
            os._exit(INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():
        return {}
    listened = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handle) for number in listened}


def drop_lost_terminal() -> None:
    """Discard output to a terminal that is gone: its error would keep a stage from writing its checkpoint."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)

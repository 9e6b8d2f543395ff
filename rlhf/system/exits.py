"""How a command ends: what went wrong as one line, and the exit code. A bug still shows its traceback.

Exit codes: 0 done; 2 a mistake of the user or an error of the system that the user can fix; 130 interrupted; 141 nothing
reads the output any more. Imports neither torch nor hydra.
"""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

from rlhf.errors import UserError
from rlhf.system.interrupts import EXIT_CODE, leave
from rlhf.system.processes import is_first, launch_problem, lost_another, process_count, rank
from rlhf.system.terminal import one_line, say

MISTAKE, NO_READER = 2, 141
SECONDS_TO_SPEAK = 5.0  # seconds in which rank 0 alone reports an error that every rank has
REMEDIES = {
    errno.EACCES: "give this user the right to read and write it, or name another place",
    errno.EPERM: "give this user the right to read and write it, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENOSPC: "free space, or write elsewhere",
    errno.EDQUOT: "free space, or write elsewhere",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextlib.contextmanager
def ending(interrupted: str = "interrupted") -> Iterator[None]:
    """End the process with these exit codes if the block raises. interrupted: the message after Ctrl-C or a signal."""
    try:
        yield
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        if is_first():
            with contextlib.suppress(OSError):
                say("", sys.stderr)
                say(f"rlhf: {interrupted}", sys.stderr)
        end(EXIT_CODE)
    except BrokenPipeError:
        end(NO_READER)
    except Exception as error:
        if lost_another(error):
            time.sleep(SECONDS_TO_SPEAK)  # so that the launcher can name it and stop this process
            fail("another process of this launch has ended: see its own message or the launcher's")
        message = None if os.environ.get("HYDRA_FULL_ERROR") not in (None, "", "0") else describe(error)
        if message is not None:
            fail(message)
        let_the_first_speak()
        raise


def describe(error: Exception) -> str | None:
    """One line for an error of the system that says what to do; None for any other error, which is a bug."""
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return (
            f"text that is not {error.encoding} (byte 0x{byte:02x} at {error.start:,}): convert it to UTF-8; if it is, "
            "set a UTF-8 locale (LC_ALL=C.UTF-8)"
        )
    if isinstance(error, UnicodeEncodeError):
        return (
            f"cannot write U+{ord(error.object[error.start]):04X} as {error.encoding}: set a UTF-8 locale "
            "(LC_ALL=C.UTF-8)"
        )
    kind = type(error).__name__
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error):
        reason = one_line(str(error), 200) or "the system gave no more"
        return f"out of memory ({reason}): use smaller micro-batches or a smaller model; `rlhf plan` says what fits"
    if type(error).__module__.partition(".")[0] == "yaml":
        return f"{one_line(str(error), 500)}: correct this YAML file"
    if not isinstance(error, OSError):
        return None
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory was deleted: change to one that exists (cd), then run the same command again"
    where = f"{error.filename}: " if error.filename else ""
    remedy = REMEDIES.get(error.errno or 0, "check it, then run the same command again")
    return f"{where}{error.strerror or error}: {remedy}"


def check_launch() -> None:
    """End the process if a launcher's variable is not a number."""
    if (problem := launch_problem()) is not None:
        report(problem)
        sys.exit(MISTAKE)


def fail(message: str) -> NoReturn:
    """Report a mistake in one line, and end with exit code 2."""
    let_the_first_speak()
    report(message if is_first() else f"process {rank()}: {message}")
    end(MISTAKE)


def report(message: str) -> None:
    """Print one line on standard error, if it is open."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            say(f"rlhf: error: {one_line(message, 4000)}", sys.stderr)


def end(code: int) -> NoReturn:
    """End this process; one of several ends at once, since an orderly end would wait for the others or abort without them."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # drop what cannot be written: the interpreter would report it again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if process_count() > 1:
        leave(code)
    sys.exit(code)


def let_the_first_speak() -> None:
    """If ranks fail for the same reason, only rank 0 reports it; the launcher stops the rest meanwhile."""
    if not is_first():
        time.sleep(SECONDS_TO_SPEAK)

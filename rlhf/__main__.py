"""`python -m rlhf` and the console script: Ctrl-C ends the process in one line, also while modules are imported."""

import os
import signal
from typing import Any


def leave(*_: Any) -> None:
    """End without the interpreter's shutdown: at the beginning and at the end of a process there is nothing to close."""
    os.write(2, b"\nrlhf: interrupted\n")
    os._exit(130)


def main() -> None:
    listens = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # nohup, a job in the background
    if listens:
        signal.signal(signal.SIGINT, leave)
    from rlhf import cli

    try:
        cli.main()
    finally:
        if listens:
            signal.signal(signal.SIGINT, leave)


if __name__ == "__main__":
    main()

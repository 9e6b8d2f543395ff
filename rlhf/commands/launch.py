"""Starts a stage as several processes on this machine, one per device, and stops them together.

They find each other by torchrun's environment variables (RANK, WORLD_SIZE, …). For several machines use torchrun
(docs/scale.md).
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from rlhf.system.exits import INTERRUPTED
from rlhf.system.processes import LAUNCHER_VARIABLES
from rlhf.system.terminal import say

STOP_SECONDS = 60.0  # that the others have to stop, after one has stopped on a signal
# On Linux a server imports torch once and forks the processes. Elsewhere forking after such imports is not safe.
STARTS: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")


def import_once(modules: Sequence[str]) -> None:
    """Set the modules that the server imports; call it before the first process starts."""
    STARTS.set_forkserver_preload(list(modules))


def run_processes(arguments: Sequence[str], processes: int = 1, threads: int = 0, module: str = "rlhf") -> int:
    """Run `python -m rlhf <arguments>` as several processes; returns 0, or the exit code of the first one that failed.

    Then the others are killed, since they would wait for it. All end with this process. threads: per process; 0 divides
    the cores.
    """
    sys.stdout.flush()
    _start_server()
    each = environments(processes, threads)
    started = [STARTS.Process(target=_run_module, args=([module, *arguments], given)) for given in each]
    for process in started:
        process.start()
    code = None
    try:
        code = _wait(started)
        return code
    except KeyboardInterrupt:
        for process in started:
            process.terminate()  # the process ignores a second signal within a second
        for process in started:
            process.join()
        if INTERRUPTED in [process.exitcode for process in started]:  # they have printed how to resume
            sys.exit(INTERRUPTED)
        raise
    finally:
        for process in started:
            process.kill()
            process.join()
            if code != 0 and process.pid is not None:
                _end_session(process.pid)


def _end_session(session: int) -> None:
    """Kill a rank and what it has started, such as a compiler, to which ninja gives a process group of its own."""
    for pid in sorted(psutil.pids(), key=lambda pid: pid == session):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


@cache
def _start_server() -> None:
    """Start the process that forks with this process's module path: by default it would import modules of the working directory."""
    if sys.platform == "linux":
        before = dict(os.environ)
        os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        forkserver.ensure_running()
        os.environ.clear()
        os.environ.update(before)


def _run_module(command: list[str], environment: dict[str, str]) -> None:
    """Run `python -m <command>` in a started process with its own environment."""

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        _end_session(os.getpid())  # itself too

    os.setsid()  # so that its own processes can be ended with it
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment and "torch" in sys.modules:  # it has read the server's variable
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = command
    # of the console script, which the server imports; runpy would warn of it
    sys.modules.pop(f"{command[0]}.__main__", None)
    runpy.run_module(command[0], run_name="__main__")


def environments(processes: int, threads: int) -> list[dict[str, str]]:
    if processes == 1:
        return [dict(os.environ)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {} if threads else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
    places = [(rank, processes, rank, processes, "127.0.0.1", port) for rank in range(processes)]
    return [{**os.environ, **shared, **dict(zip(LAUNCHER_VARIABLES, map(str, place), strict=True))} for place in places]


def _wait(started: Sequence[BaseProcess]) -> int:
    """Wait until all have succeeded or one has failed; returns its exit code in the shell's form."""
    while True:
        codes = [process.exitcode for process in started]
        if failed := [(number, code) for number, code in enumerate(codes) if code]:
            number, code = failed[0]
            if code == INTERRUPTED:  # after a signal they all stop after the same step
                until = time.monotonic() + STOP_SECONDS
                for process in started:
                    process.join(max(0.0, until - time.monotonic()))
            if code < 0 and len(started) > 1:
                killed = f"rlhf: process {number} of {len(started)} was killed by signal {-code}"
                say(f"{killed}; the others are stopped too", sys.stderr)
            return code if code > 0 else 128 - code
        running = [process.sentinel for process, code in zip(started, codes, strict=True) if code is None]
        if not running:
            return 0
        connection.wait(running)

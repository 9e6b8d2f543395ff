"""Starts a stage as several processes on this machine, one per device, and stops them together.

They find each other through the environment variables of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, …). For several machines
use torchrun (docs/scale.md). Imports neither torch nor hydra.
"""

import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

from rlhf.system.interrupts import EXIT_CODE
from rlhf.system.processes import launch_environment
from rlhf.system.terminal import say

LOOK_SECONDS = 0.1  # between two polls of the processes
STOP_SECONDS = 60.0  # that the others have to stop, after one has stopped on a signal


def run_processes(command: Sequence[str], processes: int = 1, threads: int = 0) -> int:
    """Run a command as several processes; returns 0, or the exit code of the first one that failed.

    If one fails, the others are killed at once, since they would wait for it and report follow-up errors. All of them end
    with this process. threads: per process; 0 divides the cores among several processes. Raises: KeyboardInterrupt after a
    signal, once the processes have ended; SystemExit if they have printed how to resume.
    """
    each = environments(processes, threads)
    return _follow([subprocess.Popen(command, env=given, preexec_fn=die_with_parent) for given in each])


def run_stage_processes(arguments: Sequence[str], processes: int = 1, threads: int = 0, module: str = "rlhf") -> int:
    """`run_processes` of `python -m rlhf <arguments>`, without the seconds that each new interpreter takes to import torch.

    On Linux a server process imports the modules of `import_once` once and forks the processes. It has no threads, has used no
    device, and ends with this process. Elsewhere forking after such imports is not safe, so each process imports on its own.
    """
    if sys.platform != "linux":
        return run_processes([sys.executable, "-m", module, *arguments], processes, threads)
    sys.stdout.flush()
    _start_server()
    each = environments(processes, threads)
    forked = [Forked(target=_run_module, args=([module, *arguments], environment)) for environment in each]
    for process in forked:
        process.start()
    return _follow(forked)


def import_once(modules: Sequence[str]) -> None:
    """Set the modules that the processes of `run_stage_processes` share; call it before the first process starts."""
    if sys.platform == "linux":
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


class Forked(ForkServerProcess):
    """A process that the server forked, with the methods of `Popen` that are used here."""

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int:
        self.join()
        return self.exitcode or 0


@cache
def _start_server() -> None:
    """Start the process that forks, with this process's module path.

    By default Python would put the working directory first and import any file there with a module's name.
    """
    paths = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}
    before = dict(os.environ)
    os.environ.update(paths)
    try:
        forkserver.ensure_running()
    finally:
        for name in paths:
            os.environ.pop(name)
        os.environ.update(before)


def _run_module(command: list[str], environment: dict[str, str]) -> None:
    """Run `python -m <command>` in a forked process with its own environment; exits with the command's exit code.

    It ends when the process that requested it is gone; the server in between lives as long as that.
    """

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # torch has already read the server's
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__")


def _follow(started: Sequence["subprocess.Popen | Forked"]) -> int:
    """Wait as described in `run_processes`, and end all processes with this one."""
    try:
        return _wait(started)
    except KeyboardInterrupt:
        for process in started:
            process.terminate()  # the process ignores a second signal within a second
        codes = [process.wait() for process in started]
        if EXIT_CODE not in codes:
            raise
        sys.exit(EXIT_CODE)  # they have printed how to resume
    finally:
        for process in started:
            process.kill()
            process.wait()


def environments(processes: int, threads: int) -> list[dict[str, str]]:
    """The environment of each process."""
    if processes == 1:
        return [dict(os.environ)]
    port = free_port()
    shared = {} if threads else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
    return [
        {**os.environ, **shared, **launch_environment(rank, processes, "127.0.0.1", port)} for rank in range(processes)
    ]


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(started: Sequence["subprocess.Popen | Forked"]) -> int:
    """Wait until all have succeeded or one has failed; returns its exit code in the shell's form."""
    while True:
        codes = [process.poll() for process in started]
        failed = [i for i, code in enumerate(codes) if code]
        if failed:
            code = int(codes[failed[0]] or 0)
            if code == EXIT_CODE:  # after a signal they all stop after the same step
                until = time.monotonic() + STOP_SECONDS
                while time.monotonic() < until and any(process.poll() is None for process in started):
                    time.sleep(LOOK_SECONDS)
            if code < 0 and len(started) > 1:
                say(
                    f"rlhf: process {failed[0]} of {len(started)} was killed by signal {-code}; the others are stopped too",
                    sys.stderr,
                )
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        if len(started) == 1:
            started[0].wait()
        else:
            time.sleep(LOOK_SECONDS)


def die_with_parent() -> None:
    """On Linux, have the kernel kill a process when its parent is killed, so that it does not keep the stage's lock."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)

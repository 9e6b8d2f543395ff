"""Fewer threads while other work holds the cores: a step of several threads waits for the one that is not running.

With `threads=0` on Linux a loop counts, second by second, the processor time that this process took and what its cores had left,
and gives the next steps as many threads as that makes whole cores. On an idle machine it is the number of cores all the time.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

WINDOW = 1.0  # seconds between two looks
ROUNDED_UP = 0.25  # of a core: what an almost idle machine takes


def threads_for(available: float, most: int) -> int:
    """How many threads so many cores' worth of processor time can run at once: 1 to `most`."""
    return max(1, min(most, int(available + ROUNDED_UP)))


def processor_seconds() -> tuple[float, float]:
    """The processor time that this process took and that its cores were idle, each since some moment."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    idle = sum(
        int(fields[4]) + int(fields[5]) for fields in lines if fields[0] in cores
    )  # idle, and waiting for a disk
    return time.process_time(), idle / os.sysconf("SC_CLK_TCK")


class ThreadCount:
    """The threads of a loop's steps. most: with all cores free. read, now, use: the clocks, and what sets the number."""

    def __init__(
        self,
        most: int,
        read: Callable[[], tuple[float, float]] = processor_seconds,
        now: Callable[[], float] = time.monotonic,
        use: Callable[[int], None] = torch.set_num_threads,
    ):
        self.most, self.read, self.now, self.use = most, read, now, use
        self.threads = self.fitting = most  # in use; what fitted in the last window
        self.seen, self.since = sum(read()), now()

    def look(self) -> None:
        """Call it after each step. Fewer threads come at once, more after two windows that had room for them."""
        taken = self.now() - self.since
        if taken < WINDOW:
            return
        total = sum(self.read())
        fitting = threads_for((total - self.seen) / taken, self.most)
        wanted = min(fitting, max(self.fitting, self.threads))
        if wanted != self.threads:
            self.use(wanted)
        self.threads, self.fitting, self.seen, self.since = wanted, fitting, total, self.now()


def adapting_threads(threads: int, device: torch.device, processes: int) -> ThreadCount | None:
    """None if the number is fixed: by the setting or the environment, and where several processes divide the cores."""
    fixed = threads or "OMP_NUM_THREADS" in os.environ or processes > 1 or torch.get_num_threads() == 1
    if fixed or device.type != "cpu" or sys.platform != "linux":
        return None
    return ThreadCount(torch.get_num_threads())

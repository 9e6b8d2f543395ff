"""What a process takes of its machine: threads and freed memory.

A step waits for its slowest thread, so fewer are used while other processes use the cores. With `threads=0` on Linux a
loop measures, every second, the processor time of this process and the idle time of its cores, and uses that many whole
cores as threads for the next steps.

Freed memory stays in the process, because every training step allocates the same sizes again: by default glibc returns
large blocks to the system at once and gets them again as pages that the kernel must clear first.
"""

import ctypes
import os
import sys
import time

import psutil
import torch

WINDOW = 1.0  # seconds between two measurements
ROUNDED_UP = 0.25  # of a core: the load of an almost idle machine


def processor_seconds() -> float:
    """Processor time of this process and idle time of its cores since some fixed time."""
    cores, times = os.sched_getaffinity(0), psutil.cpu_times(percpu=True)
    return time.process_time() + sum(x.idle + x.iowait for number, x in enumerate(times) if number in cores)


class ThreadCount:
    """The threads of a loop's steps. most: with all cores free."""

    def __init__(self, most: int):
        self.most = most
        self.threads = self.fitting = most  # in use; the number that fitted in the last window
        self.seen, self.since = processor_seconds(), time.monotonic()

    def look(self) -> None:
        """Call it after each step. The number falls at once and rises after two windows with room for more threads."""
        taken = time.monotonic() - self.since
        if taken < WINDOW:
            return
        total = processor_seconds()
        fitting = max(1, min(self.most, int((total - self.seen) / taken + ROUNDED_UP)))
        wanted = min(fitting, max(self.fitting, self.threads))
        if wanted != self.threads:
            torch.set_num_threads(wanted)
        self.threads, self.fitting, self.seen, self.since = wanted, fitting, total, time.monotonic()


def adapting_threads(threads: int, device: torch.device, processes: int) -> ThreadCount | None:
    """None if the number is fixed: by the setting or the environment, or because several processes divide the cores."""
    fixed = threads or "OMP_NUM_THREADS" in os.environ or processes > 1 or torch.get_num_threads() == 1
    if fixed or device.type != "cpu" or sys.platform != "linux":
        return None
    return ThreadCount(torch.get_num_threads())


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
# Settings of the user take precedence.
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def keep_freed_memory(largest: int = 2**30) -> bool:
    """Keep freed blocks of up to `largest` bytes, by glibc's thresholds, until `return_freed_memory`; returns whether
    it was done.

    Does nothing with another C library or allocator, or if the environment sets the thresholds.
    """
    return _call_glibc("mallopt", _MMAP_THRESHOLD, largest) and _call_glibc("mallopt", _TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> bool:
    """Return all freed memory to the system, between phases that need blocks of other sizes; returns whether there was some."""
    return _call_glibc("malloc_trim", 0)


def _call_glibc(function: str, *arguments: int) -> bool:
    if not sys.platform.startswith("linux") or any(os.environ.get(name) for name in _ENVIRONMENT):
        return False
    try:
        return bool(getattr(ctypes.CDLL(None), function)(*arguments))
    except (OSError, AttributeError):
        return False

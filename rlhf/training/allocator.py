"""Keep freed memory in the process, because every training step allocates the same sizes again.

By default glibc returns large blocks to the system at once and gets them again as pages that the kernel must clear
first; on a CPU that takes a tenth of a small model's step or more.
"""

import ctypes
import os
import sys

# Constants of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Settings of the user take precedence.
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for returning memory; returns whether it was done.

    No result changes. The process keeps its peak memory.
    """
    return _set_thresholds(2**31 - 1, 2**30)


def return_freed_memory() -> bool:
    """Fix glibc's thresholds at their initial values, which it otherwise raises with use; returns whether it was done.

    Phases that need blocks of other sizes, such as PPO's, then do not leave unused gaps in the process.
    """
    return _set_thresholds(2**17, 2**17)


def _set_thresholds(trim: int, mmap: int) -> bool:
    """Does nothing with another C library or allocator, or if the environment sets them."""
    if not sys.platform.startswith("linux") or any(os.environ.get(name) for name in _ENVIRONMENT):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mmap)) and bool(mallopt(_TRIM_THRESHOLD, trim))

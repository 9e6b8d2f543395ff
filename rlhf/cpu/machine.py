"""What a process keeps of its machine: freed memory.

Freed memory stays in the process, because every training step allocates the same sizes again: by default glibc returns large
blocks to the system at once and gets them again as pages that the kernel must clear first; on a CPU that takes a tenth of a
small model's step or more.
"""

import ctypes
import os
import sys
from typing import Any

# Constants of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Settings of the user take precedence.
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def keep_freed_memory(largest: int = 2**30) -> bool:
    """Keep freed blocks of up to `largest` bytes, by glibc's thresholds, until `return_freed_memory`; returns whether it was done.

    Does nothing with another C library or allocator, or if the environment sets the thresholds.
    """
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, largest)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def return_freed_memory() -> bool:
    """Return all freed memory to the system, between phases that need blocks of other sizes; returns whether there was some."""
    trim = _of_glibc("malloc_trim")
    return trim is not None and bool(trim(0))


def _of_glibc(name: str) -> Any:
    if not sys.platform.startswith("linux") or any(os.environ.get(name) for name in _ENVIRONMENT):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None

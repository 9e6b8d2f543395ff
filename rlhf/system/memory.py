"""How much memory a process uses and may use: of its GPU; on a CPU what machine, container and the process's own limit leave."""

import contextlib
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rlhf.system.processes import local_process_count

if TYPE_CHECKING:
    import torch

GB = 1e9
# What a forward without gradients takes at most, unless one row takes more: more would not be faster.
SCORING_BYTES = 5e8
SAFE_SHARE = 0.8  # of what is free, if no budget is set
CGROUPS, OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Limit, use and the field of droppable pages by controller, which version 2 does not name.
FILES_OF = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def budget_bytes(budget_gb: float | None, device: "torch.device") -> int:
    """What this process may use of its device, with what it uses already: the setting, or a safe share of what is free.

    The processes of one launch divide the memory of a CPU.
    """
    if budget_gb is not None:
        return int(budget_gb * GB)
    sharing = 1 if device.type == "cuda" else local_process_count()
    return used_bytes(device) + int(SAFE_SHARE * free_bytes(device) / sharing)


def used_bytes(device: "torch.device", *, peak: bool = False) -> int:
    """What this process uses now, or used at its peak: tensors on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    return int(1e6 * peak_rss_mb()) if peak else psutil.Process().memory_info().rss


def peak_rss_mb() -> float:
    """Peak resident memory of this process so far, in MB (10^6 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak * (1 if sys.platform == "darwin" else 1024) / 1e6, 1)


def free_bytes(device: "torch.device") -> int:
    """The least that any limit leaves."""
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [psutil.virtual_memory().available, *left_in_cgroups()]
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - psutil.Process().memory_info().vms)
    return max(0, min(limits))


def left_in_cgroups() -> Iterator[int]:
    """What each cgroup of this process leaves, of version 2 or 1. File pages that the kernel can drop do not count as used."""
    with contextlib.suppress(OSError):
        for line in OF_PROCESS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in FILES_OF:
                continue
            limit, used, dropped = FILES_OF[controllers]
            root = CGROUPS / controllers
            folder = root / path.lstrip("/")
            for group in (folder, *folder.parents):  # in a container its own group can be the root
                read = (group / name for name in (limit, used, "memory.stat"))
                with contextlib.suppress(OSError, ValueError):
                    most, taken, fields = (file.read_text(encoding="utf-8") for file in read)
                    cache = re.search(rf"^{dropped} (\d+)", fields, re.MULTILINE)
                    yield int(most) - int(taken) + int(cache[1] if cache else 0)
                if group == root:
                    break

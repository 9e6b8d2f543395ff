"""How much memory a process uses and may use: of its GPU; on a CPU what machine, container and the process's own limit leave."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.system.processes import local_process_count

if TYPE_CHECKING:
    import torch

GB = 1e9
# What a forward without gradients takes at most, unless one row takes more: more would not be faster.
SCORING_BYTES = 5e8
SAFE_SHARE = 0.8  # of what is free, if no budget is set
CGROUPS, OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def budget_bytes(budget_gb: float | None, device: "torch.device") -> int:
    """What this process may use of its device, with what it uses already: the setting, or a safe share of what is free.

    The processes of one launch divide the memory of a CPU.
    """
    if budget_gb is not None:
        return int(budget_gb * GB)
    sharing = 1 if device.type == "cuda" else local_process_count()
    return used_bytes(device) + int(SAFE_SHARE * free_bytes(device) / sharing)


def used_bytes(device: "torch.device", *, peak: bool = False) -> int:
    """What this process uses now, or used at its peak: tensors on a GPU, resident memory on a CPU (0 if unknown)."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    return status("VmHWM" if peak else "VmRSS")


def free_bytes(device: "torch.device") -> int:
    """The least that any limit leaves."""
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [read_fields(Path("/proc/meminfo")).get("MemAvailable"), *left_in_cgroups()]
    limits.append(None if soft == resource.RLIM_INFINITY else soft - status("VmSize"))
    known = [left for left in limits if left is not None]
    return max(0, min(known)) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def left_in_cgroups() -> Iterator[int]:
    """What each cgroup of this process leaves, of version 2 or 1. File pages that the kernel can drop do not count as used."""
    with contextlib.suppress(OSError):
        for line in OF_PROCESS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = CGROUPS if not controllers else CGROUPS / "memory"
            limit, used, dropped = (
                ("memory.max", "memory.current", "inactive_file")
                if not controllers
                else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            )
            folder = root / path.lstrip("/")
            for group in (folder, *folder.parents):  # in a container its own group can be the root
                with contextlib.suppress(OSError, ValueError):
                    cache = read_fields(group / "memory.stat").get(dropped, 0)
                    yield (
                        int((group / limit).read_text(encoding="utf-8"))
                        - int((group / used).read_text(encoding="utf-8"))
                        + cache
                    )
                if group == root:
                    break


def status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    return read_fields(Path("/proc/self/status")).get(name, 0)


def read_fields(path: Path) -> dict[str, int]:
    """{name: number} of a file of the kernel with a field per line; kB as bytes. Empty where there is no such file."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, *rest = line.replace(":", " ").split()
            if rest and rest[0].isdigit():
                fields[name] = int(rest[0]) * (1024 if rest[1:] == ["kB"] else 1)
    return fields

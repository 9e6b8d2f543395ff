"""The processes of one launch (torchrun, accelerate, deepspeed, `rlhf pipeline`): their connection, and what they agree on.

Each process has a rank; the first one speaks and writes for all. A process that runs alone is its own first rank, and
everything here is then free. Not here: sums over ranks in training (`rlhf.training.loop.Ranks`, the engines).
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlhf.errors import UserError
from rlhf.runs.folders import is_main_process

T = TypeVar("T")
# The others wait while the first rank packs a corpus or writes a large checkpoint; torch's own limit is 10 to 30 minutes.
LONGEST_WAIT = timedelta(hours=12)


def process_count() -> int:
    """Processes of this launch, over all nodes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def connect(device: torch.device) -> None:
    """Open the connection between the processes, where there are several and it is not open yet."""
    if process_count() == 1 or dist.is_initialized():
        return
    if device.type == "cuda":
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= count:
            raise UserError(
                f"process {local + 1} of this machine: it has {count} GPUs: start one process a GPU at most"
            )
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=LONGEST_WAIT)


def disconnect() -> bool:
    """Close the connection, once every process is here; whether there was one.

    A process that was connected had better `leave()` then: threads of the connection drop their last tensors when they get
    to it, and where the interpreter is ending by then they abort the process, in some hundredths of all launches. What
    started it takes the launch for failed, and ends the others, which may still be writing.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    wait_for_all()
    dist.destroy_process_group()
    return True


def wait_for_all() -> None:
    """Until every process is here."""
    if process_count() > 1:
        dist.barrier()


def share(value: T, source: int = 0) -> T:
    """The value of one rank, on every rank."""
    if process_count() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def gather_flags(flag: bool) -> list[bool]:
    """Every rank's flag, in order of rank, on every rank."""
    if process_count() == 1:
        return [flag]
    found: list[Any] = [None] * process_count()
    dist.all_gather_object(found, flag)
    return found


def on_first_rank(action: Callable[[], T]) -> T:
    """What an action gives that only the first rank takes; the others wait and get a copy.

    Raises: UserError on every rank where the first one's action raised it.
    """
    if process_count() == 1:
        return action()
    found: tuple[Any, str | None] = (None, None)
    if is_main_process():
        try:
            found = (action(), None)
        except UserError as error:
            found = (None, str(error))
    value, problem = share(found)
    if problem is not None:
        raise UserError(problem)
    return value

"""Ranks: the processes of one launch, their connection, and the values that they exchange.

Rank 0 prints and writes for all. A process that runs alone is rank 0, and everything here then costs nothing: torch is
imported only inside the functions that communicate.
"""

import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.errors import UserError
from rlhf.system.terminal import one_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import Store

T = TypeVar("T")
# Ranks wait while rank 0 packs a corpus or writes a large checkpoint; torch's own limit is 10 to 30 minutes.
LONGEST_WAIT = timedelta(hours=12)
WAIT_SECONDS = 300.0  # until a launch whose processes do not meet is given up
BUCKET = 2**25  # elements of gradients that travel together: 128 MiB in float32
# What a launcher sets for each process.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How gloo and NCCL report a closed connection.
LOST_PROCESS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError", "NCCL communicator was aborted",
    "remote process exited",
)  # fmt: skip


def process_count() -> int:
    """Processes of this launch, over all nodes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_process_count() -> int:
    """Processes of this launch on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """This process's number in its launch, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_first() -> bool:
    """Whether this process prints and writes for its launch."""
    return rank() == 0


def launch_problem() -> str | None:
    """What is wrong with the launcher's variables, or None."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdigit()):
            return f"{name}={value}: want a whole number, as torchrun sets it: unset it to run as one process"
    return None


def connect(device: "torch.device", alone: bool = False) -> None:
    """Connect the processes, unless they are. alone: also a single one, which DeepSpeed needs even if there is no launcher."""
    import torch
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_initialized() or (process_count() == 1 and not alone):
        return
    if process_count() == 1:
        os.environ.setdefault("LOCAL_RANK", "0")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))  # the number of its GPU
        count = torch.cuda.device_count()
        if local >= count:
            raise UserError(f"process {local + 1} of this machine: it has {count} GPUs: start one process per GPU")
        torch.cuda.set_device(local)
    store = meet()
    store.set_timeout(LONGEST_WAIT)
    dist.init_process_group(backend, store=store, rank=rank(), world_size=process_count(), timeout=LONGEST_WAIT)


def meet() -> "Store":
    """The store of this launch: rank 0 opens it, the others connect; each waits until all are there.

    On one node everything listens on the loopback interface only, since neither the store nor gloo and NCCL
    authenticate the caller.
    Raises: UserError if a process is missing, the port is taken, or the launcher's variables are incomplete.
    """
    from torch.distributed import PrefixStore, TCPStore

    count, mine = process_count(), rank()
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        how = "start the processes with torchrun or launcher.processes, or unset WORLD_SIZE"
        raise UserError(f"WORLD_SIZE={count} without {' and '.join(missing)}: {how}")
    if mine >= count:
        raise UserError(f"RANK={mine}: want 0 to {count - 1}, since WORLD_SIZE={count}")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback and (is_loopback(address) or local_process_count() == count):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback[0])
    serves = mine == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun provides the store
    listener, deadline = None, time.monotonic() + WAIT_SECONDS
    try:
        if serves and is_loopback(address):  # torch's own listener would listen on every interface
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, port), family=family, backlog=4096).detach()
        while not serves:  # by short waits, between which a signal can end the process
            try:
                socket.create_connection((address, port), timeout=2).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        wait = timedelta(seconds=WAIT_SECONDS)
        made = TCPStore(address, port, count, serves, wait, False, multi_tenant=True, master_listen_fd=listener)
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", made)
        store.add("came", 1)
        while (came := store.add("came", 0)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{came} came")
            time.sleep(0.05)
    except (OSError, RuntimeError) as error:
        how = f"start all of them within {WAIT_SECONDS:.0f} s, choose another MASTER_PORT, or unset WORLD_SIZE to run as one"
        missed = f"the {count} processes of this launch did not meet there ({one_line(error, 200)})"
        raise UserError(f"{address}:{port}: {missed}: {how}") from error
    return store


def is_loopback(address: str) -> bool:
    """Whether an address reaches this machine only. A name is not looked up: elsewhere it may mean another machine."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def barrier() -> bool:
    """Wait until all processes have come here; returns whether there is a connection."""
    if "torch" not in sys.modules:  # no connection was opened
        return False
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return False
    dist.barrier()
    return True


def disconnect() -> bool:
    """Close the connection after all processes have reached this point; returns whether there was one.

    A process that was connected should then `end` at once: threads of the connection release their last tensors late,
    and in a few percent of launches abort an interpreter that is shutting down.
    """
    if connected := barrier():
        import torch.distributed as dist

        dist.destroy_process_group()
    return connected


def share(value: T) -> T:
    """Rank 0's value, on every rank."""
    if process_count() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def gather(value: T) -> list[T]:
    """A picklable value of every rank, in order of rank, on every rank."""
    if process_count() == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * process_count()
    dist.all_gather_object(values, value)
    return values


def divide(items: Sequence[Any], compute: Callable[[Sequence[Any]], Sequence[T]]) -> list[T]:
    """A result per item, of which each rank computes its share; all ranks call it and get all. compute: items -> results."""
    parts, ranks = gather(list(compute(items[rank() :: process_count()]))), process_count()
    return [parts[i % ranks][i // ranks] for i in range(len(items))]


def on_first_rank(action: Callable[[], T]) -> T:
    """The result of an action that only rank 0 runs; the others wait and get a copy.
    Raises: UserError on every rank if rank 0's action raised it.
    """
    outcome: Any = None
    if is_first():
        try:
            outcome = action()
        except UserError as error:
            outcome = error
    outcome = share(outcome)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


class Ranks:
    """Sums and maxima over the processes of a run, on their device. With one process they return their argument."""

    def __init__(self, device: "torch.device"):
        self.device = device
        self.rank, self.count = rank(), process_count()

    def sum_tensor(self, x: "Tensor") -> "Tensor":
        """The sum of a tensor over ranks, on every rank; `x` is not changed."""
        if self.count == 1:
            return x
        import torch.distributed as dist

        total = x.clone()
        dist.all_reduce(total)
        return total

    def sum_tensors(self, tensors: "list[Tensor]") -> "list[Tensor]":
        """The sums of tensors of one type, in messages of up to BUCKET elements (of one tensor at least)."""
        import torch

        if self.count == 1:
            return tensors
        sums, bucket = [], []
        for i, x in enumerate(tensors):
            bucket.append(x)
            if i + 1 == len(tensors) or sum(map(torch.numel, bucket)) + tensors[i + 1].numel() > BUCKET:
                total = self.sum_tensor(torch.cat([t.flatten() for t in bucket]))
                parts = total.split([t.numel() for t in bucket])
                sums += [part.view(t.shape) for part, t in zip(parts, bucket, strict=True)]
                bucket = []
        return sums

    def sum(self, x: "Tensor | float") -> float:
        return self._reduce(x, "SUM")

    def max(self, x: "Tensor | float") -> float:
        return self._reduce(x, "MAX")

    def _reduce(self, x: "Tensor | float", how: str) -> float:
        if self.count == 1:
            return float(x)
        import torch
        import torch.distributed as dist

        # a copy, made without waiting for the GPU
        value = torch.as_tensor(x).detach().to(self.device, torch.float64, copy=True)
        dist.all_reduce(value, getattr(dist.ReduceOp, how))
        return float(value)

    def merge(self, sums: Any) -> Any:
        """`rlhf.runs.metric_table.Sums` of all ranks, added up."""
        total = type(sums)()
        for state in gather(sums.state()):
            total.merge(state)
        return total

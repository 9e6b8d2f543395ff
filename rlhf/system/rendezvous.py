"""How the processes of a launch find each other: rank 0 opens a store, the others connect to it, all wait until all are there.

The wait is bounded and reported, and a signal ends it, since it polls. On one node everything listens on the loopback
interface only, because neither the store nor the connections of gloo and NCCL authenticate the caller.
"""

import ipaddress
import os
import socket
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from rlhf.errors import UserError
from rlhf.system.terminal import say

if TYPE_CHECKING:
    from torch.distributed import Store

# Seconds until the launch is given up; until the missing processes are named; between two polls.
WAIT_SECONDS, SILENT_SECONDS, LOOK_SECONDS = 300.0, 10.0, 0.1


class Wait:
    """The time that is left for the others to appear; after a while it prints who is missing."""

    def __init__(self, place: str) -> None:
        self.place, self.speaks, self.started = place, True, time.monotonic()

    def pause(self, missing: str) -> None:
        """Sleep until the next poll. Raises: UserError if the time is up."""
        waited = time.monotonic() - self.started
        if waited > WAIT_SECONDS:
            raise UserError(
                f"{missing} did not come to {self.place} within {WAIT_SECONDS:.0f} s: start every process of the "
                "launch, or unset WORLD_SIZE to run as one"
            )
        if waited > SILENT_SECONDS and self.speaks:
            say(f"rlhf: waiting for {missing} at {self.place}, for up to {WAIT_SECONDS:.0f} s", sys.stderr)
            self.speaks = False
        time.sleep(LOOK_SECONDS)


def open_store(address: str, port: int, rank: int, count: int, attempt: str = "0", hosted: bool = False) -> "Store":
    """The store that all processes of a launch share, once all have connected.

    attempt: how often the launcher has restarted them. hosted: the launcher provides the store.
    Raises: UserError if a process is missing, or the port is taken.
    """
    from torch.distributed import PrefixStore, TCPStore

    wait = Wait(f"{address}:{port}")
    serves = rank == 0 and not hosted
    listener = None
    if not serves:
        while not answers(address, port):
            wait.pause("process 0" if not hosted else "the launcher")
    elif is_loopback(address):
        listener = listen(address, port)
    try:
        server = TCPStore(
            address,
            port,
            count,
            serves,
            timedelta(seconds=WAIT_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener,
        )
    except RuntimeError as error:
        raise taken(address, port, error) from error
    store = PrefixStore(f"attempt-{attempt}", server)
    store.set(str(rank), "here")
    missing = [other for other in range(count) if other != rank]
    while missing := [other for other in missing if not store.check([str(other)])]:
        named = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
        wait.pause(f"process{'es' if len(missing) > 1 else ''} {named} of {count} (counted from 0)")
    return store


def answers(address: str, port: int) -> bool:
    """Whether something listens at this address."""
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def listen(address: str, port: int) -> int:
    """A socket that listens on this address alone, as a file descriptor: torch's store would listen on every interface."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            raise taken(address, port, error) from error
        listener.listen(4096)
        return listener.detach()


def taken(address: str, port: int, error: Exception) -> UserError:
    return UserError(f"{address}:{port}: cannot listen there ({error}): choose another MASTER_PORT")


def is_loopback(address: str) -> bool:
    """Whether an address reaches this machine only. A name is not looked up: elsewhere it may mean another machine."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def stay_on_loopback() -> None:
    """Have gloo and NCCL listen on the loopback interface, unless the environment names another."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            os.environ.setdefault(variable, names[0])

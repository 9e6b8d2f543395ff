"""How processes find each other: on one node over the loopback interface alone, and not for ever."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.commands.launch import environments, run_processes
from rlhf.system.processes import is_loopback

ROOT = Path(__file__).parents[1]
# Everything that this process listens on, by the kernel's table: 0A is LISTEN; an address is hex, in the machine's byte order.
LISTENING = """
import os, sys
import torch, torch.distributed as dist
from rlhf.system.processes import connect, disconnect, rank
connect(torch.device("cpu"))
total = torch.ones(1)
dist.all_reduce(total)
sockets = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
found = []
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for row in (line.split() for line in open(table).read().splitlines()[1:]):
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets:
            found.append(row[1].rpartition(":")[0])
open(f"{sys.argv[1]}/{rank()}", "w").write(" ".join([str(int(total)), *found]))
disconnect()
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
@pytest.mark.parametrize("launcher", ["ours", "torchrun"])
def test_on_one_node_nothing_listens_beyond_the_loopback_interface(tmp_path, monkeypatch, launcher):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "listening.py"
    script.write_text(LISTENING)
    if launcher == "ours":
        assert run_processes([LISTENING, str(tmp_path)], 2, module="tests.snippet") == 0
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        subprocess.run([*command, str(tmp_path)], check=True, capture_output=True)
    seen = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert [total for total, *_ in seen] == ["2", "2"], "they have found each other"
    addresses = {address for _, *found in seen for address in found}
    assert addresses, "gloo listens somewhere"
    assert addresses <= LOOPBACK


def alone(**variables: str) -> subprocess.Popen[str]:
    """One process of a launch of two, with short waits; `connect` is what every stage begins with."""
    code = (
        "import torch; from rlhf.system import processes as r; from rlhf.system.exits import ending, interrupt_on_signals\n"
        "from rlhf.system.processes import connect\n"
        "r.WAIT_SECONDS, r.SILENT_SECONDS = 2.0, 0.5; interrupt_on_signals()\n"
        "with ending(): print('begun', flush=True); connect(torch.device('cpu'))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"} | variables
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_whose_peer_never_comes_says_so_and_ends(rank):
    port = environments(2, 1)[0]["MASTER_PORT"]
    _, told = alone(RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).communicate(timeout=60)
    missing = "process 1 of 2 (counted from 0)" if rank == "0" else "process 0"
    error = "" if rank == "0" else "process 1: "
    assert told.splitlines() == [
        f"rlhf: waiting for {missing} at 127.0.0.1:{port}, for up to 2 s",
        f"rlhf: error: {error}{missing} did not come to 127.0.0.1:{port} within 2 s: start every process of the launch, or unset "
        "WORLD_SIZE to run as one",
    ]


def test_a_signal_ends_the_wait():
    process = alone(RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=environments(2, 1)[0]["MASTER_PORT"])
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, told = process.communicate(timeout=20)
    assert process.returncode == 130 and told.splitlines()[-1] == "rlhf: interrupted"
    assert time.monotonic() - started < 1.5, "the wait itself would be longer"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "WORLD_SIZE=2 without RANK and MASTER_ADDR and MASTER_PORT: start the processes with torchrun"),
        ({"RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK=2: want 0 to 1, since WORLD_SIZE=2"),
    ],
)
def test_a_launch_that_nobody_leads_is_one_line(variables, said):
    process = alone(**variables)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2 and told.count("\n") == 1 and said in told


def test_a_port_that_is_taken_is_one_line():
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        process = alone(RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 2 and told.count("\n") == 1
    assert f"127.0.0.1:{port}: cannot listen there" in told and "choose another MASTER_PORT" in told


def test_names_of_other_machines_are_not_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "localhost", "::1")))
    assert not any(map(is_loopback, ("10.0.0.1", "node-0", "0.0.0.0", "::")))

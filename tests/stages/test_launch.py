"""Several processes for a stage: how they are started, distinguished, and ended together; how they meet: on one node over the loopback
interface alone, and not for ever."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rlhf
from rlhf.commands.launch import environments, run_processes
from rlhf.errors import UserError
from rlhf.runs.checkpoints import checkpoints
from rlhf.runs.folders import is_complete
from rlhf.system import processes
from rlhf.system.processes import LAUNCHER_VARIABLES, meet

from ..conftest import ROOT
from ..snippet import run_two, start_two
from .conftest import Run


def test_each_process_knows_its_place_and_the_first_failure_ends_all(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    code = f"import os; open('{tmp_path}/' + os.environ['RANK'], 'w').write(' '.join(os.environ[n] for n in {names}))"
    assert run_processes([code], 3, module="tests.snippet") == 0
    threads = max(1, (os.cpu_count() or 1) // 3)
    for i in range(3):
        assert (tmp_path / str(i)).read_text().split() == [str(i), str(i), "3", "3", "127.0.0.1", str(threads)]
    ports = {environment["MASTER_PORT"] for environment in environments(2, 0)}
    assert len(ports) == 1 and 1024 <= int(ports.pop()) < 65536
    assert "RANK" not in environments(1, 0)[0], "a process that runs alone is started plainly"
    assert environments(2, 5)[0].get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS"), "the setting decides"
    started = time.monotonic()
    code = f"import os, time; os.environ['RANK'] == '1' and exit(3); time.sleep(60); open('{tmp_path}/late', 'w')"
    assert run_processes([code], 2, module="tests.snippet") == 3
    assert time.monotonic() - started < 10 and not (tmp_path / "late").exists()


def test_a_killed_process_is_named(capfd):
    code = "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(60)"
    assert run_processes([code], 2, module="tests.snippet") == 137
    assert capfd.readouterr().err.strip() == "rlhf: process 1 of 2 was killed by signal 9; the others are stopped too"


def wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stage_of_two_processes_reports_a_mistake_once():
    code, told = run_two("rlhf", "pretrain", "pretrain.lr=-1")
    assert code == 2 and told == ["rlhf: error: pretrain.lr=-1.0: want more than 0 and at most 10"]
    assert run_two("rlhf", "--version") == (0, [])


STOPS = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
def stop(*signal):
    (folder / f"done-{rank}").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
(folder / f"ready-{rank}").write_text("ready")
time.sleep(60)
"""


def test_a_signal_reaches_all(tmp_path):
    parent = start_two("tests.snippet", STOPS, str(tmp_path))
    wait_for([tmp_path / f"ready-{i}" for i in range(2)])
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(timeout=30) == 130
    assert all((tmp_path / f"done-{i}").exists() for i in range(2))


def stage_words(run: Run, *more: str) -> list[str]:
    settings = ["pretrain.optimizer=adamw", "pretrain.warmup_tokens=0", "checkpoints.every_seconds=0"]
    return ["pretrain", "--shared-settings", *run.words(*settings, *more)]


NOT_FINITE = """
import sys
from rlhf.model.fused_loss import NextToken
forward = NextToken.forward
NextToken.forward = lambda self, *given, **named: forward(self, *given, **named) * float("nan")
from rlhf.cli import main; main(sys.argv[1:])
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["none", "zero2", "zero3"])
def test_a_gradient_that_is_not_finite_stops_all_processes(copy_until, way):
    run = copy_until("pretrain")
    code, told = run_two("tests.snippet", NOT_FINITE, *stage_words(run, f"deepspeed={way}"))
    told = [line for line in told if line.startswith("rlhf: ")]
    assert code == 2 and len(told) == 1 and "not finite" in told[0]
    folder = run.folder / "pretrain"
    assert not is_complete(folder) and (folder / "offending_batch.safetensors").exists()
    for path in checkpoints(folder / "checkpoints"):
        weights = load_file(path / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in weights.values()), path


# Like bin/rlhf, whose own folder comes first.
CONSOLE = """
import sys
from rlhf.__main__ import main
if __name__ == "__main__":
    from rlhf.commands.launch import import_once, run_processes
    import_once(["hydra"])
    sys.exit(run_processes(["--version"]))
"""


def test_what_the_console_script_starts_says_nothing_of_python_and_takes_no_file_here_for_a_module(tmp_path):
    """The server that forks imports what this process would, not a user's hydra.py."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "hydra.py").write_text("raise RuntimeError('taken for the library')\n")
    (tmp_path / "console.py").write_text(CONSOLE)
    command, environment = [sys.executable, tmp_path / "console.py"], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"rlhf {rlhf.__version__}\n", "")


# Process 0 starts a program and kills itself or the launcher.
KILLS = """
import multiprocessing, os, signal, subprocess, sys, time
if os.environ["RANK"] == "0":
    open(sys.argv[1], "w").write(str(subprocess.Popen(["sleep", "60"], stderr=subprocess.DEVNULL).pid))
    os.kill(os.getpid() if sys.argv[2] == "itself" else multiprocessing.parent_process().pid, signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.parametrize(("victim", "code"), [("itself", 128 + signal.SIGKILL), ("the launcher", -signal.SIGKILL)])
def test_what_a_killed_process_has_started_ends_with_the_launch(tmp_path, victim, code):
    started = time.monotonic()
    assert run_two("tests.snippet", KILLS, str(tmp_path / "pid"), victim)[0] == code
    assert time.monotonic() - started < 45, "the other process, which holds standard error, ends too"
    ended, status = time.monotonic() + 5, Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    while status.exists() and ") Z " not in status.read_text() and time.monotonic() < ended:
        time.sleep(0.01)
    assert not status.exists() or ") Z " in status.read_text(), "nobody but init waits for it"


# Everything that this process listens on, by the kernel's table: 0A is LISTEN; an address is hex, in the machine's byte order.
LISTENING = """
import os, sys
import torch, torch.distributed as dist
from rlhf.system import processes
from rlhf.system.exits import end
from rlhf.system.processes import Ranks, connect, disconnect, rank
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
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
# Gradients are summed in a few messages; the sums are those of one message per tensor.
GRADIENTS = """
generator = torch.Generator().manual_seed(rank())
own = [torch.randn(shape, generator=generator) for shape in ((3, 5), (), (40,), (7, 2), (1,))]
before, sent = [x.clone() for x in own], []
each = [Ranks(torch.device("cpu")).sum_tensor(x) for x in own]
reduce = dist.all_reduce
dist.all_reduce = lambda x, *more: (sent.append(x.numel()), reduce(x, *more))
processes.BUCKET = 32
together = Ranks(torch.device("cpu")).sum_tensors(own)
assert sent == [16, 40, 15], sent
assert all(a.equal(b) for a, b in zip(together, each, strict=True)), "to the digit"
assert all(a.equal(b) for a, b in zip(own, before, strict=True)), "what was given is left alone"
"""
END = "if disconnect():\n    end(0, at_once=True)\n"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
@pytest.mark.parametrize("launcher", ["ours", pytest.param("torchrun", marks=pytest.mark.long)])
def test_two_processes_listen_on_the_loopback_interface_alone_and_sum_gradients(tmp_path, monkeypatch, launcher):
    code = LISTENING + GRADIENTS + END
    if launcher == "ours":
        assert run_processes([code, str(tmp_path)], 2, module="tests.snippet") == 0
    else:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        script = tmp_path / "listening.py"
        script.write_text(code)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
        subprocess.run([*command, tmp_path], check=True, capture_output=True)
    seen = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert [total for total, *_ in seen] == ["2", "2"], "they have found each other"
    addresses = {address for _, *found in seen for address in found}
    assert addresses, "gloo listens somewhere"
    assert addresses <= LOOPBACK


@pytest.fixture
def alone(monkeypatch):
    """Sets the variables of one process of a launch of two, with a short wait; returns the port."""
    monkeypatch.setattr(processes, "WAIT_SECONDS", 1.0)
    port = environments(2, 1)[0]["MASTER_PORT"]

    def launch(**variables: str) -> str:
        for name in LAUNCHER_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | variables).items():
            monkeypatch.setenv(name, value)
        return port

    return launch


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_whose_peer_never_comes_is_one_line(alone, rank):
    port = alone(RANK=rank)
    with pytest.raises(
        UserError, match=rf"^127.0.0.1:{port}: the 2 processes of this launch did not meet there [^\n]*within 1 s"
    ):
        meet()


def test_a_launch_that_nobody_leads_and_a_port_that_is_taken_are_one_line(alone):
    alone(MASTER_ADDR="", MASTER_PORT="")
    with pytest.raises(UserError, match="WORLD_SIZE=2 without RANK and MASTER_ADDR and MASTER_PORT: start"):
        meet()
    alone(RANK="2")
    with pytest.raises(UserError, match="RANK=2: want 0 to 1, since WORLD_SIZE=2"):
        meet()
    with socket.create_server(("127.0.0.1", int(alone(RANK="0")))) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: .*in use.*choose another MASTER_PORT"):
            meet()

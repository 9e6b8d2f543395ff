"""Ranks are known in one module, which costs nothing to import."""

import re
import subprocess
import sys
from pathlib import Path

import rlhf
from rlhf.commands.launch import run_processes
from rlhf.system.processes import LAUNCHER_VARIABLES, is_first, launch_environment, rank

HOME = Path(rlhf.__file__).parent


def test_one_module_reads_what_a_launcher_sets():
    said = re.compile("|".join(rf"""["']{name}["']""" for name in LAUNCHER_VARIABLES))
    asking = {path.name for path in HOME.rglob("*.py") if said.search(path.read_text(encoding="utf-8"))}
    assert asking == {"processes.py"}


def test_it_is_imported_without_torch():
    code = "import sys, rlhf.system.processes as p; assert not p.disconnect() and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_launch_and_a_process_of_its_own(monkeypatch):
    for name, value in launch_environment(1, 3, "127.0.0.1", 4567).items():
        monkeypatch.setenv(name, value)
    assert (rank(), is_first()) == (1, False)


GRADIENTS = """
import sys
import torch, torch.distributed as dist
from rlhf.system import processes
from rlhf.system.processes import Ranks, connect, disconnect, rank
from rlhf.system.exits import leave
connect(torch.device("cpu"))
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
if disconnect():
    leave(0)
"""


def test_tensors_are_summed_in_a_few_messages():
    """Two processes: the sums are those of one message per tensor."""
    assert run_processes([GRADIENTS], 2, module="tests.snippet") == 0

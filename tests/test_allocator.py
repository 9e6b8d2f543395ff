"""The allocator's setting: it takes hold, keeps away from what people set, and is called where stages begin."""

import subprocess
import sys

import pytest

from rlhf.cpu.machine import keep_freed_memory

# A process that imports once; each case is a fork of it, since the setting holds for a whole process.
CASES = """
import ctypes, os, re, resource
from pathlib import Path
import torch
from rlhf.cpu.machine import keep_freed_memory, return_freed_memory
from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.training.usage import LARGE
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def block(size):
    return ctypes.memset(ctypes.c_void_p(libc.malloc(size)), 1, size)

def kilobytes(name):
    return re.search(name + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]

def faults(kept):
    if kept:
        assert keep_freed_memory()
    for times in range(8):
        if times == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for one in [block(64 << 20), block(64 << 20)]:
            libc.free(one)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def gap(returned):
    assert keep_freed_memory()
    libc.free(block(20 << 20))
    freed, _ = block(20 << 20), block(1 << 10)
    libc.free(freed)
    if returned:
        assert return_freed_memory()
    return kilobytes("VmRSS")

def layers(recomputing):
    assert keep_freed_memory(*([LARGE] if recomputing else []))
    model = GPTForCausalLM(GPTConfig(vocab_size=300, context_length=1024, n_layer=8, n_head=4, width=256))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model.model(torch.zeros(4, 1024, dtype=torch.int64))
    return kilobytes("VmHWM")

for case in (faults, gap, layers):
    for choice in (True, False):
        if not os.fork():
            os.write(1, f"{case.__name__} {choice} {case(choice)}\\n".encode())
            os._exit(0)
        assert os.wait()[1] == 0
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing is set")
def test_freed_memory_is_kept_and_returned():
    done = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True, check=True)
    found = {(case, choice == "True"): int(value) for case, choice, value in map(str.split, done.stdout.splitlines())}
    # it is not fetched again: 10 blocks of 64 MiB: 4096 bytes per page make 163,840 of them, or 320 if pages are huge
    assert found["faults", True] * 10 < found["faults", False], found
    # it is returned below what is in use
    assert found["gap", True] < found["gap", False] - 15 * 1024, found
    # inputs kept between layers cost no gaps if activations are recomputed
    wide = 4 * 1024 * 4 * 256 * 4 // 2**10  # kB of a block's widest temporary, 16 MB
    assert found["layers", True] < found["layers", False] - 3 * wide, found


def test_what_people_set_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert keep_freed_memory() is False

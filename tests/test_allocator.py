"""The allocator's setting: it takes hold, keeps away from what people set, and is called where stages begin."""

import subprocess
import sys

import pytest

from rlhf.cpu.machine import keep_freed_memory

PROBE = """
import ctypes, resource, sys
from rlhf.cpu.machine import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def use_two_blocks():
    blocks = [ctypes.memset(ctypes.c_void_p(libc.malloc(64 << 20)), 1, 64 << 20) for _ in range(2)]
    for block in blocks:
        libc.free(block)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    use_two_blocks()
before = faults()
for _ in range(5):
    use_two_blocks()
print(faults() - before)
"""


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing is set")


def run(code: str, kind: str) -> int:
    return int(subprocess.run([sys.executable, "-c", code, kind], capture_output=True, text=True, check=True).stdout)


@linux
def test_freed_memory_is_not_fetched_again():
    # 10 blocks of 64 MiB: 4096 bytes per page make 163,840 of them, or 320 if pages are huge
    assert run(PROBE, "kept") * 10 < run(PROBE, "as it is")


GAP = """
import ctypes, re, sys
from rlhf.cpu.machine import keep_freed_memory, return_freed_memory
assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def block(size):
    return ctypes.memset(ctypes.c_void_p(libc.malloc(size)), 1, size)
libc.free(block(20 << 20))
gap, _ = block(20 << 20), block(1 << 10)
libc.free(gap)
if sys.argv[1] == "returned":
    assert return_freed_memory()
print(re.search(r"VmRSS:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
"""


@linux
def test_freed_memory_is_returned_below_what_is_in_use():
    assert run(GAP, "returned") / 1024 < run(GAP, "as it is") / 1024 - 15  # MB


LAYERS = """
import re, sys, torch
from rlhf.cpu.machine import keep_freed_memory
from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.training.memory import LARGE
assert keep_freed_memory(*([LARGE] if sys.argv[1] == "recomputing" else []))
model = GPTForCausalLM(GPTConfig(vocab_size=300, context_length=1024, n_layer=12, n_head=4, width=256))
model.gradient_checkpointing_enable({"use_reentrant": False})
model.train()
model.model(torch.zeros(4, 1024, dtype=torch.int64))
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
"""


@linux
def test_inputs_kept_between_layers_cost_no_gaps_if_activations_are_recomputed():
    recomputing, as_it_is = run(LAYERS, "recomputing") / 1024, run(LAYERS, "as it is") / 1024
    wide = 4 * 1024 * 4 * 256 * 4 / 2**20  # MB of a block's widest temporary, 16
    assert recomputing < as_it_is - 3 * wide, (recomputing, as_it_is)


def test_what_people_set_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert keep_freed_memory() is False

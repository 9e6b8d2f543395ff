"""The allocator's setting: it takes hold, keeps away from what people set, and is called where stages begin."""

import subprocess
import sys

from rlhf.training.allocator import keep_freed_memory

PROBE = """
import resource, sys
from rlhf.training.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    x = torch.ones(4, 4 * 2**20); y = torch.ones(4, 4 * 2**20); del x, y
before = faults()
for _ in range(5):
    x = torch.ones(4, 4 * 2**20); y = torch.ones(4, 4 * 2**20); del x, y
print(faults() - before)
"""


def test_freed_memory_is_not_fetched_again():
    if not sys.platform.startswith("linux"):
        assert keep_freed_memory() is False
        return

    def faults(kind: str) -> int:
        done = subprocess.run([sys.executable, "-c", PROBE, kind], capture_output=True, text=True, check=True)
        return int(done.stdout)

    # 10 tensors of 64 MiB: 4096 bytes per page make 163,840 of them, or 320 if pages are huge. Where the system puts the heap
    # differs between processes and decides whether the freed blocks are reused: in some starts next to none is. One start
    # in which they are shows that the setting takes hold; without it there is none.
    usual = faults("as it is")
    assert any(faults("kept") * 1.5 < usual for _ in range(8))


def test_what_people_set_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert keep_freed_memory() is False

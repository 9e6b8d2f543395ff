"""What makes a CPU fast: loops in C, oneDNN's products, freed memory, threads. No result changes but by rounding.

Reached through `rlhf.ops.fast` alone; without this folder torch does the same work.
"""

from rlhf.cpu.allocator import keep_freed_memory, return_freed_memory
from rlhf.cpu.kernels import attend, can_attend, can_invert, invert
from rlhf.cpu.products import by_torch_alone, outer, packed_weights, plain_product, product
from rlhf.cpu.threads import adapting_threads

__all__ = [
    "adapting_threads",
    "attend",
    "by_torch_alone",
    "can_attend",
    "can_invert",
    "invert",
    "keep_freed_memory",
    "outer",
    "packed_weights",
    "plain_product",
    "product",
    "return_freed_memory",
]

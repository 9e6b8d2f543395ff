"""What makes a CPU fast: loops in C, oneDNN's products, freed memory, threads. No result changes but by rounding.

Reached through `rlhf.ops.fast` alone; without this folder torch does the same work.
"""

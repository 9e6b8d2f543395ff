"""What makes a CPU fast: loops in C, oneDNN's products, threads and freed memory. No result changes but by rounding.

Reached through `rlhf.ops.fast` alone; without this folder torch does the same work.
"""

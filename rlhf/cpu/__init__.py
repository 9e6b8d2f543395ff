"""What makes a CPU fast: loops in C, oneDNN's products, threads and freed memory, reached through `rlhf.ops.fast` alone."""

"""How models are measured: scores, best of n, statistics, the reward model's report."""

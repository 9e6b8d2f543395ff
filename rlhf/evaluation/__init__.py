"""Evaluation of models: scores, best of n, statistics, the reward model's report."""

"""How often labelers agree with each other."""

"""Planning: memory, time and cost of a run by closed formulas over settings. Nothing here imports torch or runs a model."""

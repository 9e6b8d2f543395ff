"""The gold world: truth, speakers, judge and labelers. Nothing here imports torch."""

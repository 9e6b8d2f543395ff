"""The gold world: requests with known answers, speakers, judge and labelers. Nothing here imports torch."""

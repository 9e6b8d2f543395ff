"""The gold world: requests with known answers, people who answer and rank, and the true score. Nothing here imports torch."""

"""Training, shared by all stages: devices, the loop, optimizers, sharding."""

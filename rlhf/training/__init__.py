"""How anything here trains: processes, devices, the loop, optimizers, sharding."""

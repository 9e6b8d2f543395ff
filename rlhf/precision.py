"""Which precision training really uses. Imports torch only if there may be a GPU to ask about."""

import sys
from pathlib import Path

from rlhf.config import Config

DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA's GPUs, of these under Windows' Linux, of AMD's


def precision_of(config: Config) -> str:
    """float32 or bfloat16: `precision`, or what `auto` comes to on this machine."""
    if config.precision != "auto":
        return config.precision
    gpu_possible = "torch" in sys.modules or any(Path(driver).exists() for driver in DRIVERS)
    return "bfloat16" if config.device != "cpu" and gpu_possible and gpu_has_bfloat16() else "float32"


def gpu_has_bfloat16() -> bool:
    """Whether torch sees a GPU that computes in bfloat16, not by emulation."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)

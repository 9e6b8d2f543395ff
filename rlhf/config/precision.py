"""The precision in which models compute. Imports torch only if there may be a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config import Config
from rlhf.errors import UserError

if TYPE_CHECKING:
    import torch

DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA's GPUs, the same under WSL, AMD's


def precision_of(config: Config) -> str:
    """float32 or bfloat16: `precision`, with `auto` resolved for this machine."""
    if config.precision != "auto":
        return config.precision
    gpu_possible = "torch" in sys.modules or any(Path(driver).exists() for driver in DRIVERS)
    return "bfloat16" if config.device != "cpu" and gpu_possible and gpu_has_bfloat16() else "float32"


def gpu_has_bfloat16() -> bool:
    """Whether torch sees a GPU that computes in bfloat16, not by emulation."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def wants_bfloat16(config: Config, device: "torch.device") -> bool:
    """Whether models compute in bfloat16, with float32 master weights. Raises: UserError if the GPU has none."""
    if config.precision == "auto":
        return device.type == "cuda" and gpu_has_bfloat16()
    if config.precision == "bfloat16" and device.type == "cuda" and not gpu_has_bfloat16():
        raise UserError("precision=bfloat16: this GPU has none: use precision=float32")
    return config.precision == "bfloat16"


@contextmanager
def inference(config: Config, device: "torch.device") -> Iterator["torch.device"]:
    """How models run outside training: without gradients, their products in the precision of training; yields the device."""
    import torch

    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=wants_bfloat16(config, device)):
        yield device

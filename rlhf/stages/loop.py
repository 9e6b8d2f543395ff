"""What our own training loops (reward model, PPO) share: the accelerator, whole checkpoints, learning rates."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from rlhf.errors import UserError


def make_accelerator(device: torch.device) -> Accelerator:
    return Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if device.type == "cuda" else "no")


def save_training(
    folder: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Write weights (safetensors), optimizer and random state (tensors), and the loop's own state (JSON)."""
    for name, module in modules.items():
        save_model(module, str(folder / f"{name}.safetensors"))
    torch.save({"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, folder / "optimizer.pt")
    (folder / "state.json").write_text(json.dumps(state))


def load_training(folder: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read what `save_training` wrote into the modules and the optimizer; returns the loop's own state."""
    for name, module in modules.items():
        load_model(module, str(folder / f"{name}.safetensors"))
    saved = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    return json.loads((folder / "state.json").read_text())


def gradient_norm(parameters: Any) -> Tensor:
    """The joint 2-norm of all gradients."""
    norms = [p.grad.norm() for p in parameters if p.grad is not None]
    return torch.stack(norms).norm() if norms else torch.tensor(0.0)


def refuse_nonfinite(stage: Any, values: Mapping[str, Tensor | float], batch: Mapping[str, Tensor]) -> None:
    """Invariant 8: stop before the optimizer step when something is not finite, and save the batch that did it.

    Raises: UserError.
    """
    bad = [name for name, value in values.items() if not torch.isfinite(torch.as_tensor(value)).all()]
    if not bad:
        return
    path = stage.folder / "offending_batch.safetensors"
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in batch.items()}, str(path))
    raise UserError(
        f"{stage.name}: {', '.join(bad)} not finite: stopped before the step, the last checkpoint is kept, the batch is "
        f"in {path}: look at it, or lower the learning rate and run again"
    )

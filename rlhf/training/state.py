"""Checkpoint contents: whole float32 tensors by parameter name, as safetensors, which contain no code.

A checkpoint fits any number of processes and any ZeRO stage: slices are gathered when it is written (`zero_state.py`)
and divided again when it is read.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf.errors import UserError
from rlhf.runs.checkpoints import save_checkpoint
from rlhf.runs.stage import Stage
from rlhf.system.processes import gather, rank
from rlhf.training.gather import gathered, gathered_state
from rlhf.training.optim import steps_on_device

FORM = 2  # of a checkpoint; raised when an older one can no longer be read
# {"weights", "steps", and a tensor kind of the optimizer such as "exp_avg": {parameter's name: tensor}}
State = Mapping[str, Mapping[str, Tensor]]


class PlainState:
    """Reads and writes the state of a module whose optimizer holds whole tensors."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer):
        self.module, self.optimizer = module, optimizer

    def read(self) -> dict[str, dict[str, Tensor]] | None:
        """The state, on the CPU; None on every rank but the first.

        Parameters that have taken no step yet have weights only. Every rank has to call it.
        """
        weights = gathered_state(self.module)
        if weights is None:
            return None
        state: dict[str, dict[str, Tensor]] = {"weights": weights, "steps": {}}
        for name, p in self.module.named_parameters():
            for kind, value in self.optimizer.state.get(p, {}).items():
                if kind == "step":
                    state["steps"][name] = torch.as_tensor(value).reshape(()).float().cpu()
                elif isinstance(value, Tensor):
                    state.setdefault(kind, {})[name] = on_cpu(value)
        return state

    @torch.no_grad()
    def write(self, state: State) -> None:
        put_weights(self.module, state["weights"])
        kinds = [kind for kind in state if kind not in ("weights", "steps")]
        on_device = steps_on_device(self.optimizer)
        for name, p in self.module.named_parameters():
            restored: dict[str, Any] = {
                kind: state[kind][name].to(p, copy=True) for kind in kinds if name in state[kind]
            }
            if name in state["steps"]:
                restored["step"] = state["steps"][name].to(p.device if on_device else "cpu", copy=True)
            if restored:
                self.optimizer.state[p] = restored


def write_checkpoint(
    stage: Stage,
    step: int,
    state: State | None,
    notes: Mapping[str, Any],
    *,
    figure: float | None = None,
    more: Callable[[Path], Any] = lambda folder: None,
) -> None:
    """checkpoints/step-N: the state, the loop's notes, every rank's random numbers. Every rank has to call it; rank 0, whose
    `state` is not None, writes.

    figure: for checkpoints.keep_best, higher is better. more: writes further files.
    """
    random = {name: value for part in gather(random_state()) for name, value in part.items()}

    def write(folder: Path) -> None:
        assert state is not None
        write_state(folder, state, notes)
        save_file(random, str(folder / "rng.safetensors"))
        more(folder)

    if state is not None:
        save_checkpoint(stage.checkpoints, step, write, stage.config.checkpoints, figure)


def write_state(folder: Path, state: State, notes: Mapping[str, Any]) -> None:
    """Whole tensors as safetensors, the loop's own notes as JSON."""
    for name, tensors in state.items():
        save_file(dict(tensors), str(folder / f"{name}.safetensors"))
    (folder / "state.json").write_text(json.dumps({"form": FORM, "notes": notes}))


def read_state(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The result of `write_state`. Raises: UserError for a checkpoint of an earlier version."""
    notes = json.loads((folder / "state.json").read_text()) if (folder / "state.json").exists() else {}
    if notes.get("form") != FORM:
        raise UserError(
            f"{folder}: was written by an earlier version, in a form that is no longer read: "
            "add overwrite=true to start again"
        )
    files = [path for path in folder.glob("*.safetensors") if path.stem != "rng"]
    return {path.stem: load_file(str(path)) for path in files}, notes["notes"]


def random_state() -> dict[str, Tensor]:
    """torch's random state of this process."""
    suffix = f"-{rank()}" if rank() else ""
    state = {f"rng{suffix}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"cuda{suffix}"] = torch.cuda.get_rng_state()
    return state


def put_random_state(folder: Path) -> None:
    """Restore this rank's random state of torch; a rank that did not exist then keeps its own."""
    state = load_file(str(folder / "rng.safetensors"))
    suffix = f"-{rank()}" if rank() else ""
    if f"rng{suffix}" in state:
        torch.set_rng_state(state[f"rng{suffix}"])
    if f"cuda{suffix}" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[f"cuda{suffix}"])


@torch.no_grad()
def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into a module's parameters and persistent buffers, also under ZeRO."""
    persistent = module.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    for name, tensor in (dict(module.named_parameters()) | buffers).items():
        with gathered([tensor], write=True):
            if tensor.numel():
                tensor.copy_(weights[name].reshape(tensor.shape))


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU in float32 (integers keep their type) that shares no memory."""
    copied = tensor.detach().cpu().clone()
    return copied.float() if copied.is_floating_point() else copied

"""Gathers whole weights from the ranks, and writes model folders that are read back afterwards.

The same functions work without DeepSpeed and under ZeRO-1, 2 and 3.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf.errors import UserError
from rlhf.system.files import read_json, write_json
from rlhf.system.processes import is_first


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has divided a parameter, so that the tensor itself is empty between its uses."""
    return hasattr(parameter, "ds_id")


@contextlib.contextmanager
def gathered(parameters: Iterable[Tensor], *, write: bool = False) -> Iterator[None]:
    """A context in which the parameters are whole on every rank. All ranks must enter it.

    write: rank 0's changes are kept on every rank. Without ZeRO-3 the parameters are whole anyway, and each rank must
    write the same values itself.
    """
    divided = [p for p in parameters if is_partitioned(p)]
    if not divided:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(divided, modifier_rank=0 if write else None):
        yield


def slice_of_rank(tensor: Tensor, rank: int, count: int) -> Tensor:
    """A rank's slice of a whole tensor under ZeRO-3, which divides the flat tensor into `count` equal slices; the last one is
    padded.
    """
    size = -(-tensor.numel() // count)
    flat = nn.functional.pad(tensor.flatten(), (0, size * count - tensor.numel()))
    return flat[size * rank : size * (rank + 1)]


def whole_tensor(parameter: nn.Parameter) -> Tensor:
    """One parameter whole, on the CPU. All ranks must call it.

    In bfloat16 under ZeRO this is the optimizer's float32 copy.
    """
    trained = hasattr(parameter, "_z3_optimizer") or hasattr(parameter, "_hp_mapping")
    if trained and parameter.dtype != torch.float32:
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter).detach().cpu()
    with gathered([parameter]):
        return parameter.detach().to("cpu", copy=True)


@torch.no_grad()
def gathered_state(module: nn.Module) -> dict[str, Tensor] | None:
    """{name: whole tensor on the CPU} of a module, not of an engine around it; None on every rank but the first.

    All ranks must call it. Tensors come one by one, so that no rank but the first holds more than one. A weight with
    several names (a tied embedding) appears once, under its first name.
    """
    keeps = is_first()
    state: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        tensor = whole_tensor(parameter)
        if keeps:
            state[name] = tensor
    if not keeps:
        return None
    persistent = module.state_dict().keys()
    return state | {name: buffer.cpu().clone() for name, buffer in module.named_buffers() if name in persistent}


def save_model_checked(model: PreTrainedModel, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write a model folder from gathered weights and read it back.

    Raises: UserError if a file differs from the gathered weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(folder), state_dict=dict(state))  # a copy: save_pretrained empties the dictionary
    _state_type(folder, state)
    # experts are one tensor in memory and several in the file
    check_saved(folder, revert_weight_conversion(model, dict(state)))


def _state_type(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write the dtype of the stored weights to config.json, if the module in memory has another."""
    kind = str(next(t for t in state.values() if t.is_floating_point()).dtype).removeprefix("torch.")
    config = read_json(folder / "config.json")
    if config and config.get("dtype") != kind:
        write_json(folder / "config.json", config | {"dtype": kind})


def check_saved(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Raises: UserError if the folder's safetensors files lack a tensor or have another value."""
    left = set(state)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            names = [name for name in file.keys() if name in left]  # noqa: SIM118 (not a dictionary)
        for name in names:  # opened for each tensor: an open file keeps everything that was read from it in memory
            with safe_open(str(path), framework="pt") as file:
                if torch.equal(file.get_tensor(name), state[name]):
                    left.remove(name)
    if left:
        raise UserError(
            f"{folder}: {', '.join(sorted(left)[:3])} differ after reading back, so the disk is faulty: "
            "choose another with runs_dir=…"
        )

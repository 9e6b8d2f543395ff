"""Models under ZeRO-3, divided among the ranks while they are read: no rank has more than its slices and one whole weight.

Without ZeRO-3 the same functions load whole models, and so they do if a file has other names than the model's weights, as those
of experts.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from rlhf.config import Config
from rlhf.config.precision import wants_bfloat16
from rlhf.model.checkpoint import CHOSEN_HERE, LAYER, check_finite, check_weights, read_config, stored_tensors
from rlhf.model.classifier import TextRewardModel, load_reward_model
from rlhf.model.heads import LayerMix, RewardConfig, RewardModel, ScalarHead, first_blocks, width_of
from rlhf.model.linear import hold_rounded
from rlhf.ops.fast import return_freed_memory
from rlhf.system.processes import is_first
from rlhf.training.engine import deepspeed_settings, import_deepspeed, zero_stage
from rlhf.training.setup import load_policy, read_policy_config

# Smaller weights stay whole and in float32 until DeepSpeed's engine divides them, so that heads can be scaled before.
LEAST = 2**14  # elements


def load_lm(config: Config, folder: Path, device: torch.device, dropout: float | None = None) -> Any:
    """`load_policy`, divided under ZeRO-3."""
    if zero_stage(config) == 3:
        described = read_policy_config(folder, dropout)
        if (model := _divided(config, described, partial(_lm, described), folder, device)) is not None:
            if (folder / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(str(folder))
            return model
    return load_policy(folder, dropout)


def load_reward(config: Config, folder: Path, device: torch.device) -> RewardModel | TextRewardModel:
    """`load_reward_model`, divided under ZeRO-3 if it reads tokens."""
    if zero_stage(config) == 3 and (folder / "config.json").is_file():
        described: Any = read_config(str(folder), f"{folder}: not a readable reward model", "train it again")
        if isinstance(described, RewardConfig):
            model = _divided(config, described, partial(RewardModel, described), folder, device)
            if model is not None:
                return model
    return load_reward_model(folder, device)


def reward_model_on(config: Config, folder: Path, device: torch.device, layers: int | str | None = None) -> RewardModel:
    """`RewardModel.from_causal_lm` of a folder, divided under ZeRO-3."""
    if zero_stage(config) == 3:
        described = read_policy_config(folder)
        with init_empty_weights(include_buffers=False):
            whole = _lm(described)
        prefix, trunk = f"{whole.base_model_prefix}.", whole.base_model
        cut = first_blocks(trunk, layers) if isinstance(layers, int) else None
        described = RewardConfig(trunk=described if cut is None else cut, mix=layers == "mix")
        stored = lambda name: name.replace("trunk.", prefix, 1)  # noqa: E731
        model = _divided(config, described, partial(RewardModel, described), folder, device, stored, cut is None)
        if model is not None:
            model.head = ScalarHead(width_of(described.trunk)).initialise()
            model.mix = LayerMix(described.trunk.num_hidden_layers + 1) if described.mix else None
            return model
    return RewardModel.from_causal_lm(str(folder), layers)


def _lm(described: Any) -> Any:
    return AutoModelForCausalLM.from_config(described, dtype=torch.float32, trust_remote_code=False, **CHOSEN_HERE)


@torch.no_grad()
def _divided(
    config: Config,
    described: Any,
    build: Callable[[], Any],
    folder: Path,
    device: torch.device,
    stored: Callable[[str], str] | None = None,
    all_blocks: bool = True,
) -> Any | None:
    """The model that `build` makes, in eval mode, with a folder's weights: rank 0 reads one after the other and sends it to the rest.
    stored: a weight's name in the files; if given, a head and a mix of layers may be missing there, and other ones may be left over.
    None if the files do not fit otherwise. Raises: UserError for weights that are not finite.
    """
    files = sorted(folder.glob("*.safetensors"))
    check_weights(str(folder), described, files)
    there = stored_tensors(files)
    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    where = {p: [n for n in map(stored or str, alike) if n in there] for p, alike in names.items()}
    missing = [alike for p, alike in names.items() if not where[p]]
    left = there.keys() - {name for found in where.values() for name in found}
    if stored is not None:
        missing = [alike for alike in missing if not alike[0].startswith(("head.", "mix."))]
        left = {name for name in left if all_blocks and LAYER.search(name)}
    if missing or left or any(there[found[0]][1] != p.numel() for p, found in where.items() if found):
        return None
    deepspeed = import_deepspeed(device)
    settings = deepspeed_settings(config, bfloat16=wants_bfloat16(config, device))
    for p, alike in names.items():
        if not where[p]:
            continue
        divides = p.numel() >= LEAST
        rounds = divides and wants_bfloat16(config, device)
        whole = nn.Parameter(torch.empty(p.shape, dtype=torch.bfloat16 if rounds else p.dtype))
        if is_first() or not divides:
            # opened for this weight alone: an open file keeps everything that was read from it in memory
            with safe_open(folder / there[where[p][0]][2], "pt") as file:
                whole.data = file.get_tensor(where[p][0]).to(p.dtype)
            check_finite({alike[0]: whole}, str(folder))
            if rounds:
                hold_rounded(whole, keep=bool(config.lora.rank))
        for name in alike:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, whole)
        if divides:
            deepspeed.zero.Init(module=nn.ParameterList([whole]), config_dict_or_path=settings, dtype=whole.dtype)
            return_freed_memory()  # slices in between would keep it from being used again
    return model.eval()

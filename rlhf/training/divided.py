"""Models under ZeRO-3, divided among the ranks while they are read: no rank has more than its slices and one whole
weight.

Without ZeRO-3 the same functions load whole models, and so they do if a file has other names than the model's weights,
as those of experts.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from rlhf.config import Config
from rlhf.config.precision import wants_bfloat16
from rlhf.model.checkpoint import CHOSEN_HERE, check_finite, check_weights, read_config, stored_tensors
from rlhf.model.classifier import TextRewardModel, load_reward_model
from rlhf.model.heads import RewardConfig, RewardModel, first_blocks, without_dropout
from rlhf.model.linear import hold_rounded
from rlhf.ops.fast import return_freed_memory
from rlhf.system.processes import is_first
from rlhf.training.engine import deepspeed_settings, import_deepspeed, zero_stage
from rlhf.training.setup import load_policy, read_policy_config

# Smaller weights stay whole and in float32 until DeepSpeed's engine divides them, so that heads can be scaled before.
LEAST = 2**14  # elements


def load_lm(config: Config, folder: Path, device: torch.device, dropout: float | None = None) -> Any:
    """`load_policy`, divided under ZeRO-3."""
    if (
        zero_stage(config) == 3
        and (model := _divided(config, read_policy_config(folder, dropout), folder, device)) is not None
    ):
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(folder))
        return model
    return load_policy(folder, dropout)


def load_reward(config: Config, folder: Path, device: torch.device) -> RewardModel | TextRewardModel:
    """`load_reward_model`, divided under ZeRO-3 if it reads tokens."""
    if zero_stage(config) == 3 and (folder / "config.json").is_file():
        described: Any = read_config(str(folder), f"{folder}: not a readable reward model", "train it again")
        if isinstance(described, RewardConfig) and (model := _divided(config, described, folder, device)) is not None:
            return model
    return load_reward_model(folder, device)


def reward_model_on(config: Config, folder: Path, device: torch.device, layers: int | str | None = None) -> RewardModel:
    """`RewardModel.from_causal_lm` of a folder, divided under ZeRO-3."""
    if zero_stage(config) == 3:
        described = read_policy_config(folder)
        without_dropout(described)
        if (whole := _divided(config, described, folder, device)) is not None:
            trunk = whole.base_model
            kept = first_blocks(trunk, layers) if isinstance(layers, int) else trunk.config
            return RewardModel.on_trunk(RewardConfig(trunk=kept, mix=layers == "mix"), trunk)
    return RewardModel.from_causal_lm(load_policy(folder), layers)


@torch.no_grad()
def _divided(config: Config, described: Any, folder: Path, device: torch.device) -> Any | None:
    """The reward model or causal language model of a configuration, in eval mode, with a folder's weights: rank 0 reads
    one after the other and sends it to the rest. None if the files do not fit. Raises: UserError for weights that are
    not finite.
    """
    files = sorted(folder.glob("*.safetensors"))
    check_weights(str(folder), described, files)
    there = stored_tensors(files)
    with init_empty_weights(include_buffers=False):
        if isinstance(described, RewardConfig):
            model: Any = RewardModel(described)
        else:
            like: Any = AutoModelForCausalLM
            model = like.from_config(described, dtype=torch.float32, trust_remote_code=False, **CHOSEN_HERE)
    model.tie_weights()
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    stored = {p: [name for name in alike if name in there] for p, alike in names.items()}
    if there.keys() - {name for found in stored.values() for name in found}:
        return None
    if not all(found and there[found[0]][1] == p.numel() for p, found in stored.items()):
        return None
    deepspeed = import_deepspeed(device)
    settings = deepspeed_settings(config, bfloat16=wants_bfloat16(config, device))
    for p, alike in names.items():
        divides = p.numel() >= LEAST
        rounds = divides and wants_bfloat16(config, device)
        whole = nn.Parameter(torch.empty(p.shape, dtype=torch.bfloat16 if rounds else p.dtype))
        if is_first() or not divides:
            # opened for this weight alone: an open file keeps everything that was read from it in memory
            name = stored[p][0]
            with safe_open(folder / there[name][2], "pt") as file:
                whole.data = file.get_tensor(name).to(p.dtype)
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

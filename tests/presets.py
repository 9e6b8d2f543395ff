"""The sizes of conf/model as configurations of our GPT."""

from functools import cache
from typing import Any

import torch

from rlhf.config.compose import compose_config
from rlhf.config.model import shape_of
from rlhf.model import GPTConfig, GPTForCausalLM


@cache
def settings_of(name: str) -> dict[str, Any]:
    return shape_of(compose_config([f"model={name}"]).model)


def preset(name: str, **overrides: Any) -> GPTConfig:
    """The configuration of conf/model/<name>.yaml, with fields replaced by `overrides`."""
    return GPTConfig(**{**settings_of(name), **overrides})


def make_gpt(seed: int = 0, **fields: Any) -> GPTForCausalLM:
    """A GPT of 2 layers with random weights, which has the kinds of the preset tiny unless `fields` say otherwise."""
    torch.manual_seed(seed)
    sizes = {"context_length": 32, "n_layer": 2, "n_head": 2, "width": 32}
    return GPTForCausalLM(preset("tiny", **{**sizes, **fields})).eval()

"""The sizes of conf/model as configurations of our GPT."""

from functools import cache
from typing import Any

from rlhf.config.compose import compose_config
from rlhf.config.model import shape_of
from rlhf.model import GPTConfig


@cache
def settings_of(name: str) -> dict[str, Any]:
    return shape_of(compose_config([f"model={name}"]).model)


def preset(name: str, **overrides: Any) -> GPTConfig:
    """The configuration of conf/model/<name>.yaml, with fields replaced by `overrides`."""
    return GPTConfig(**{**settings_of(name), **overrides})

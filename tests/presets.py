"""The sizes of conf/model as configurations of our GPT."""

from dataclasses import asdict
from functools import cache
from typing import Any

from rlhf.config.compose import compose_config
from rlhf.model import GPTConfig


@cache
def settings_of(name: str) -> dict[str, Any]:
    settings = asdict(compose_config([f"model={name}"]).model)
    return {key: value for key, value in settings.items() if key not in ("pretrained", "native")}


def preset(name: str, **overrides: Any) -> GPTConfig:
    """The configuration of conf/model/<name>.yaml, with fields replaced by `overrides`."""
    return GPTConfig(**{**settings_of(name), **overrides})

"""The sizes of conf/model as configurations of our GPT."""

from pathlib import Path
from typing import Any

import yaml

from rlhf.model import GPTConfig

FOLDER = Path(__file__).parents[1] / "conf" / "model"


def preset(name: str, **overrides: Any) -> GPTConfig:
    """The configuration of conf/model/<name>.yaml, with fields replaced by `overrides`."""
    settings = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return GPTConfig(**{**settings.get("model", settings), **overrides})

"""Loads models and checks that file and model have the same weights: missing ones would be random, extra ones ignored."""

import re
from typing import Any

import torch

from rlhf.errors import UserError

MOST_LAYERS = 10_000
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
LAYER = re.compile(r"\.\d+\.")  # in the name of a weight that belongs to a numbered layer


def load_whole(loader: Any, source: str, new_head: bool = False, headless: bool = False, **keywords: Any) -> Any:
    """`loader.from_pretrained(source, …)`; the file must contain every weight of the model and no other.

    new_head: weights outside the trunk's layers may be missing, since they will be trained; headless: only the trunk
    is loaded, and a head in the file is ignored. No code of the folder is run.

    Raises: UserError if weights are missing, left over, of another shape, or not finite.
    """
    model, info = loader.from_pretrained(source, output_loading_info=True, trust_remote_code=False, **keywords)
    missing, left = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if new_head:
        missing = [name for name in missing if LAYER.search(name) and name.startswith(model.base_model_prefix)]
    if headless or new_head:
        left = [name for name in left if LAYER.search(name)]
    for names, what in ((missing, "missing from the file"), (left, "not in the model of config.json")):
        if names:
            raise UserError(
                f"{source}: {len(names)} weights are {what} ({', '.join(names[:2])}): the weights do not fit "
                "config.json: restore both"
            )
    check_finite(model, source)
    return model


def check_finite(model: Any, source: str) -> None:
    """Raises: UserError for weights that are not finite, since answers and scores would not be finite either."""
    for name, weight in model.named_parameters():
        if weight.numel() and not all(map(torch.isfinite, torch.aminmax(weight.detach()))):
            raise UserError(f"{source}: {name} has values that are not finite: use an earlier or another model")


def check_sizes(config: Any, source: str, *more: str) -> None:
    """Raises: UserError for sizes that no model has and whose construction would take all time and memory.

    more: further settings of transformers' configuration that are at least 1.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise UserError(f"{source}: config.json says {layers:,} layers, want at most {MOST_LAYERS:,}: restore it")
    for name in (*SIZES, *more):
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise UserError(f"{source}: config.json says {name}={size}, want 1 or more: restore it")

"""Frozen models under autocast: the weights of linear layers are cast once instead of at every call."""

import torch
from torch import nn

from rlhf.model.heads import ScalarHead


def cast_frozen_products(model: nn.Module, kind: torch.dtype = torch.bfloat16) -> nn.Module:
    """Cast the weights of linear layers to `kind`, in place, and freeze the model; everything else stays as it is.

    Under autocast to `kind` no result changes: embeddings, norms and scalar heads keep their precision, and so does an
    unembedding that is tied to an embedding.
    """
    model.requires_grad_(False)
    products = [module for module in model.modules() if is_product(module)]
    elsewhere = {id(p) for m in model.modules() if not is_product(m) for p in m.parameters(recurse=False)}
    for module in products:
        for p in module.parameters(recurse=False):
            if id(p) not in elsewhere:
                p.data = p.data.to(kind)
    return model


def is_product(module: nn.Module) -> bool:
    """Whether the module is a linear layer that autocast runs in half precision."""
    return (isinstance(module, nn.Linear) and not isinstance(module, ScalarHead)) or type(module).__name__ == "Conv1D"

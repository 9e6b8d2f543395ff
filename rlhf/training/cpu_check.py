"""Whether a device computes the gradients that the CPU computes."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rlhf.errors import UserError

MOST_GAP = 1e-2  # of a gradient from the CPU's, as a share of its norm


def check_gradients(module: nn.Module, arguments: Any, keywords: Any) -> None:
    """Compare the gradients of a forward's summed outputs with those of the same module on the CPU, without dropout.

    MPS gave wrong gradients without an error (pytorch#177116, pytorch#153957). Raises: UserError if any differs by more than MOST_GAP.
    """
    training = module.training
    twin = copy.deepcopy(module.eval()).cpu()
    given = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, (arguments, keywords))
    found = []
    for one, (args, kwargs) in ((module, (arguments, keywords)), (twin, given)):
        outputs = [x for x in tree_leaves(one(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        trained = {name: p for name, p in one.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad([x.sum() for x in outputs], [*trained.values()], allow_unused=True)
        found.append({n: g.float().cpu() for n, g in zip(trained, gradients, strict=True) if g is not None})
    module.train(training)
    here, wanted = found
    least = 1e-5 * nn.utils.get_total_norm(wanted.values())  # of gradients that are 0 but for rounding
    bad = [
        n for n in wanted if n not in here or not (here[n] - wanted[n]).norm() <= MOST_GAP * wanted[n].norm() + least
    ]
    if bad:
        raise UserError(
            f"device=mps: the gradient of {bad[0]} and of {len(bad) - 1} other weights is not the CPU's: torch computes it wrongly "
            "here: use device=cpu, or another version of torch"
        )

"""What every training loop shares: when to save and stop, the gradient's norm, and the refusal of what is not finite."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf.errors import UserError
from rlhf.interrupts import stop_requested
from rlhf.processes import Ranks, rank


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The joint 2-norm of all gradients, on their device; 0 where there are none."""
    given = list(parameters)
    norms = [p.grad.norm() for p in given if p.grad is not None]
    return torch.stack(norms).norm() if norms else torch.zeros((), device=given[0].device if given else None)


def refuse_nonfinite(stage: Any, values: Mapping[str, Tensor | float], batch: Mapping[str, Tensor]) -> None:
    """Invariant 8: stop before the optimizer step when something is not finite, and save the batch that did it.

    Raises: UserError.
    """
    bad = [name for name, value in values.items() if not torch.isfinite(torch.as_tensor(value)).all()]
    if not bad:
        return
    kept = ""
    if batch:
        path = stage.folder / f"offending_batch{f'-{rank()}' if rank() else ''}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in batch.items()}, str(path))
        kept = f", the batch is in {path}: look at it"
    raise UserError(
        f"{stage.name}: {', '.join(bad)} not finite: stopped before the step, the last checkpoint is kept{kept}, or lower the "
        "learning rate and run again"
    )


def due_and_stop(ranks: Ranks, due: bool) -> tuple[bool, bool]:
    """(write a checkpoint, stop), the same on every rank: due by rank 0's clock, stop if a signal reached any rank.

    A loop that stops writes a checkpoint first.
    """
    wish = ranks.max(2 if stop_requested() else 1 if due and ranks.rank == 0 else 0)
    return wish >= 1, wish == 2

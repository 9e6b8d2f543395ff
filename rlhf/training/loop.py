"""What our own training loops (reward model, PPO) share: sums over processes, and the refusal of what is not finite."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf.errors import UserError
from rlhf.interrupts import stop_requested
from rlhf.tracking.metrics import Sums


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
        rank = os.environ.get("RANK", "0")
        path = stage.folder / f"offending_batch{'' if rank == '0' else f'-{rank}'}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in batch.items()}, str(path))
        kept = f", the batch is in {path}: look at it"
    raise UserError(
        f"{stage.name}: {', '.join(bad)} not finite: stopped before the step, the last checkpoint is kept{kept}, or lower the "
        "learning rate and run again"
    )


class Ranks:
    """The processes of a run: sums and maxima over all of them. Alone, each is what it is given."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.rank, self.count = accelerator.process_index, accelerator.num_processes

    def sum_tensor(self, x: Tensor) -> Tensor:
        """The sum of a tensor over ranks, on every rank."""
        return x if self.count == 1 else self.accelerator.reduce(x, reduction="sum")

    def sum(self, x: Tensor | float) -> float:
        if self.count == 1:
            return float(x)
        return float(self.sum_tensor(torch.as_tensor(x, dtype=torch.float64, device=self.accelerator.device)))

    def max(self, x: float) -> float:
        if self.count == 1:
            return float(x)
        mine = torch.tensor([float(x)], dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.gather(mine).max())

    def gather(self, value: Any) -> list[Any]:
        """A picklable value of every rank, in order of rank, on every rank."""
        from accelerate.utils import gather_object

        return [value] if self.count == 1 else gather_object([value])

    def due(self, checkpoint: bool) -> tuple[bool, bool]:
        """Whether a checkpoint is due, by the first rank, and whether a signal asked any rank to stop."""
        flags = self.gather((checkpoint, stop_requested()))
        return flags[0][0], any(stop for _, stop in flags)


def merged(ranks: Ranks, sums: Sums) -> Sums:
    """The sums of all ranks."""
    total = Sums()
    for state in ranks.gather(sums.state()):
        total.merge(state)
    return total

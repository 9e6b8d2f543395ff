"""An optimizer that takes no step, for tests of gradients; and one step of a stage's objective."""

from typing import Any

from rlhf.runs.metric_table import Sums
from rlhf.training.batches import train_step


class Recorder:
    """In the optimizer's place: keeps the gradients instead of stepping."""

    param_groups: list = [{}]  # noqa: RUF012

    def __init__(self, model):
        self.model = model

    def step(self):
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def zero_grad(self):
        self.model.zero_grad()


def one_step(engine: Any, batch: list[Any], objective: Any, factor: float = 1.0) -> Sums:
    sums = Sums()
    train_step(engine, batch, objective, sums, factor)
    return sums

"""device=mps: the first gradients are compared with the CPU's. No Apple GPU was at hand: the module that differs is planted."""

import pytest
import torch
from torch import Tensor, nn

from rlhf.config.compose import compose_config
from rlhf.errors import UserError
from rlhf.training.engine import Engine, make_engine
from rlhf.training.setup import choose_device


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Faulty(nn.Linear):
    """A layer whose gradients are twice too large, unlike its copy's."""

    def __init__(self, width: int, faulty: bool):
        super().__init__(width, width)
        self.faulty = id(self) if faulty else 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return Doubled.apply(y) if self.faulty == id(self) else y


def engine_of(faulty: bool) -> Engine:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), Faulty(4, faulty))
    config = compose_config(["device=cpu"])
    engine = make_engine(config, module, [{"params": list(module.parameters()), "lr": 0.1}], torch.device("cpu"))
    engine.unchecked = True
    return engine


def test_gradients_that_are_the_cpus_are_accepted_and_left_alone():
    engine = engine_of(faulty=False)
    engine(torch.randn(3, 4))
    assert not engine.unchecked and engine.module.training
    assert all(p.grad is None for p in engine.module.parameters())


def test_a_wrong_gradient_ends_the_stage_before_the_first_step():
    with pytest.raises(
        UserError, match=r"device=mps: the gradient of 0.weight and of 3 other weights is not the CPU's"
    ):
        engine_of(faulty=True)(torch.randn(3, 4))


def test_a_machine_without_one_is_told():
    with pytest.raises(UserError, match="torch sees no Apple GPU here"):
        choose_device(compose_config(["device=mps"]))

"""Linear layers that use the faster of torch's matrix libraries, and linear layers that stay in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf.ops.fast import product
from rlhf.ops.masked import upcast


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


class ResidualLinear(Linear):
    """A projection that writes to the residual stream; its initialisation is scaled down by depth."""


class Float32Linear(nn.Linear):
    """A small product in float32, whatever the precision of the rest: near 10, bfloat16 has steps of 1/16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(upcast(x), upcast(self.weight), None if self.bias is None else upcast(self.bias))

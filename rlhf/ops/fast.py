"""What `rlhf/cpu` computes faster on a CPU. No other module imports that folder; without it torch does all of this."""

from contextlib import nullcontext
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor

try:
    from rlhf.cpu.kernels import attend, can_attend, can_invert, invert
    from rlhf.cpu.machine import adapting_threads, keep_freed_memory, return_freed_memory
    from rlhf.cpu.products import by_torch_alone, outer, packed_weights, plain_product, product
except ImportError:

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def plain_product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    def outer(a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
        if total is None:
            return a.t() @ b
        return total.addmm_(a.t(), b) if total.dtype == a.dtype else total.add_(a.t() @ b)

    can_attend = can_invert = keep_freed_memory = return_freed_memory = cast(Any, lambda *_: False)
    attend = invert = cast(Any, None)
    packed_weights = cast(Any, lambda weights, rows: nullcontext(0))
    by_torch_alone = cast(Any, nullcontext)
    adapting_threads = cast(Any, lambda threads, device, processes: None)

__all__ = [
    "adapting_threads", "attend", "by_torch_alone", "can_attend", "can_invert", "invert", "keep_freed_memory", "outer", "packed_weights",
    "plain_product", "product", "return_freed_memory",
]  # fmt: skip

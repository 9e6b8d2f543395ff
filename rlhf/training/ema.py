"""An exponential moving average of a model's weights (Ouyang et al. 2022, appendix C.4: decay 0.992)."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf.training.optim import shape_of
from rlhf.training.state import as_cpu_float32, gathered, is_partitioned, slice_of_rank


class Ema:
    """average := average + share * (weights - average), at each optimizer step of the policy, in float32.

    share = (1 - decay) / (1 - decay^n) at the n-th step, so the weights of k steps ago count in proportion to
    decay^k and the initial weights do not count. Only trained weights are averaged. In bfloat16 too the optimizer's float32
    weights are averaged, because an average of rounded weights would not move by less than the rounding.

    rank, ranks: under ZeRO each rank averages its slice of every weight; by default all of it.
    Differs: the paper does not say what its average starts from. The correction of Kingma & Ba 2015, section 3, matters
    only in runs shorter than about 1 / (1 - decay) steps, whose average would otherwise be mostly the SFT model.
    """

    def __init__(self, model: nn.Module, decay: float, rank: int = 0, ranks: int = 1):
        self.model, self.decay, self.rank, self.ranks = model, decay, rank, ranks
        self.steps = 0
        self.trained: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: self._float32(p).clone() for name, p in self.trained.items()}

    def _slice(self, p: Any) -> Tensor:
        """This rank's slice of a parameter, flat."""
        return p.ds_tensor.detach() if is_partitioned(p) else slice_of_rank(p.detach(), self.rank, self.ranks)

    def _float32(self, p: Any) -> Tensor:
        """This rank's slice of the optimizer's float32 weights of a parameter. Every rank has to call it."""
        if p.dtype == torch.float32 and not is_partitioned(p):
            return self._slice(p)
        from deepspeed import utils

        if is_partitioned(p):
            return utils.safe_get_local_fp32_param(p).detach()
        return slice_of_rank(utils.safe_get_full_fp32_param(p).detach(), self.rank, self.ranks)

    def _whole(self, p: Any, part: Tensor) -> Tensor:
        """The whole tensor from each rank's slice."""
        part, shape = part.to(p.device), shape_of(p)
        if self.ranks > 1:
            parts = [torch.empty_like(part) for _ in range(self.ranks)]
            dist.all_gather(parts, part.contiguous())
            part = torch.cat(parts)
        return part[: shape.numel()].view(shape)

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        share = (1.0 - self.decay) / (1.0 - self.decay**self.steps)
        for name, average in self.average.items():
            average.lerp_(self._float32(self.trained[name]).to(average), share)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model with the average as its weights, in their dtype; its own weights are restored afterwards."""
        before = {name: self._slice(p).clone() for name, p in self.trained.items()}
        self._write(self.average)
        try:
            yield self.model
        finally:
            self._write(before)

    @torch.no_grad()
    def _write(self, slices: Mapping[str, Tensor]) -> None:
        for name, p in self.trained.items():
            value = self._whole(p, slices[name])
            with gathered([p], write=True):  # also updates the tensors that ZeRO-3 keeps whole beside its slices
                p.data.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """The average as whole tensors on the CPU. Every rank has to call it."""
        return {name: as_cpu_float32(self._whole(p, self.average[name])).clone() for name, p in self.trained.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Set the average, given as whole tensors, and the number of its steps."""
        self.steps = steps
        for name, average in self.average.items():
            average.copy_(slice_of_rank(state[name], self.rank, self.ranks).to(average))

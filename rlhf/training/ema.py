"""An exponential moving average of a model's weights (Ouyang et al. 2022, appendix C.4: decay 0.992)."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf.training.state import gathered, is_partitioned, on_cpu, slice_of_rank


class Ema:
    """average := average + share * (weights - average), at each optimizer step of the policy, in float32.

    share = (1 - decay) / (1 - decay^n) at the n-th step, so the weights of k steps ago count in proportion to
    decay^k and the initial weights do not count. Only trained weights are averaged; under ZeRO-3 each rank averages its
    slices. In bfloat16 too the optimizer's float32 weights are averaged, because an average of rounded weights would not
    move by less than the rounding.

    Differs: the paper does not say what its average starts from. The correction of Kingma & Ba 2015, section 3, matters
    only in runs shorter than about 1 / (1 - decay) steps, whose average would otherwise be mostly the SFT model.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.steps = 0
        self.average = {name: master_part(p).float().clone() for name, p in self._trained().items()}

    def _trained(self) -> dict[str, Any]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        share = (1.0 - self.decay) / (1.0 - self.decay**self.steps)
        trained = self._trained()
        for name, average in self.average.items():
            average.lerp_(master_part(trained[name]).to(average), share)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model with the average as its weights, in their dtype; its own weights are restored afterwards."""
        before = {name: part_of(p).clone() for name, p in self._trained().items()}
        self._write(lambda name, p: gather_master(p, self.average[name]))
        try:
            yield self.model
        finally:
            self._write(lambda name, p: gather_parts(p, before[name]))

    @torch.no_grad()
    def _write(self, value_of: Callable[[str, Any], Tensor]) -> None:
        for name, p in self._trained().items():
            value = value_of(name, p)
            with gathered([p], write=True):  # also updates the tensors that ZeRO-3 keeps whole beside its slices
                p.data.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """The average as whole tensors on the CPU. Every rank has to call it."""
        return {name: on_cpu(gather_master(p, self.average[name])) for name, p in self._trained().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Set the average, given as whole tensors, and the number of its steps."""
        self.steps = steps
        for name, p in self._trained().items():
            self.average[name].copy_(cut_master(p, state[name]).to(self.average[name]))


def part_of(p: Any) -> Tensor:
    """This rank's part of a parameter: all of it, or its slice under ZeRO-3."""
    return p.ds_tensor.detach() if is_partitioned(p) else p.detach()


def master_part(p: Any) -> Tensor:
    """This rank's part of the optimizer's float32 weights of a parameter, flat under ZeRO; it can be empty."""
    if hasattr(p, "_z3_optimizer"):
        from deepspeed.utils import safe_get_local_fp32_param

        return safe_get_local_fp32_param(p).detach()
    if hasattr(p, "_hp_mapping"):  # ZeRO-1 and 2: the ranks' slices are cut from all parameters in a row
        if p._hp_mapping is None:
            return p.new_empty(0, dtype=torch.float32)
        return p._hp_mapping.get_hp_fragment().detach()
    return p.detach()


def gather_master(p: Any, part: Tensor) -> Tensor:
    """The whole tensor from each rank's `master_part`."""
    if not hasattr(p, "_hp_mapping"):
        return gather_parts(p, part)
    value = torch.zeros(p.numel(), dtype=part.dtype, device=p.device)
    value[master_slice(p)] = part.to(p.device)
    dist.all_reduce(value)
    return value.view(p.shape)


def gather_parts(p: Any, part: Tensor) -> Tensor:
    """The whole tensor from each rank's `part_of`."""
    if not is_partitioned(p):
        return part
    part = part.to(p.device)
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)[: p.ds_numel].view(p.ds_shape)


def cut_master(p: Any, value: Tensor) -> Tensor:
    """This rank's `master_part` of a whole tensor."""
    if hasattr(p, "_hp_mapping"):
        return value.flatten()[master_slice(p)]
    return slice_of_rank(value, dist.get_rank(), dist.get_world_size()) if is_partitioned(p) else value


def master_slice(p: Any) -> slice:
    """The position of this rank's `master_part` in a flattened parameter under ZeRO-1 and 2."""
    if p._hp_mapping is None:
        return slice(0, 0)
    address = p._hp_mapping.lp_fragment_address
    return slice(address.start, address.start + address.numel)

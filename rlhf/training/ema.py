"""An exponential moving average of a model's weights (Ouyang et al. 2022, appendix C.4: decay 0.992)."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf.training.gather import gathered, is_partitioned


class Ema:
    """average := average + share * (weights - average), once an optimizer step of the policy, in float32.

    share = (1 - decay) / (1 - decay^n) at the n-th step, so that the weights of k steps ago count in proportion to
    decay^k and those before the first step nothing. Only weights that train are averaged; under ZeRO-3 each rank
    averages its slices, of the optimizer's float32 weights.

    Differs: the paper does not say what its average starts from. The correction of Kingma & Ba 2015, section 3, matters
    only to runs that are short beside 1 / (1 - decay) steps: theirs would still be mostly the SFT model.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.steps = 0
        self.average = {name: held(p).float().clone() for name, p in self._trained().items()}

    def _trained(self) -> dict[str, Any]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        share = (1.0 - self.decay) / (1.0 - self.decay**self.steps)
        trained = self._trained()
        for name, average in self.average.items():
            average.lerp_(held(trained[name]).to(average), share)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model with the average as its weights, in their dtype; afterwards its own are back."""
        own = {name: slice_of(p).clone() for name, p in self._trained().items()}
        self._write(self.average)
        try:
            yield self.model
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self._trained().items():
            value = whole(p, values[name])
            with gathered([p], write=True):  # which also reaches what ZeRO-3 keeps whole beside its slices
                p.data.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """The average as whole tensors. Every rank has to call it."""
        return {name: whole(p, self.average[name]) for name, p in self._trained().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Take whole tensors for the average after so many steps."""
        self.steps = steps
        for name, p in self._trained().items():
            self.average[name].copy_(own_slice(p, state[name]).to(self.average[name]))


def slice_of(p: Any) -> Tensor:
    """What this rank holds of a parameter: all of it, or its slice under ZeRO-3."""
    return p.ds_tensor.detach() if is_partitioned(p) else p.detach()


def held(p: Any) -> Tensor:
    """The same of the optimizer's float32 weights, where a rank's slice of them is a slice of the parameter."""
    if not hasattr(p, "_z3_optimizer"):
        return slice_of(p)
    from deepspeed.utils import safe_get_local_fp32_param

    return safe_get_local_fp32_param(p).detach()


def whole(p: Any, held: Tensor) -> Tensor:
    """A whole tensor of what the ranks hold of it."""
    if not is_partitioned(p):
        return held
    parts = [torch.empty_like(held) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, held.contiguous())
    return torch.cat(parts)[: p.ds_numel].view(p.ds_shape)


def own_slice(p: Any, value: Tensor) -> Tensor:
    """What this rank holds of a whole tensor."""
    if not is_partitioned(p):
        return value
    size, rank = p.ds_tensor.numel(), dist.get_rank()
    flat = nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return flat[size * rank : size * (rank + 1)]

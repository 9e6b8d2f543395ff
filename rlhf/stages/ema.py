"""An exponential moving average of a model's weights (Ouyang et al. 2022, appendix C.4: decay 0.992)."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Ema:
    """average := decay * average + (1 - decay) * weights, once an optimizer step, in float32.

    Starts at the weights as they are. Only weights that train are averaged; under ZeRO-3 each rank averages its slices.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.average: dict[str, Tensor] = {}
        self.restart()

    def weights(self) -> dict[str, Tensor]:
        """What this rank holds of each weight that trains."""
        return {n: getattr(p, "ds_tensor", p) for n, p in self.model.named_parameters() if p.requires_grad}

    def restart(self) -> None:
        """Begin anew at the weights as they are."""
        self.average = {n: p.detach().float().clone() for n, p in self.weights().items()}

    @torch.no_grad()
    def update(self) -> None:
        weights = self.weights()
        for name, average in self.average.items():
            average.lerp_(weights[name].to(average), 1.0 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model with the average as its weights; afterwards its own are back."""
        own = {name: weight.detach().clone() for name, weight in self.weights().items()}
        self._write(self.average)
        try:
            yield self.model
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, weight in self.weights().items():
            weight.data.copy_(values[name])

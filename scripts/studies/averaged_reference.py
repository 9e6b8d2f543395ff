"""`rlhf ppo` with a KL penalty towards an average of its policies in place of the SFT model (Xu et al. 2024, arXiv 2404.10719).

    python scripts/studies/averaged_reference.py ppo experiment=gold …

An arm of steadier.py. After each update: reference <- DECAY * reference + (1 - DECAY) * policy. The held-out KL is to SFT, as in every
other arm. A run that was interrupted cannot resume: delete its folder.
"""

import copy
import sys
from typing import Any

import torch

from rlhf.cli import main
from rlhf.ppo.models import Reference
from rlhf.stages import ppo

DECAY = 0.9  # an average over about 10 of the 16 updates


class Averaged:
    """Stands for `one_update`."""

    def __init__(self) -> None:
        self.one_update, self.average = ppo.one_update, None

    def __call__(self, *, update: int, state: Any, reference: Any, **parts: Any) -> dict[str, float]:
        policy = state.engine.module.policy
        if self.average is None:
            if update > 1:
                sys.exit("the average of the references is not in the checkpoint: delete the run's folder")
            self.average = Reference(copy.deepcopy(policy)).requires_grad_(False)
        metrics = self.one_update(update=update, state=state, reference=self.average, **parts)
        with torch.no_grad():
            for kept, new in zip(self.average.model.parameters(), policy.parameters(), strict=True):
                kept.lerp_(new, 1 - DECAY)
        return metrics


if __name__ == "__main__":
    ppo.one_update = Averaged()
    sys.exit(main(sys.argv[1:]))

"""What one rank of a launch does in test_ppo_ranks.py: gradients of recorded rollouts, and the first live ones.

Run as `ppo_ranks.py <recorded.safetensors> <out folder> <overrides …>`.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlhf.config.compose import compose_config
from rlhf.ppo import update as ppo_update
from rlhf.ppo.rollout import Experience, Rollout
from rlhf.runs.metrics import Sums
from rlhf.runs.stage import open_stage
from rlhf.runs.trackers import make_tracker
from rlhf.stages import ppo
from rlhf.system.interrupts import leave
from rlhf.system.processes import disconnect, gather
from rlhf.training.setup import set_up
from tests.stages.conftest import collect


def main(arguments: list[str]) -> None:
    recorded, out, *overrides = arguments
    config = compose_config(overrides)
    with open_stage(config, "ppo") as stage:
        trainer = ppo.make_ppo_run(config, stage, set_up(config))
        places = ppo.episodes_of_rank(trainer)
        tensors = load_file(recorded)
        advantages, returns = (tensors.pop(name)[places] for name in ("advantages", "returns"))
        rollout = Rollout(**{name: value[places] for name, value in tensors.items()})
        chosen = [i for i, place in enumerate(places) if place < config.ppo.episodes_per_update // 2]
        sums = Sums()
        trainer.config.ppo.max_grad_norm = 1e9
        ppo_update.train_minibatch(trainer, Experience(rollout, advantages, returns), chosen, sums)
        gradients = {n: p.grad.clone() for n, p in trainer.engine.module.named_parameters()}
        metrics = trainer.ranks.merge(sums).reduce()
        trainer.engine.optimizer.zero_grad()
        trainer.config.ppo.max_grad_norm = 1.0
        index = ppo.choose_prompts(trainer, 1)
        live = collect(
            trainer, [trainer.prompts[index[place]] for place in places], [("ppo", 1, place) for place in places]
        )
        everything = gather(dict(zip(places, live.tokens.tolist(), strict=True)))
        tracker = make_tracker("off", folder=stage.folder, run="", stage="", config={})
        whole = [ppo.one_update(trainer, update, tracker) for update in (1, 2, 3)]
        if stage.writes:
            rows = {place: row for part in everything for place, row in part.items()}
            width = max(map(len, rows.values()))
            tokens = [rows[place] + [0] * (width - len(rows[place])) for place in sorted(rows)]
            out = Path(out)
            save_file({n: g.contiguous() for n, g in gradients.items()}, out / "gradients.safetensors")
            save_file({"tokens": torch.tensor(tokens)}, out / "live.safetensors")
            torch.save({"metrics": metrics, "updates": whole}, out / "metrics.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
    if disconnect():
        leave(0)

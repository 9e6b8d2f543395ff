"""What one rank of a launch does in test_ppo_ranks.py: gradients of recorded rollouts, and the first live ones.

Run as `ppo_ranks.py <recorded.safetensors> <out folder> <overrides …>`.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlhf.config.compose import compose_config
from rlhf.ppo.experience import Rollout
from rlhf.runs.stage import open_stage
from rlhf.stages import ppo
from rlhf.system.exits import leave
from rlhf.system.processes import disconnect, gather
from tests.stages.ppo_trainer import make_trainer


def main(arguments: list[str]) -> None:
    recorded, out, *overrides = arguments
    config = compose_config(overrides)
    with open_stage(config, "ppo") as stage:
        trainer = make_trainer(config, stage)
        places = ppo.episodes_of_rank(config, trainer.engine.ranks)
        tensors = load_file(recorded)
        advantages, returns = (tensors.pop(name)[places] for name in ("advantages", "returns"))
        rollout = Rollout(**{name: value[places] for name, value in tensors.items()})
        chosen = [i for i, place in enumerate(places) if place < config.ppo.episodes_per_update // 2]
        sums = trainer.train(rollout, advantages, returns, chosen)
        gradients = {n: trainer.engine.ranks.sum_tensor(p.grad) for n, p in trainer.engine.module.named_parameters()}
        metrics = trainer.engine.ranks.merge(sums).reduce()
        trainer.engine.optimizer.zero_grad()
        index = ppo.choose_prompts(config, len(trainer.prompts.train), 1)
        asked = [trainer.prompts.train[index[place]] for place in places]
        live = trainer.collect(asked, [("ppo", 1, place) for place in places])
        everything = gather(dict(zip(places, live.tokens.tolist(), strict=True)))
        whole = [trainer.update(number) for number in (1, 2, 3)]
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

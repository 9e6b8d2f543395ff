"""PPO with two processes computes what one computes: gradients of recorded rollouts, metrics, and live rollouts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.ops.masked import whiten
from rlhf.runs.stage import open_stage
from tests.stages import ppo_ranks
from tests.stages.conftest import run_ranks
from tests.stages.ppo_trainer import make_trainer

# Updates that begin with the same policy but for rounding draw the same responses, unless a random number falls between
# the two roundings of a token's bound: with seed 0 one of 26 responses does so in the third update.
SETTINGS = [
    "seed=11",
    "ppo.critic_warmup_updates=1",
    "ppo.warmup_updates=1",
    "ppo.episodes_per_update=26",
    "ppo.episodes=78",
    "ppo.minibatches=2",
    "ppo.epochs=1",
    "ppo.micro_batch_episodes=4",
]


@pytest.fixture(scope="module")
def recorded(gold_run, tmp_path_factory) -> tuple[Path, Path]:
    """A run that lacks PPO, and rollouts of unequal lengths with ratios that are not 1."""
    folder = tmp_path_factory.mktemp("ranks")
    run = gold_run.copy(folder, "ppo", "one")
    config = run.config(*SETTINGS)
    with open_stage(config, "ppo") as stage:
        trainer = make_trainer(config, stage)
        rollout = trainer.collect(trainer.prompts.train[:26], [("recorded", i) for i in range(26)])
    answers = torch.minimum(rollout.lengths - rollout.prompt_lengths, torch.arange(2, 28))
    mask = torch.arange(rollout.response_mask.shape[1]) < answers[:, None]
    generator = torch.Generator().manual_seed(1)

    def noise(scale: float) -> torch.Tensor:
        return torch.where(mask, torch.randn(mask.shape, generator=generator) * scale, 0.0)

    rollout = rollout._replace(
        lengths=rollout.prompt_lengths + answers,
        response_mask=mask,
        logp_old=torch.where(mask, rollout.logp_old, 0.0) + noise(0.2),
        values=torch.where(mask, rollout.values, 0.0) + noise(0.2),
    )
    tensors = rollout._asdict() | {"advantages": whiten(noise(1.0), mask), "returns": noise(1.0)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "recorded.safetensors")
    return folder, folder / "recorded.safetensors"


def launch(gold_run, folder: Path, recorded: Path, processes: int, *settings: str) -> tuple[dict, dict, torch.Tensor]:
    """Gradients, metrics and live rollouts of a launch."""
    name = f"out-{processes}-{len(settings)}"
    run = gold_run.copy(folder, "ppo", name)
    (folder / name / "result").mkdir()
    overrides = [*run.overrides, *SETTINGS, *settings, f"runs_dir={folder}", f"run={name}"]
    arguments = [str(recorded), str(folder / name / "result"), *overrides]
    ppo_ranks.main(arguments) if processes == 1 else run_ranks("ppo_ranks", processes, *arguments)
    out = folder / name / "result"
    metrics = torch.load(out / "metrics.pt", weights_only=True)
    return load_file(out / "gradients.safetensors"), metrics, load_file(out / "live.safetensors")["tokens"]


def test_two_processes_compute_what_one_computes(gold_run, recorded):
    folder, file = recorded
    one, found_one, live_one = launch(gold_run, folder, file, 1)
    two, found_two, live_two = launch(gold_run, folder, file, 2)
    assert found_one["metrics"]["policy/clipfrac_avg"] > 0.02 and found_one["metrics"]["loss/value_avg"] > 0
    assert found_two["metrics"] == pytest.approx(found_one["metrics"], abs=1e-5, rel=1e-5)
    for name, gradient in one.items():
        assert torch.allclose(two[name], gradient, atol=1e-5, rtol=1e-5), name
    assert torch.equal(live_one, live_two), "the same first rollouts"
    for update in (
        0,
        1,
        2,
    ):  # the critic alone, then both: whole updates: KL control, whitening and metrics are of all ranks
        timeless = [
            {
                n: v
                for n, v in found["updates"][update].items()
                if not n.startswith(("time/", "memory/")) and "per_s" not in n
            }
            for found in (found_one, found_two)
        ]
        assert timeless[1] == pytest.approx(timeless[0], abs=1e-3 if update else 1e-4, rel=1e-3)


@pytest.mark.long
def test_two_processes_with_groups_keep_a_prompt_on_one_rank(gold_run, recorded):
    folder, file = recorded
    settings = ["ppo.critic_warmup_updates=0", "ppo.advantages=rloo", "ppo.responses_per_prompt=13"]
    _, one, live_one = launch(gold_run, folder, file, 1, *settings)
    _, two, live_two = launch(gold_run, folder, file, 2, *settings)
    assert torch.equal(live_one, live_two)
    assert two["updates"][0]["loss/policy_avg"] == pytest.approx(one["updates"][0]["loss/policy_avg"], abs=1e-5)

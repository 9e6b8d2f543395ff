"""The reward model and PPO by two processes, plainly and under ZeRO-1, 2 and 3: what one process computes, in shares.

One launch does all ways. Not here: pretraining and SFT (test_sharding.py), and offload, whose optimizer is compiled at first use.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.commands.launch import import_once, run_processes
from rlhf.ppo import update as ppo_update
from rlhf.ppo.experience import Rollout
from rlhf.runs.folders import is_complete
from rlhf.runs.metric_table import Sums
from rlhf.training.state import read_state
from tests.stages import zero_ranks
from tests.stages.conftest import ONE_LABELER, PRELOADED, Run, run_ranks
from tests.stages.ppo_trainer import experience, off_policy, open_trainer

# Updates that begin with the same policy but for rounding draw the same responses, unless a random number falls between
# the two roundings of a token's bound: with seed 0 one of 26 responses does so in the third update.
SETTINGS = [
    "seed=11", "ppo.critic_warmup_updates=1", "ppo.warmup_fraction=0.3", "ppo.episodes_per_update=26", "ppo.episodes=78",
    "ppo.minibatches=2", "ppo.epochs=1", "ppo.micro_batch_episodes=3", "reward.micro_batch_responses=12",
    "sharding.bucket_elements=100000", "sharding.persistence_threshold=200",
]  # fmt: skip
ZERO = ("zero1", "zero2", "zero3")
WAYS = ("none", *ZERO)


@pytest.fixture(scope="module")
def recorded(gold_run, tmp_path_factory) -> tuple[Path, Path]:
    """A folder of runs, and a file with rollouts of unequal lengths whose ratios are not 1."""
    folder = tmp_path_factory.mktemp("ranks")
    with open_trainer(gold_run.copy(folder, "ppo", "recorded"), *SETTINGS) as trainer:
        rollout, advantages, returns = off_policy(trainer.respond(26), seed=1, scale=0.2)
    tensors = rollout._asdict() | {"advantages": advantages, "returns": returns}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "recorded.safetensors")
    return folder, folder / "recorded.safetensors"


def launch(gold_run: Run, recorded: tuple[Path, Path], processes: int, ways: tuple[str, ...], *more: str) -> Path:
    """The folder of a launch's results, one file per way."""
    folder, rollouts = recorded
    out = folder / f"zero-{processes}-{len(ways)}"
    out.mkdir()
    for way in ways:
        gold_run.copy(folder, "ppo", f"{out.name}-{way.partition('=')[0]}")
    overrides = [*gold_run.overrides, *SETTINGS, *more]
    arguments = [str(rollouts), str(out), str(folder), out.name, ",".join(ways), *overrides]
    zero_ranks.main(arguments) if processes == 1 else run_ranks("zero_ranks", processes, *arguments)
    return out


def found_by(out: Path, way: str) -> dict[str, Any]:
    return torch.load(out / f"{way}.pt", weights_only=True)


def alike(a: torch.Tensor, b: torch.Tensor, near: float) -> bool:
    """All but one element in a thousand within `near`, and every one within a step of 1e-3.

    AdamW divides by the gradient's own size, so that where it is 0 but for rounding a step's sign is chance.
    """
    gap = (a - b).abs().flatten()
    return bool((gap > near).float().mean() <= 1e-3 and gap.max() <= (1e-3 if near else 0.0))


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    """What all ways measure; a constant added to all scores changes no loss, so that their mean drifts with rounding."""
    kinds = ("loss/", "policy/", "val/", "reward/")
    return {name: value for name, value in metrics.items() if name.startswith(kinds) and name != "reward/mean"}


@pytest.fixture(scope="module")
def single(gold_run, recorded) -> Path:
    return launch(gold_run, recorded, 1, ("updates", "none"))


@pytest.fixture(scope="module")
def double(gold_run, recorded, single) -> Path:
    """ZeRO-1 resumes its own run, ZeRO-2 that of the single process, ZeRO-3 that of ZeRO-1."""
    sources = {"zero2": f"={single}/none-state", "zero3": f"={recorded[0]}/zero-2-6/zero1-state"}
    return launch(gold_run, recorded, 2, ("updates", "average", *(way + sources.get(way, "") for way in WAYS)))


def assert_same_updates(one: dict[str, Any], two: dict[str, Any], count: int) -> None:
    """The same first responses, and metrics of whole updates: KL control, whitening and sums are of all ranks."""
    assert two["tokens"] == one["tokens"]
    for update in range(count):
        named = [n for n in one["updates"][update] if not n.startswith(("time/", "memory/")) and "per_s" not in n]
        found = {n: two["updates"][update][n] for n in named}
        wanted = {n: one["updates"][update][n] for n in named}
        assert found == pytest.approx(wanted, abs=1e-3 if update else 1e-4, rel=1e-3)


def test_whole_updates_of_two_processes_are_those_of_one(single, double):
    """The critic alone, then both."""
    assert_same_updates(found_by(single, "updates"), found_by(double, "updates"), 3)


@pytest.mark.long
def test_two_processes_with_groups_keep_a_prompt_on_one_rank(gold_run, recorded):
    settings = ["ppo.critic_warmup_updates=0", "ppo.advantages=rloo", "ppo.responses_per_prompt=13"]
    one, two = (found_by(launch(gold_run, recorded, n, ("updates",), *settings), "updates") for n in (1, 2))
    assert two["tokens"] == one["tokens"]
    assert two["updates"][0]["loss/policy_avg"] == pytest.approx(one["updates"][0]["loss/policy_avg"], abs=1e-5)


def assert_same_as_one_process(alone: Path, out: Path, way: str) -> None:
    wanted, found = found_by(alone, "none"), found_by(out, way)
    assert wanted["ppo"][0]["policy/clipfrac_avg"] > 0.02 and wanted["ppo"][0]["loss/value_avg"] > 0
    for stage in ("reward", "ppo"):
        assert len(wanted[stage]) == 5 and timeless(wanted[stage][0]) != timeless(wanted[stage][4])
        for step in range(5):
            near = 1e-4 if step else 1e-5
            assert timeless(found[stage][step]) == pytest.approx(timeless(wanted[stage][step]), abs=near, rel=near)
    for name in ("ppo", "reward"):
        ours, theirs = load_file(alone / f"none-{name}.safetensors"), load_file(out / f"{way}-{name}.safetensors")
        assert ours.keys() == theirs.keys()
        for tensor in ours.keys() - {"head.bias"}:  # of the reward model: its gradient is 0 but for rounding
            if tensor.startswith("gradient/"):
                assert torch.allclose(theirs[tensor], ours[tensor], atol=1e-5, rtol=1e-5), tensor
            elif name == "reward" or tensor.startswith("ppo/"):
                assert alike(theirs[tensor], ours[tensor], 1e-4), tensor
    assert found["greedy"] == wanted["greedy"], "the same tokens under greedy decoding"
    assert found["live"] == pytest.approx(wanted["live"], abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_five_steps_compute_what_one_process_computes(single, double, way):
    assert_same_as_one_process(single, double, way)


@pytest.mark.long  # DeepSpeed compiles its AdamW for the host's memory at first use
def test_offload_computes_what_one_process_computes(gold_run, recorded, single):
    ways = ("zero2_offload", "zero3_offload")
    out = launch(gold_run, recorded, 2, ways)
    for way in ways:
        assert_same_as_one_process(single, out, way)
        assert_resumed(out, way, lambda a, b: torch.allclose(a, b, atol=1e-6, rtol=0.0))


@pytest.mark.parametrize("way", ZERO)
def test_the_state_really_is_sharded(double, way):
    found = found_by(double, way)
    for stage in ("reward", "ppo"):
        shares = found[f"{stage}_shares"]
        # slices are padded to whole numbers of elements per rank
        assert shares["moments"] == pytest.approx(0.5, abs=0.02)
        assert shares["weights"] == pytest.approx(0.5 if way == "zero3" else 1.0, abs=0.02)


def assert_resumed(out: Path, way: str, same: Any) -> None:
    found = load_file(out / f"{way}-ppo.safetensors")
    names = [name.removeprefix("ppo/") for name in found if name.startswith("ppo/")]
    assert names and [name for name in names if not same(found[f"resumed/{name}"], found[f"ppo/{name}"])] == []


@pytest.mark.parametrize(("way", "near"), [("none", 0.0), ("zero1", 0.0), ("zero2", 2e-5), ("zero3", 2e-5)])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(double, way, near):
    """Bitwise from a checkpoint of its own; from another ZeRO stage's or another number of ranks' but for rounding."""
    assert_resumed(double, way, lambda a, b: alike(a, b, near))


@pytest.mark.parametrize("way", WAYS)
def test_the_average_of_slices_is_the_average(single, double, way):
    """While it answers, also in what ZeRO-3 keeps whole beside its slices; and the weights are back afterwards."""
    ours, theirs = load_file(single / "none-ppo.safetensors"), load_file(double / f"{way}-ppo.safetensors")
    names = [name for name in ours if name.startswith(("ema/", "applied/", "after/"))]
    assert len(names) > 30
    for name in names:
        assert alike(theirs[name], ours[name], 2e-5), name
    some = next(name.removeprefix("ema/") for name in names if name.startswith("ema/") and "qkv" in name)
    assert torch.equal(theirs[f"ema/{some}"], theirs[f"applied/{some}"])
    assert not torch.allclose(theirs[f"ema/{some}"], theirs[f"after/{some}"], atol=1e-4)


def test_one_process_needs_no_launcher(gold_run, tmp_path):
    run = gold_run.copy(tmp_path, "reward", "alone")
    words = run.words("deepspeed=zero2", "reward.audit=0", *ONE_LABELER)
    import_once(PRELOADED)
    assert run_processes(["reward", "--shared-settings", *words], threads=1) == 0
    assert is_complete(run.folder / "reward")


def test_one_process_goes_on_where_two_under_zero3_stopped(gold_run, recorded, double):
    folder, rollouts = recorded
    tensors = load_file(rollouts)
    advantages, returns = tensors.pop("advantages"), tensors.pop("returns")
    settings = ["ppo.critic_warmup_updates=0", "ppo.ema_decay=0.9", "ppo.lr=1e-3", "ppo.critic_lr=1e-3"]
    with open_trainer(gold_run.copy(folder, "ppo", "alone"), *SETTINGS, *settings, "ppo.max_grad_norm=1e9") as trainer:
        trainer.engine.restore(read_state(double / "zero3-state")[0])
        for _ in range(2):
            given, chosen = experience(Rollout(**tensors), advantages, returns), list(range(13))
            ppo_update.train_minibatch(trainer.config, given, chosen, trainer.state, Sums())
            trainer.engine.step(zero_ranks.WARM)
    wanted = load_file(double / "zero3-ppo.safetensors")
    for name, parameter in trainer.engine.module.named_parameters():
        assert alike(parameter.detach(), wanted[f"ppo/{name}"], 2e-5), name

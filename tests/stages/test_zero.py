"""The reward model and PPO under ZeRO-1, 2 and 3 with two processes: what one process computes, in shares.

One launch does all three stages. Not here: pretraining and SFT, which transformers' Trainer drives, and offload, whose
optimizer is compiled at first use.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.ppo import update as ppo_update
from rlhf.ppo.experience import Rollout
from rlhf.runs.metric_table import Sums
from rlhf.runs.stage import open_stage
from rlhf.training.state import read_state
from tests.stages import zero_ranks
from tests.stages.conftest import run_ranks
from tests.stages.ppo_trainer import experience, make_trainer
from tests.stages.test_ppo_ranks import SETTINGS, recorded  # noqa: F401 (a fixture)

WAYS = ("zero1", "zero2", "zero3")
SIZES = [
    "ppo.micro_batch_episodes=3",
    "ppo.critic_warmup_updates=0",
    "ppo.ema_decay=0.9",
    "sharding.bucket_elements=100000",
    "sharding.persistence_threshold=200",
    "reward.micro_batch_responses=12",
    "ppo.lr=1e-3",
    "ppo.critic_lr=1e-3",
]


def launch(gold_run, folder: Path, rollouts: Path, processes: int, ways: tuple[str, ...], *more: str) -> Path:
    """A launch's findings, a file a way."""
    out = folder / f"zero-{processes}-{len(ways)}"
    out.mkdir()
    for way in ways:
        gold_run.copy(folder, "ppo", f"{out.name}-{way.partition('=')[0]}")
    arguments = [
        str(rollouts),
        str(out),
        str(folder),
        out.name,
        ",".join(ways),
        *gold_run.overrides,
        *SETTINGS,
        *SIZES,
        *more,
    ]
    zero_ranks.main(arguments) if processes == 1 else run_ranks("zero_ranks", processes, *arguments)
    return out


def alike(a: torch.Tensor, b: torch.Tensor, near: float) -> bool:
    """All but one element in a thousand within `near`, and every one within a step of 1e-3.

    AdamW divides by the gradient's own size, so that where it is 0 but for rounding a step's sign is chance.
    """
    gap = (a - b).abs().flatten()
    return bool((gap > near).float().mean() <= 1e-3 and gap.max() <= (1e-3 if near else 0.0))


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    """What both ways measure; a constant added to all scores changes no loss, so that their mean drifts with rounding."""
    kinds = ("loss/", "policy/", "val/", "reward/")
    return {name: value for name, value in metrics.items() if name.startswith(kinds) and name != "reward/mean"}


@pytest.fixture(scope="module")
def single(gold_run, recorded) -> tuple[Path, dict]:  # noqa: F811
    out = launch(gold_run, recorded[0], recorded[1], 1, ("none",))
    return out, torch.load(out / "none.pt", weights_only=True)


@pytest.fixture(scope="module")
def sharded(gold_run, recorded, single) -> Path:  # noqa: F811
    """ZeRO-1 resumes its own run, ZeRO-2 that of the single process, ZeRO-3 that of ZeRO-1."""
    folder, rollouts = recorded
    sources = {"zero1": "", "zero2": f"={single[0]}/none-state", "zero3": f"={folder}/zero-2-3/zero1-state"}
    return launch(gold_run, folder, rollouts, 2, tuple(way + sources[way] for way in WAYS))


def assert_same_as_one_process(single: tuple[Path, dict], out: Path, way: str) -> None:
    alone, wanted = single
    found = torch.load(out / f"{way}.pt", weights_only=True)
    for stage in ("reward", "ppo"):
        assert len(wanted[stage]) == 5 and timeless(wanted[stage][0]) != timeless(wanted[stage][4])
        for step in range(5):
            assert timeless(found[stage][step]) == pytest.approx(timeless(wanted[stage][step]), abs=1e-4, rel=1e-4)
    for name in ("ppo", "reward"):
        ours, theirs = load_file(alone / f"none-{name}.safetensors"), load_file(out / f"{way}-{name}.safetensors")
        assert ours.keys() == theirs.keys()
        for tensor in ours.keys() - {"head.bias"}:  # of the reward model: its gradient is 0 but for rounding
            assert alike(theirs[tensor], ours[tensor], 1e-4), tensor
    assert found["greedy"] == wanted["greedy"], "the same tokens under greedy decoding"
    assert found["live"] == pytest.approx(wanted["live"], abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_five_steps_compute_what_one_process_computes(single, sharded, way):
    assert_same_as_one_process(single, sharded, way)


@pytest.mark.long  # DeepSpeed compiles its AdamW for the host's memory at first use
def test_offload_computes_what_one_process_computes(gold_run, recorded, single):  # noqa: F811
    ways = ("zero2_offload", "zero3_offload")
    out = launch(gold_run, recorded[0], recorded[1], 2, ways)
    for way in ways:
        assert_same_as_one_process(single, out, way)
        found = load_file(out / f"{way}-ppo.safetensors")
        names = [name.removeprefix("ppo/") for name in found if name.startswith("ppo/")]
        assert names and all(
            torch.allclose(found[f"resumed/{n}"], found[f"ppo/{n}"], atol=1e-6, rtol=0.0) for n in names
        )


@pytest.mark.parametrize("way", WAYS)
def test_the_state_really_is_sharded(sharded, way):
    found = torch.load(sharded / f"{way}.pt", weights_only=True)
    for stage in ("reward", "ppo"):
        shares = found[f"{stage}_shares"]
        assert shares["moments"] == pytest.approx(0.5, abs=0.02)
        assert shares["weights"] == pytest.approx(0.5 if way == "zero3" else 1.0, abs=0.02)


@pytest.mark.parametrize(("way", "near"), [("zero1", 0.0), ("zero2", 2e-5), ("zero3", 2e-5)])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(sharded, way, near):
    """Bitwise from a checkpoint of its own; from another ZeRO stage's or another number of ranks' but for rounding."""
    found = load_file(sharded / f"{way}-ppo.safetensors")
    names = [name.removeprefix("ppo/") for name in found if name.startswith("ppo/")]
    assert names
    for name in names:
        assert alike(found[f"resumed/{name}"], found[f"ppo/{name}"], near), name


AVERAGE = """
import torch
from deepspeed.utils import safe_get_full_fp32_param
from rlhf.config.compose import compose_config
from rlhf.system.exits import leave
from rlhf.system.processes import disconnect
from rlhf.training.ema import Ema
from rlhf.training.engine import make_engine

decay, steps = 0.9, 5
for way in ("zero1", "zero2", "zero3"):
    config = compose_config(["experiment=gold", f"deepspeed={way}", "precision=bfloat16", "device=cpu"])
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    engine = make_engine(config, model, [{"params": list(model.parameters()), "lr": 1e-5}], torch.device("cpu"))
    engine.keep_average("", engine.module, decay)
    average, weight, seen = engine.ema, engine.module.weight, []
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
        engine.step()
        seen.append(safe_get_full_fp32_param(weight).clone())
    shares = torch.tensor([decay ** (steps - 1 - i) for i in range(steps)])
    wanted = sum(share * x for share, x in zip(shares / shares.sum(), seen))
    found = average.state_dict()["weight"]
    assert (seen[0] - seen[-1]).abs().min() > 3e-5, "the weights moved"
    assert torch.allclose(found.view_as(wanted), wanted, rtol=0, atol=1e-7), (way, (found.view_as(wanted) - wanted).abs().max())
    again = Ema(engine.module, decay)
    again.load_state_dict(average.state_dict(), steps)
    assert torch.equal(again.state_dict()["weight"], found), way
disconnect()
leave(0)
"""


def test_in_bfloat16_the_average_is_of_the_float32_weights():
    """Under each stage of ZeRO: five steps of 1e-5, which bfloat16 weights near 0.3 do not show."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, "-c", AVERAGE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.parametrize("way", WAYS)
def test_the_average_of_slices_is_the_average(single, sharded, way):
    """While it answers, also in what ZeRO-3 keeps whole beside its slices; and the weights are back afterwards."""
    ours, theirs = load_file(single[0] / "none-ppo.safetensors"), load_file(sharded / f"{way}-ppo.safetensors")
    names = [name for name in ours if name.startswith(("ema/", "applied/", "after/"))]
    assert len(names) > 30
    for name in names:
        assert alike(theirs[name], ours[name], 2e-5), name
    some = next(name.removeprefix("ema/") for name in names if name.startswith("ema/") and "qkv" in name)
    assert torch.equal(theirs[f"ema/{some}"], theirs[f"applied/{some}"])
    assert not torch.allclose(theirs[f"ema/{some}"], theirs[f"after/{some}"], atol=1e-4)


def test_one_process_needs_no_launcher(gold_run, tmp_path):
    run = gold_run.copy(tmp_path, "reward", "alone")
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "rlhf",
            "reward",
            "--shared-settings",
            *run.overrides,
            f"runs_dir={tmp_path}",
            "run=alone",
            "deepspeed=zero2",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
    )
    assert found.returncode == 0 and "reward: complete" in found.stdout, found.stderr


def test_one_process_goes_on_where_two_under_zero3_stopped(gold_run, recorded, sharded):  # noqa: F811
    folder, rollouts = recorded
    run = gold_run.copy(folder, "ppo", "alone")
    config = run.config(*SETTINGS, *SIZES)
    config.ppo.max_grad_norm = 1e9
    tensors = load_file(rollouts)
    advantages, returns = tensors.pop("advantages"), tensors.pop("returns")
    with open_stage(config, "ppo") as stage:
        trainer = make_trainer(config, stage)
        trainer.engine.restore(read_state(sharded / "zero3-state")[0])
        for _ in range(2):
            batch, sums = Rollout(**tensors), Sums()
            given, chosen = experience(batch, advantages, returns), list(range(13))
            ppo_update.train_minibatch(trainer.config, given, chosen, trainer.state, sums)
            trainer.engine.step({"policy": 1.0, "critic": 1.0})
    wanted = load_file(sharded / "zero3-ppo.safetensors")
    for name, parameter in trainer.engine.module.named_parameters():
        assert alike(parameter.detach(), wanted[f"ppo/{name}"], 2e-5), name

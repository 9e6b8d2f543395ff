"""A stage that is interrupted right after a checkpoint and run again gives what an undisturbed run gives."""

import pytest
from safetensors.torch import load_file

from rlhf.errors import UserError
from rlhf.runs.checkpoints import checkpoints
from rlhf.runs.folders import read_stage
from rlhf.runs.run_files import read_jsonl
from rlhf.training.loop import TrainingLoop

from .conftest import SHORT, Run

EVERY_STEP = "checkpoints.every_seconds=0"


class Interrupted(Exception):
    """What the tests raise after a checkpoint."""


def interrupt_after(monkeypatch: pytest.MonkeyPatch, saves: int) -> None:
    """Raise Interrupted right after the stage has written its `saves`-th checkpoint."""
    count = 0

    def counted(save):
        def call(*args, **kwargs):
            nonlocal count
            found = save(*args, **kwargs)
            count += 1
            if count == saves:
                raise Interrupted
            return found

        return call

    monkeypatch.setattr(TrainingLoop, "save", counted(TrainingLoop.save))


def interrupt(run: Run, stage: str, saves: int, *more: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, saves)
        with pytest.raises(Interrupted):
            run.stage(stage, EVERY_STEP, *more)
    assert read_stage(run.folder / stage)["status"] == "running"
    assert checkpoints(run.folder / stage / "checkpoints")


def assert_same_weights(one, two, *files: str) -> None:
    for name in files:
        a, b = load_file(one / name), load_file(two / name)
        assert a.keys() == b.keys()
        different = [key for key in a if not a[key].equal(b[key])]
        assert not different, f"{name}: {different}"


def values_by_step(folder, name: str) -> list[tuple[int, float]]:
    """(step, value) of every line of metrics.jsonl that has the metric, in the order of the file."""
    return [(r["progress/step"], r[name]) for r in read_jsonl(folder / "metrics.jsonl") if name in r]


CASES = [
    ("pretrain", 5, "pretrain/loss", 8),
    ("sft", 2, "sft/loss", 4),
    ("reward", 6, "reward/loss", 10),
    ("ppo", 2, "objective/scores", 3),
]


@pytest.mark.parametrize(("stage", "saves", "metric", "steps"), CASES)
def test_resumed_equals_undisturbed(copy_until, undisturbed, stage, saves, metric, steps):
    whole, broken = undisturbed(stage), copy_until(stage)
    interrupt(broken, stage, saves, *SHORT[stage])
    seconds = read_stage(broken.folder / stage)["seconds"]
    broken.stage(stage, EVERY_STEP, *SHORT[stage])

    files = ["model/model.safetensors"] + (["critic/model.safetensors"] if stage == "ppo" else [])
    assert_same_weights(whole.folder / stage, broken.folder / stage, *files)
    one, two = (values_by_step(run.folder / stage, metric) for run in (whole, broken))
    assert [step for step, _ in two] == list(range(1, steps + 1)), "no step missing, none twice"
    assert one == two
    record = read_stage(broken.folder / stage)
    assert record["summary"] == read_stage(whole.folder / stage)["summary"]
    assert record["seconds"] > seconds, "the time of the first try counts"


@pytest.mark.parametrize(("stage", "metric", "steps"), [(stage, metric, steps) for stage, _, metric, steps in CASES])
def test_stopped_after_the_last_step(copy_until, undisturbed, stage, metric, steps):
    """Only what comes after training is left to do: no step is taken twice."""
    whole, broken = undisturbed(stage), copy_until(stage)
    interrupt(broken, stage, steps, *SHORT[stage])
    broken.stage(stage, EVERY_STEP, *SHORT[stage])
    assert_same_weights(whole.folder / stage, broken.folder / stage, "model/model.safetensors")
    assert [step for step, _ in values_by_step(broken.folder / stage, metric)] == list(range(1, steps + 1))
    assert read_stage(broken.folder / stage)["summary"] == read_stage(whole.folder / stage)["summary"]


def test_adaptive_kl_coefficient_survives(copy_until):
    run = copy_until("ppo")
    settings = ["kl.coef=0.1", "kl.target=100", "kl.horizon=200", "ppo.critic_warmup_updates=0"]
    interrupt(run, "ppo", 2, *settings)
    before = values_by_step(run.folder / "ppo", "objective/kl_coef")
    run.stage("ppo", EVERY_STEP, *settings)
    coefs = [value for _, value in values_by_step(run.folder / "ppo", "objective/kl_coef")]
    # the KL stays far below the target: times 1 - 0.2 * 64 / 200 = 0.936 after each update
    assert coefs[:2] == [value for _, value in before] == pytest.approx([0.1, 0.0936])
    assert coefs[2] == pytest.approx(0.0936 * 0.936)


def test_the_kl_coefficient_waits_for_the_policy(copy_until):
    run = copy_until("ppo")
    folder = run.stage("ppo", "kl.coef=0.1", "kl.target=100", "kl.horizon=200", "ppo.critic_warmup_updates=1")
    coefs = [value for _, value in values_by_step(folder, "objective/kl_coef")]
    assert coefs == pytest.approx([0.1, 0.1, 0.0936]), "update 1 trains the critic alone"


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_damaged_checkpoint_is_passed_over(copy_until, undisturbed, capsys, stage):
    whole, broken = undisturbed(stage), copy_until(stage)
    interrupt(broken, stage, 2, *SHORT[stage])
    newest = checkpoints(broken.folder / stage / "checkpoints")[-1]
    weights = next(path for path in sorted(newest.iterdir()) if path.suffix == ".safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    capsys.readouterr()
    broken.stage(stage, EVERY_STEP, *SHORT[stage])
    told = capsys.readouterr().out
    assert str(newest) in told and "1" in told.split("resuming from", 1)[1].splitlines()[0]
    assert_same_weights(whole.folder / stage, broken.folder / stage, "model/model.safetensors")


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_resume_with_another_setting_is_refused(copy_until, stage):
    run = copy_until(stage)
    interrupt(run, stage, 1)
    with pytest.raises(UserError, match=rf"{stage}.lr .* -> 0.5"):
        run.stage(stage, f"{stage}.lr=0.5")

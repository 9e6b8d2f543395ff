"""A stage that is interrupted and run again gives what an undisturbed run gives; training ends early with its best weights."""

import pytest
from safetensors.torch import load_file

from rlhf.errors import UserError
from rlhf.runs.checkpoints import checkpoints
from rlhf.runs.folders import read_stage
from rlhf.stages import reward, sft
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


CASES = [
    ("pretrain", 5, "pretrain/loss", 8),
    ("sft", 2, "sft/loss", 4),
    ("reward", 5, "reward/loss", 8),
    ("ppo", 2, "objective/scores", 3),
]


@pytest.mark.parametrize(("stage", "saves", "metric", "steps"), CASES)
def test_resumed_equals_undisturbed(copy_until, undisturbed, stage, saves, metric, steps):
    """Interrupted in the middle, and after the last step, when only what comes after training is left to do."""
    whole, broken = undisturbed(stage), copy_until(stage)
    for count in (saves, steps - saves):
        interrupt(broken, stage, count, *SHORT[stage])
    seconds = broken.record(stage)["seconds"]
    broken.stage(stage, EVERY_STEP, *SHORT[stage])

    assert_same_weights(whole.folder / stage, broken.folder / stage, "model/model.safetensors")
    assert [step for step, _ in broken.values(stage, metric)] == list(range(1, steps + 1)), (
        "no step missing, none twice"
    )
    for name in (metric, "loss/value_avg"):  # the critic's, which no file shows
        assert broken.values(stage, name) == whole.values(stage, name)
    record = broken.record(stage)
    assert record["summary"] == whole.record(stage)["summary"]
    assert record["seconds"] > seconds, "the time of the first tries counts"


def test_adaptive_kl_coefficient_survives_and_waits_for_the_policy(copy_until):
    run = copy_until("ppo")
    settings = ["kl.coef=0.1", "kl.target=100", "kl.horizon=200", "ppo.critic_warmup_updates=1"]
    interrupt(run, "ppo", 2, *settings)
    before = run.values("ppo", "objective/kl_coef")
    run.stage("ppo", EVERY_STEP, *settings)
    coefs = [value for _, value in run.values("ppo", "objective/kl_coef")]
    # update 1 trains the critic alone; the KL stays far below the target: then times 1 - 0.2 * 64 / 200 = 0.936
    assert coefs[:2] == [value for _, value in before] == [0.1, 0.1]
    assert coefs[2] == pytest.approx(0.0936)


def test_a_damaged_checkpoint_is_passed_over(copy_until, undisturbed, capsys):
    """And it is not resumed with another setting."""
    whole, broken = undisturbed("sft"), copy_until("sft")
    interrupt(broken, "sft", 2, *SHORT["sft"])
    with pytest.raises(UserError, match=r"sft.lr .* -> 0.5"):
        broken.stage("sft", *SHORT["sft"], "sft.lr=0.5")
    newest = checkpoints(broken.folder / "sft" / "checkpoints")[-1]
    weights = next(path for path in sorted(newest.iterdir()) if path.suffix == ".safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    capsys.readouterr()
    broken.stage("sft", EVERY_STEP, *SHORT["sft"])
    told = capsys.readouterr().out
    assert str(newest) in told and "1" in told.split("resuming from", 1)[1].splitlines()[0]
    assert_same_weights(whole.folder / "sft", broken.folder / "sft", "model/model.safetensors")


# By step 2, 4, 6, 8: the second is the best, and two worse ones follow.
LOSSES = [3.0, 2.0, 2.5, 2.25]
OFTEN = {
    "sft": ["sft.epochs=4", "sft.batch_size=100", "sft.schedule=constant", "sft.eval_every=2"],
    "reward": ["reward.epochs=4", "reward.batch_prompts=16", "reward.schedule=constant", "reward.eval_every=2"],
}


@pytest.fixture
def judged(monkeypatch):
    """Held-out losses of SFT and reward model as in LOSSES, then of the weights that are kept; the steps are those of training."""
    given: list[float] = []
    monkeypatch.setattr(sft, "response_loss", lambda *_: given.pop(0) if given else 9.0)
    real = reward.evaluate_items
    monkeypatch.setattr(reward, "evaluate_items", lambda *a: real(*a) | {"loss": given.pop(0) if given else 9.0})
    return given


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_training_ends_after_worse_losses_and_the_best_weights_are_kept(copy_until, judged, capsys, stage):
    stopped, broken = (copy_until(stage, name) for name in ("stopped", "broken"))
    judged[:] = LOSSES
    stopped.stage(stage, *OFTEN[stage], f"{stage}.patience=2")
    assert (
        not judged and f"{stage}: keeps step 4 of 8, whose held-out loss 2.000 is the best" in capsys.readouterr().out
    )
    looked = stopped.values(stage, "eval/dev/loss")
    assert looked[:4] == [*zip((2, 4, 6, 8), LOSSES, strict=True)] and stopped.record(stage)["steps"] == 8
    assert not list((stopped.folder / stage).glob("checkpoints"))

    if stage == "sft":
        four = copy_until(stage, "four")
        four.stage(stage, *OFTEN[stage], "sft.epochs=1")  # as many steps as until the best
        assert four.record(stage)["steps"] == 4
        assert_same_weights(four.folder / stage, stopped.folder / stage, "model/model.safetensors")

    judged[:] = LOSSES[:2]  # killed after the step after the best
    interrupt(broken, stage, 5, *OFTEN[stage], f"{stage}.patience=2")
    judged[:] = LOSSES[2:]
    broken.stage(stage, EVERY_STEP, *OFTEN[stage], f"{stage}.patience=2")
    assert_same_weights(stopped.folder / stage, broken.folder / stage, "model/model.safetensors")

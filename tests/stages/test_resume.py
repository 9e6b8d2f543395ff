"""A stage that is interrupted and run again gives what an undisturbed run gives; training ends early with its best weights."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlhf.runs.checkpoints import checkpoint_step, checkpoints, latest_checkpoint
from rlhf.runs.folders import read_stage
from rlhf.runs.run_files import read_jsonl
from rlhf.stages import ppo, reward, sft
from rlhf.training import batches
from rlhf.training.loop import TrainingLoop

from .conftest import ONE_LABELER, SHORT, Run, stopped_in_second

EVERY_STEP = "checkpoints.every_seconds=0"


class Interrupted(Exception):
    """What the tests raise after a checkpoint."""


def interrupt(run: Run, stage: str, saves: int, *more: str) -> None:
    save, saved = TrainingLoop.save, []

    def counted(*args, **kwargs):
        saved.append(save(*args, **kwargs))
        if len(saved) == saves:
            raise Interrupted
        return saved[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "save", counted)
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
    ("pretrain", 5, "pretrain/loss", 8), ("sft", 2, "sft/loss", 4), ("reward", 5, "reward/loss", 8),
    ("ppo", 2, "objective/scores", 3),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "saves", "metric", "steps"), CASES)
def test_resumed_equals_undisturbed(copy_until, undisturbed, stage, saves, metric, steps):
    """Interrupted in the middle, and after the last step, when only what comes after training is left to do."""
    whole, broken = undisturbed(stage), copy_until(stage)
    for count in (saves, steps - saves):
        interrupt(broken, stage, count, *SHORT[stage])
    seconds = broken.record(stage)["seconds"]
    broken.stage(stage, EVERY_STEP, *SHORT[stage])

    assert_same_weights(whole.folder / stage, broken.folder / stage, "model/model.safetensors")
    assert [step for step, _ in broken.values(stage, metric)] == list(range(1, steps + 1)), "each once"
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


# By step 2, 4, 6, 8: the second is the best, and two worse ones follow.
LOSSES = [3.0, 2.0, 2.5, 2.25]
OFTEN = {
    "sft": ["sft.epochs=4", "sft.batch_size=100", "sft.schedule=constant", "sft.eval_every=2"],
    "reward": [
        "reward.epochs=4", "reward.batch_prompts=8", "reward.schedule=constant", "reward.eval_every=2", "reward.audit=0",
        "reward.calibration_samples=16", *ONE_LABELER,
    ],
}  # fmt: skip


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
    assert not judged and f"{stage}: keeps step 4 of 8, whose held-out loss 2.000 is" in capsys.readouterr().out
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


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(  # SFT: below, by the pipeline
    ("stage", "metric"), [pytest.param("sft", "sft/loss", marks=pytest.mark.long), ("ppo", "objective/scores")]
)
def test_a_loop_stops_after_its_step_and_goes_on(copy_until, undisturbed, capfd, stage, metric) -> None:
    whole, stopped = undisturbed(stage), copy_until(stage)
    module, step = (ppo, "one_update") if stage == "ppo" else (batches, "train_step")
    with stopped_in_second(module, step):
        stopped.stage(stage, *SHORT[stage])
    folder = stopped.folder / stage
    assert [checkpoint_step(path) for path in checkpoints(folder / "checkpoints")] == [2]
    assert latest_checkpoint(folder / "checkpoints") is not None, "a whole one"
    assert [step for step, _ in stopped.values(stage, metric)][-2:] == [1, 2]
    assert "stopping after this step, with a checkpoint" in capfd.readouterr().err
    stopped.stage(stage, *SHORT[stage])
    assert_same_weights(whole.folder / stage, folder, "model/model.safetensors")
    assert stopped.values(stage, metric) == whole.values(stage, metric)


def start_pipeline(run: Run, **how: Any) -> subprocess.Popen[str]:
    """A pipeline to SFT in a process of its own, whose SFT has taken two steps more."""
    full = [sys.executable, "-m", "rlhf", "pipeline", *run.words("stages=sft")]
    process = subprocess.Popen(full, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, **how)
    metrics = run.folder / "sft" / "metrics.jsonl"
    until, steps = time.monotonic() + 120, len(list(read_jsonl(metrics)))
    while len(list(read_jsonl(metrics))) < steps + 2:
        assert process.poll() is None and time.monotonic() < until, "it never trained"
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_pipeline_passes_signals_on_and_a_stage_ends_with_it(
    copy_until: Callable[..., Run], gold_run: Run, number: int
) -> None:
    """The signal goes to the pipeline's process alone; the stage writes a checkpoint, both end, one prints how to resume. Run again
    and killed, it can pass on no signal; its stage still ends and releases the folder, or else SFT would be refused.
    """
    run = copy_until("sft")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    process = start_pipeline(run, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    folder = run.folder / "sft"
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.count("run the same command again, it resumes") == 1 and "Traceback" not in told
    assert "mend what it says" not in told
    newest = latest_checkpoint(folder / "checkpoints")
    assert newest is not None
    assert checkpoint_step(newest) == run.values("sft", "sft/loss")[-1][0], "only the step under way was lost"
    process = start_pipeline(run, stdout=subprocess.DEVNULL)
    process.kill()
    process.wait()
    time.sleep(1)
    run.stage("sft")
    assert_same_weights(folder, gold_run.folder / "sft", "model/model.safetensors")

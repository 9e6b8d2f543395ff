"""Invariant 8: a weight or loss that is not a number stops a stage before the step, and the batch is kept."""

import pytest
import torch
from safetensors.torch import load_file

from rlhf.errors import UserError
from rlhf.ppo import models as ppo_models
from rlhf.runs.checkpoints import checkpoints
from rlhf.runs.folders import is_complete
from rlhf.stages import pretrain, sft
from rlhf.training import batches
from rlhf.training.loop import TrainingLoop
from rlhf.training.optim import MuonAdamW

EVERY_STEP = "checkpoints.every_seconds=0"


def poison(model) -> None:
    with torch.no_grad():
        next(p for p in model.parameters() if p.ndim == 2)[:, 0] = float("nan")


def spoil_gradient(model) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * float("inf"))


@pytest.fixture
def steps(monkeypatch) -> list[str]:
    taken: list[str] = []
    for cls in (torch.optim.AdamW, MuonAdamW):
        step = cls.step
        monkeypatch.setattr(cls, "step", lambda self, *a, step=step: taken.append("step") or step(self, *a))
    return taken


def assert_stopped(run, stage: str, *more: str) -> None:
    with pytest.raises(UserError, match="not finite") as caught:
        run.stage(stage, EVERY_STEP, *more)
    batch = run.folder / stage / "offending_batch.safetensors"
    message = str(caught.value)
    assert str(batch) in message and message.startswith(f"{stage}: ") and "\n" not in message
    assert not is_complete(run.folder / stage)
    assert "tokens" in load_file(batch) or "input_ids" in load_file(batch)


@pytest.mark.parametrize(("stage", "module", "maker", "spoil"), [
    ("pretrain", pretrain, "make_model", poison),
    ("sft", sft, "load_lm", poison),
    ("ppo", ppo_models, "load_lm", poison),
    ("pretrain", pretrain, "make_model", spoil_gradient),  # the loss may be finite where its gradient is not
])  # fmt: skip
def test_nothing_that_is_not_finite_is_stepped_on(copy_until, monkeypatch, steps, stage, module, maker, spoil):
    make = getattr(module, maker)

    def spoilt(*args, **kwargs):
        model = make(*args, **kwargs)
        spoil(model)
        return model

    monkeypatch.setattr(module, maker, spoilt)
    assert_stopped(copy_until(stage), stage)
    assert not steps


def test_a_reward_model_with_nan_is_not_trained(copy_until, monkeypatch, steps):
    train = batches.train
    monkeypatch.setattr(batches, "train", lambda loop, *a, **k: poison(loop.engine.module) or train(loop, *a, **k))
    assert_stopped(copy_until("reward"), "reward")
    assert not steps


def test_ppo_keeps_the_last_good_checkpoint(copy_until, monkeypatch):
    """A weight becomes NaN after the first update; once that is corrected, the run resumes from the checkpoint."""
    run, save, small = copy_until("ppo"), TrainingLoop.save, ["ppo.episodes=32", "ppo.episodes_per_update=16"]

    def save_and_poison(loop, step):
        save(loop, step)
        poison(loop.engine.module.critic)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "save", save_and_poison)
        assert_stopped(run, "ppo", *small)
    assert [path.name for path in checkpoints(run.folder / "ppo" / "checkpoints")] == ["step-1"]
    run.stage("ppo", EVERY_STEP, *small)
    assert is_complete(run.folder / "ppo")

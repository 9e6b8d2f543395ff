"""Evaluations during SFT and reward modelling, and training that ends when they no longer improve: which weights are kept."""

import pytest

from rlhf.stages import reward, sft

from .test_resume import EVERY_STEP, assert_same_weights, interrupt

# By step 2, 4, 6, 8: the second is the best, and two worse ones follow.
LOSSES = [3.0, 2.0, 2.5, 2.25]
SHORT = {
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
    stopped.stage(stage, *SHORT[stage], f"{stage}.patience=2")
    assert (
        not judged and f"{stage}: keeps step 4 of 8, whose held-out loss 2.000 is the best" in capsys.readouterr().out
    )
    looked = stopped.values(stage, "eval/dev/loss")
    assert looked[:4] == [*zip((2, 4, 6, 8), LOSSES, strict=True)] and stopped.record(stage)["steps"] == 8
    assert not list((stopped.folder / stage).glob("checkpoints"))

    if stage == "sft":
        four = copy_until(stage, "four")
        four.stage(stage, *SHORT[stage], "sft.epochs=1")  # as many steps as until the best
        assert four.record(stage)["steps"] == 4
        assert_same_weights(four.folder / stage, stopped.folder / stage, "model/model.safetensors")

    judged[:] = LOSSES[:2]  # killed after the step after the best
    interrupt(broken, stage, 5, *SHORT[stage], f"{stage}.patience=2")
    judged[:] = LOSSES[2:]
    broken.stage(stage, EVERY_STEP, *SHORT[stage], f"{stage}.patience=2")
    assert_same_weights(stopped.folder / stage, broken.folder / stage, "model/model.safetensors")

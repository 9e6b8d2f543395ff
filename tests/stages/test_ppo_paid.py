"""What PPO is paid with: several sources, scores that are cut or not finite, and rules for a missing end token."""

# ruff: noqa: F811

import pytest
import torch

from rlhf.errors import UserError
from rlhf.ppo.rewards import CombinedReward
from rlhf.training.loop import open_loop

from .ppo_trainer import weights
from .test_ppo_options import open_trainer  # noqa: F401 (a fixture)


def pays_two(prompts, responses, metadata):
    return [2.0] * len(responses)


def pays_infinity(prompts, responses, metadata):
    return [float("inf")] * len(responses)


def test_several_sources_with_weights(open_trainer, gold_run):
    own = str(gold_run.folder)
    settings = [
        f"ppo.rewards=['{own}','{__name__}:pays_two']",
        "ppo.reward_weights=[0.5,3]",
        "ppo.missing_eos_rule=none",
    ]
    with open_trainer(*settings) as trainer:
        assert isinstance(trainer.reward, CombinedReward)
        metrics = trainer.update()
    assert metrics["objective/scores/function_1"] == 2.0
    wanted = 0.5 * metrics["objective/scores/model_0"] + 6.0
    assert metrics["objective/scores"] == pytest.approx(wanted, abs=1e-5)


def test_a_reward_that_is_not_finite_stops_the_run_before_any_step(open_trainer):
    with open_trainer(f"ppo.rewards='{__name__}:pays_infinity'") as trainer:
        before = weights(trainer.engine.module)
        stopped = pytest.raises(UserError, match="scores not finite: stopped before the step")
        with stopped, open_loop(trainer.stage, trainer.engine, 1):
            trainer.update()
        assert all(value.equal(before[name]) for name, value in trainer.engine.module.named_parameters())
        assert (trainer.stage.folder / "offending_batch.safetensors").exists()


def test_scores_are_cut_before_they_pay(open_trainer):
    with open_trainer("ppo.score_clip=0.1", "ppo.missing_eos_rule=none") as trainer:
        assert abs(trainer.update()["objective/scores"]) <= 0.1 + 1e-6


@pytest.mark.parametrize("rule", ["replace", "none"])
def test_rules_for_a_response_without_end_token(open_trainer, rule):
    with open_trainer(f"ppo.missing_eos_rule={rule}", "ppo.missing_eos_score=-4.0") as trainer:
        trainer.reward = lambda episodes: torch.ones(len(episodes.texts))
        metrics = trainer.update()
    ended = metrics["rollout/eos_fraction"]
    worth = {"replace": -4.0, "none": 1.0}[rule]
    assert 0 < ended < 1
    assert metrics["objective/scores"] == pytest.approx(ended + worth * (1 - ended), abs=1e-5)

"""What enters an update of PPO: which prompts, which random numbers, which advantages, and which KL moves its coefficient."""

from typing import Any

import pytest
import torch

from rlhf.ops.gae import gae
from rlhf.ops.kl import AdaptiveKL
from rlhf.ops.masked import whiten
from rlhf.ppo.experience import Experience, Rollout
from rlhf.ppo.rewards import ModelReward
from rlhf.stages import ppo

from .ppo_trainer import open_trainer, restored
from .test_ppo import AT_ONCE

SMALL = ["ppo.episodes_per_update=32", "ppo.episodes=64", "ppo.lr=1e-12", "ppo.critic_lr=1e-12"]


@pytest.fixture(scope="module")
def opened(gold_run, tmp_path_factory):
    with open_trainer(gold_run.copy(tmp_path_factory.mktemp("inputs"), "ppo"), *AT_ONCE, *SMALL) as found:
        yield found


@pytest.fixture
def trainer(opened):
    with restored(opened) as found:
        yield found


@pytest.fixture
def optimized(trainer, monkeypatch) -> list[tuple[Rollout, torch.Tensor]]:
    """The rollout and the advantages of each update."""
    found: list[tuple[Rollout, torch.Tensor]] = []
    optimize = ppo.optimize

    def spy(config: Any, update: int, experience: Experience, *more: Any) -> None:
        found.append((experience.rollout, experience.advantages))
        optimize(config, update, experience, *more)

    monkeypatch.setattr(ppo, "optimize", spy)
    return found


def test_held_out_prompts_are_of_the_dev_split_and_train_nothing(trainer):
    held_out = [record for record, _ in trainer.prompts.held_out]
    trained = [record for record, _ in trainer.prompts.train]
    assert {record.metadata["split"] for record in held_out} == {"dev"}
    assert {record.metadata["split"] for record in trained} == {"train"}
    assert not {record.prompt[-1].content for record in held_out} & {record.prompt[-1].content for record in trained}


def test_another_update_draws_other_samples(trainer, optimized, monkeypatch):
    monkeypatch.setattr(ppo, "choose_prompts", lambda *where: list(range(32)))
    for number in (1, 2, 1):
        trainer.update(number)
    one, two, again = (rollout.tokens.tolist() for rollout, _ in optimized)
    assert one == again, "the models have not moved"
    assert one != two


def test_the_losses_get_whitened_advantages(trainer, optimized):
    trainer.update()
    ((rollout, advantages),) = optimized
    counted = advantages[rollout.response_mask]
    assert counted.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert counted.var(correction=0).item() == pytest.approx(1.0, abs=1e-4)
    assert not advantages[~rollout.response_mask].any()


def test_each_token_earns_its_term_of_the_score(trainer, optimized, monkeypatch):
    trainer.config.ppo.score_by_token = True
    monkeypatch.setattr(trainer.reward.model.config, "read_tokens", 3)
    trainer.config.ppo.missing_eos_rule = "none"
    trainer.update()
    ((rollout, advantages),) = optimized
    earned, mask = rollout.token_scores, rollout.response_mask
    assert torch.allclose(earned.sum(1), rollout.scores, atol=1e-6) and not earned[~mask].any()
    long = mask.sum(1) > 3
    assert long.any() and (earned[long] != 0).sum(1).tolist() == [3] * int(long.sum())
    rewards = earned - trainer.config.kl.coef * (rollout.logp_old - rollout.logp_ref)
    expected = whiten(gae(rewards, rollout.values, mask, gamma=1.0, lam=0.95)[0], mask)
    assert torch.allclose(advantages, expected, atol=1e-4)


def test_values_of_responses_that_end_by_themselves_are_the_critics_output(copy_until, monkeypatch):
    monkeypatch.setattr(ModelReward, "read_tokens", 3)
    with open_trainer(copy_until("ppo"), *AT_ONCE, *SMALL, "ppo.score_by_token=true") as trainer:
        assert not trainer.actor_critic.scale_values, "how many tokens are left is not known"


def test_the_adaptive_coefficient_sees_nats_per_sequence(trainer):
    """KL 0.5 nats per token over more than 4 tokens per response: above a target of 2 nats per sequence."""
    right = trainer.reference
    trainer.reference = lambda tokens, starts, mask: right(tokens, starts, mask) - 0.5 * mask
    trainer.state.kl = AdaptiveKL(init=0.1, target=2.0, horizon=320)
    metrics = trainer.update(2)
    assert metrics["objective/kl"] == pytest.approx(0.5 * metrics["rollout/response_len"], abs=1e-3)
    assert metrics["objective/kl"] > 1.2 * 2.0
    assert trainer.state.kl.coef == pytest.approx(0.1 * (1 + 0.2 * 32 / 320))

"""PPO: what enters an update, what it computes, that it learns, and what it refuses to train on."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rlhf.engines.sampling import make_sampler
from rlhf.errors import UserError
from rlhf.model.fused_loss import response_logprobs
from rlhf.model.interface import Episodes
from rlhf.ops.gae import gae
from rlhf.ops.kl import AdaptiveKL
from rlhf.ops.masked import whiten
from rlhf.ppo import update as ppo_update
from rlhf.ppo.experience import Experience, Rollout
from rlhf.ppo.rewards import ModelReward
from rlhf.ppo.update import TOLERANCE, Checked, check_first_minibatch
from rlhf.stages import ppo
from rlhf.training.setup import load_policy
from tests.oracles import token_values

from .ppo_trainer import Trainer, changed, off_policy, open_trainer, restored, weights

CPU = torch.device("cpu")
# The first update trains policy and critic at the full learning rate.
AT_ONCE = ["ppo.critic_warmup_updates=0", "ppo.warmup_fraction=0"]


@pytest.fixture(scope="module")
def opened(gold_run, tmp_path_factory) -> Iterator[Trainer]:
    run = gold_run.copy(tmp_path_factory.mktemp("ppo"), "ppo")
    with open_trainer(run, *AT_ONCE, "ppo.episodes_per_update=32", "ppo.episodes=64") as found:
        yield found


@pytest.fixture
def trainer(opened) -> Iterator[Trainer]:
    with restored(opened) as found:
        yield found


# --- what enters an update -----------------------------------------------------------------------------------------


@pytest.fixture
def optimized(trainer, monkeypatch) -> list[tuple[Rollout, torch.Tensor]]:
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
    monkeypatch.setattr(trainer.engine.optimizer, "step", lambda: None)  # the models do not move
    for number in (1, 2, 1):
        trainer.update(number)
    one, two, again = (rollout.tokens.tolist() for rollout, _ in optimized)
    assert one == again != two


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
    with open_trainer(copy_until("ppo"), "ppo.score_by_token=true") as trainer:
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


# --- gradients -----------------------------------------------------------------------------------------------------


def gradients(trainer: Trainer, batch: tuple, chosen: list[int], micro: int) -> tuple[dict, dict]:
    """Unclipped gradients of one minibatch, and its metrics."""
    trainer.config.ppo.micro_batch_episodes, trainer.config.ppo.max_grad_norm = micro, 1e9
    trainer.engine.optimizer.zero_grad()
    sums = trainer.train(*batch, chosen)
    return {name: p.grad.clone() for name, p in trainer.engine.module.named_parameters()}, sums.reduce()


@pytest.mark.parametrize(
    ("micro", "tokens"), [*(pytest.param(micro, None, id=str(micro)) for micro in (1, 3, 8)), (16, 100)]
)
def test_micro_batches_change_no_gradient_and_no_metric(trainer, monkeypatch, micro, tokens):
    batch, chosen = off_policy(trainer.respond(), seed=0, scale=0.3), [0, 3, 5, 6, 7, 10, 12, 15]
    assert batch[0].response_mask.sum(1).unique().numel() > 8
    whole, metrics = gradients(trainer, batch, chosen, micro=16)
    monkeypatch.setattr(trainer.engine, "most_tokens", tokens)
    parts, split_metrics = gradients(trainer, batch, chosen, micro)
    assert metrics["policy/clipfrac_avg"] > 0.05 and metrics["loss/value_avg"] > 0
    for name, gradient in whole.items():
        assert torch.allclose(parts[name], gradient, atol=1e-5, rtol=1e-5), name
    assert split_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)


# --- one update ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 4), (3, 2)])
def test_steps_are_epochs_times_minibatches_and_each_epoch_sees_every_episode(
    trainer, monkeypatch, epochs, minibatches
):
    trainer.config.ppo.epochs, trainer.config.ppo.minibatches = epochs, minibatches
    seen: list[list[int]] = []
    train_minibatch, step, steps = ppo_update.train_minibatch, trainer.engine.optimizer.step, []
    monkeypatch.setattr(ppo_update, "train_minibatch", lambda *a, **k: seen.append(a[2]) or train_minibatch(*a, **k))
    monkeypatch.setattr(trainer.engine.optimizer, "step", lambda: steps.append(1) or step())
    trainer.update()
    assert len(steps) == len(seen) == epochs * minibatches
    for epoch in range(epochs):
        part = seen[epoch * minibatches : (epoch + 1) * minibatches]
        assert sorted(i for chosen in part for i in chosen) == list(range(32))
        assert {len(chosen) for chosen in part} == {32 // minibatches}


def test_prompts_come_in_whole_passes(trainer):
    trainer.config.ppo.episodes_per_update = 64
    drawn = [i for number in range(1, 8) for i in ppo.choose_prompts(trainer.config, 200, number)]
    count = len(trainer.prompts.train)
    assert count == 200
    assert sorted(drawn[:count]) == sorted(drawn[count : 2 * count]) == list(range(count))
    assert drawn[:count] != drawn[count : 2 * count], "each pass has an order of its own"
    again = ppo.choose_prompts(trainer.config, 200, 5)
    assert again == drawn[4 * 64 : 5 * 64], "an update's prompts depend on its number alone"


def pay_for(token: int, sign: float) -> Callable[[Episodes], torch.Tensor]:
    """A reward of `sign` for each time that one token appears in the response."""
    return lambda episodes: torch.tensor([sign * ids.count(token) for ids in episodes.responses])


@pytest.mark.parametrize("sign", [1.0, pytest.param(-1.0, marks=pytest.mark.long)])
def test_a_rigged_reward_rises(copy_until, sign):
    settings = ["kl.target=null", "kl.coef=0.0", "ppo.missing_eos_rule=none", "ppo.lr=3e-3", "ppo.critic_lr=3e-3"]
    sizes = ["ppo.episodes_per_update=32", "ppo.episodes=32", "ppo.minibatches=4"]
    with open_trainer(copy_until("ppo"), *AT_ONCE, *settings, *sizes) as trainer:
        rollout, common = trainer.respond(200), Counter()
        for row, start, end in zip(rollout.tokens.tolist(), rollout.prompt_lengths, rollout.lengths, strict=True):
            common.update(row[start : end - 1])
        trainer.reward = pay_for(common.most_common(1)[0][0], sign)
        before = trainer.respond(200).scores.mean().item()  # an update's own 32 episodes are too few to tell by
        for number in range(1, 13):
            trainer.update(number)
        gain = trainer.respond(200).scores.mean().item() - before
    assert gain > 1.2


@pytest.mark.parametrize(("rule", "worth"), [("min", -5.0), ("replace", -5.0), ("none", 1.0)])
def test_rules_for_a_response_without_end_token(trainer, rule, worth):
    trainer.reward = lambda episodes: torch.ones(len(episodes.texts))
    trainer.config.ppo.missing_eos_rule, trainer.config.ppo.missing_eos_score = rule, -5.0
    metrics = trainer.update()
    ended = metrics["rollout/eos_fraction"]
    assert 0 < ended < 1
    assert metrics["objective/scores"] == pytest.approx(ended + worth * (1 - ended), abs=1e-5)


def test_warm_up_of_the_critic_leaves_the_policy_alone(copy_until):
    with open_trainer(copy_until("ppo"), "ppo.critic_warmup_updates=1", "ppo.warmup_fraction=0") as trainer:
        policy, critic = (weights(m) for m in (trainer.actor_critic.policy, trainer.actor_critic.critic))
        trainer.update(1)
        assert not changed(policy, trainer.actor_critic.policy) and changed(critic, trainer.actor_critic.critic)
        trainer.update(2)
        assert changed(policy, trainer.actor_critic.policy)


def test_measuring_an_update_changes_nothing(trainer):
    before, random = weights(trainer.actor_critic), torch.get_rng_state()
    seconds, experience = ppo.measure_update(trainer.parts)
    assert seconds > 0 and experience.texts and torch.equal(torch.get_rng_state(), random)
    assert not changed(before, trainer.actor_critic)
    assert all(p.grad is None for p in trainer.actor_critic.parameters())
    for scores, warns in ((experience.scores, 0), (torch.ones_like(experience.scores), 1)):
        ppo.say_measured(trainer.config, experience._replace(scores=scores), (said := []).append)
        assert sum("scores are 1, so PPO cannot learn" in line for line in said) == warns


def test_the_critic_begins_on_the_scale_of_the_scores(trainer):
    rollout = trainer.respond()
    critic = trainer.actor_critic.critic
    with torch.no_grad():
        last = token_values(critic, rollout.tokens).gather(1, rollout.lengths[:, None] - 1)[:, 0]
    assert critic.config.gain == 1.0 and torch.allclose(last, rollout.scores, atol=1e-4)


# --- invariants of the first update --------------------------------------------------------------------------------


def assert_refused(trainer: Trainer, invariant: int) -> None:
    before = weights(trainer.engine.module)
    with pytest.raises(UserError, match=f"invariant {invariant} fails on the first update"):
        trainer.update()
    assert not changed(before, trainer.engine.module), "nothing was trained"


def test_a_right_first_update_passes(trainer):
    frozen = [(m, weights(m)) for m in (trainer.reward.model, trainer.reference.model)]
    policy = weights(trainer.actor_critic.policy)
    metrics = trainer.update()
    assert changed(policy, trainer.actor_critic.policy)
    assert not any(changed(before, module) for module, before in frozen)
    assert abs(metrics["objective/kl"]) < 1e-3 and metrics["policy/ratio_max"] >= 1.0


def test_a_reference_that_is_not_the_sft_model_is_refused(trainer, gold_run):
    base = load_policy(gold_run.folder / "pretrain" / "model")
    trainer.reference = lambda *where: response_logprobs(base, *where)[0]
    assert_refused(trainer, 2)


def test_sampling_at_another_temperature_is_refused(trainer, monkeypatch):
    other = make_sampler(trainer.config, trainer.policy, trainer.tokenizer, temperature=0.7)
    monkeypatch.setattr(type(trainer), "sampler", other)
    assert_refused(trainer, 2)


def test_dropout_is_refused(trainer, gold_run, monkeypatch):
    trainer.policy = trainer.actor_critic.policy = load_policy(gold_run.folder / "sft" / "model", dropout=0.2)
    trainer.engine.recomputes = True  # which needs training mode
    assert_refused(trainer, 1)


@pytest.mark.parametrize("slots", [-1, 1])
def test_a_score_beside_the_last_token_is_refused(trainer, monkeypatch, slots):
    token_rewards = ppo.token_rewards
    monkeypatch.setattr(ppo, "token_rewards", lambda *a: token_rewards(*a).roll(slots, dims=1))
    assert_refused(trainer, 3)


@pytest.fixture
def half(trainer) -> Trainer:
    """In bfloat16; training forwards see batches of another shape than those of the rollout."""
    settings = trainer.config.ppo
    settings.episodes_per_update, settings.minibatches, settings.episodes = 64, 2, 64  # 32 and 16 rows per forward
    # As precision=bfloat16 does, which a process has from its beginning
    trainer.engine.bfloat16 = True
    return trainer


def off_by(trainer: Trainer, gap: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A reference whose log-probs are off by gap(mask), in nats per token."""
    right = trainer.reference
    trainer.reference = lambda tokens, starts, mask: right(tokens, starts, mask) + gap(mask) * mask


def test_a_right_first_update_in_bfloat16_passes(half):
    seen: list[list[Checked]] = []
    check = ppo_update.check_first_minibatch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_update, "check_first_minibatch", lambda *a: seen.append(a[0]) or check(*a))
        metrics = half.update()
    assert abs(metrics["objective/kl"]) < 1e-6, "policy and reference see the same batches"
    largest = torch.cat([part.log_ratios for part in seen[0]]).abs().max()
    # A processor without bfloat16 instructions rounds the same in batches of any shape.
    assert largest > TOLERANCE or largest == 0, "float32's bound would refuse it"
    assert not any(part.clipped for part in seen[0])


@pytest.mark.parametrize("gap", [
    lambda mask: torch.full(mask.shape, 0.1),
    lambda mask: torch.full(mask.shape, 0.4),
    lambda mask: 0.1 * (-1.0) ** torch.arange(mask.shape[1]).expand(mask.shape),  # whose KL is nearly 0
    lambda mask: torch.full(mask.shape, -0.008),  # whose KL is not, by 16 tokens and more
    lambda mask: 2.0 * (torch.arange(mask.numel()) == 0).view(mask.shape),
], ids=["0.1 a token", "0.4 a token", "either way", "a little on all", "much on one a batch"])  # fmt: skip
def test_a_reference_that_is_off_is_refused_in_bfloat16(half, gap):
    off_by(half, gap)
    assert_refused(half, 2)


@pytest.mark.parametrize(("gap", "refused"), [(5e-5, False), (2e-4, True)])
def test_in_float32_no_token_may_be_off(trainer, gap, refused):
    off_by(trainer, lambda mask: torch.full(mask.shape, gap))
    if refused:
        assert_refused(trainer, 2)
    else:
        trainer.update()


def test_after_the_critics_own_updates_it_is_the_policy_that_was_not_trained(copy_until, gold_run):
    settings = ["ppo.critic_warmup_updates=1", "ppo.episodes_per_update=32", "ppo.episodes=64"]
    with open_trainer(copy_until("ppo"), *settings) as trainer:
        trainer.update(1)
        policy = load_policy(gold_run.folder / "sft" / "model", dropout=0.2)
        trainer.policy = trainer.actor_critic.policy = policy
        trainer.engine.recomputes = True
        before = weights(policy)
        with pytest.raises(UserError, match=r"invariant 1 fails on the first update: .*: the policy was not trained"):
            trainer.update(2)
        assert not changed(before, policy)


def minibatch(largest: float, clipped: float = 0.0, spread: float = 3.0, tokens: int = 800) -> list[Checked]:
    """Log-probs of deviation `spread`, of which two are `largest` nats off and the others a hundredth of that."""
    logp_old = spread * torch.tensor([-1.0, 1.0]).repeat(tokens // 2)
    log_ratios = torch.full((tokens,), largest / 100)
    log_ratios[:2] = largest
    return [Checked(log_ratios, logp_old, torch.full((tokens,), 0.5), clipped)]


def test_rounding_in_bfloat16_may_be_larger_where_logits_are():
    """A token of SmolLM2-135M was 0.19 nats off by rounding alone, of log-probs with a standard deviation of 2.95."""
    vocabulary = 1000
    check_first_minibatch(minibatch(0.19), vocabulary, half=True)
    check_first_minibatch(minibatch(0.19, clipped=8.0), vocabulary, half=True)
    check_first_minibatch(minibatch(1.0, tokens=4000), vocabulary, half=True)  # 2 of 4000 tokens
    for batch, half, told in (
        (minibatch(0.19, spread=0.1), True, r"1.90e-01 at the 99.9% quantile, want 2.00e-03 and 3.00e-02 or less"),
        (minibatch(1.0), True, r"1.00e\+00 at the 99.9% quantile, want 6.00e-02 and 9.00e-01 or less"),
        (minibatch(1e-3), False, r"1.00e-03 nats on one token, want 1e-04 or less.*: the policy was not"),
        (minibatch(0.19, clipped=9.0), True, r"9 of 800 tokens are clipped .* up to 1.90e-01: ppo.clip_range"),
        (minibatch(0.0, clipped=1.0), False, r"1 of 800 tokens are clipped"),
    ):
        with pytest.raises(UserError, match=f"invariant 1 .* {told}"):
            check_first_minibatch(batch, vocabulary, half=half)

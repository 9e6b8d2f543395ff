"""Every metric of a PPO update as a value: recomputed in float64, by the oracles and forwards without padding.

One whole update is run and looked at from the outside; each `..._wanted` below computes a group of its metrics from the
rollout, the models and the judge. A metric that none of them computes fails the last test of that part.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlhf.data.chat_template import decode_response, response_text
from rlhf.engines.choosing import Samples
from rlhf.errors import UserError
from rlhf.gold.truth import judge
from rlhf.gold.world import Task
from rlhf.ppo import update as ppo_update
from rlhf.ppo.experience import Rollout, weigh_by_sampler
from rlhf.ppo.rewards import CombinedReward
from rlhf.runs.metric_table import METRICS, Sums
from rlhf.runs.stage import open_stage
from rlhf.stages import ppo
from tests import oracles

from .ppo_trainer import Trainer, make_trainer

EPISODES, HELD_OUT = 24, 7
SETTINGS = ["ppo.critic_warmup_updates=1", "ppo.warmup_fraction=0.9", f"ppo.episodes_per_update={EPISODES}",
            f"ppo.episodes={3 * EPISODES}", "ppo.minibatches=3", "ppo.epochs=2", "ppo.micro_batch_episodes=5",
            "kl.target=null", "kl.coef=0.3", "ppo.lr=0.05", "ppo.critic_lr=0.07", "ppo.clip_range=0.1",
            "ppo.value_coef=0.5", f"ppo.eval_prompts={HELD_OUT}", "ppo.max_grad_norm=0.001", "ppo.ptx_coef=0.5",
            "ppo.ptx_blocks_per_episode=0.375"]  # fmt: skip
# What no computation can foretell: seconds and memory. Each metric here is tested for its sign alone.
UNTESTED = {"time/rollout_s", "time/score_s", "time/update_s", "memory/peak_rss_mb"}
LENGTH_WEIGHT = 0.1  # of a second source of reward beside the reward model: the response's tokens


@dataclass
class Seen:
    """What an update logs, and all that its metrics follow from."""

    trainer: Trainer
    logged: dict[str, float] = field(default_factory=dict)
    rollouts: list[Rollout] = field(default_factory=list)  # of the update, and of the held-out prompts
    records: list[list[Any]] = field(default_factory=list)  # their prompts
    lengths: list[np.ndarray] = field(default_factory=list)  # of the responses as the reward saw them
    chosen: list[list[int]] = field(default_factory=list)  # the episodes of each minibatch
    blocks: list[list[int]] = field(default_factory=list)  # the pretraining blocks of each minibatch
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the samples table


def cut(samples: Samples) -> Samples:
    """Responses of unequal lengths, two thirds of which count as ended."""
    count = len(samples.responses)
    responses = [ids[: 2 + i % 20] for i, ids in enumerate(samples.responses)]
    mask = torch.arange(samples.mask.shape[1]) < torch.tensor([len(ids) for ids in responses])[:, None]
    return Samples(responses, torch.where(mask, samples.logprobs, 0.0), mask, torch.arange(count) % 3 > 0)


def disturbed(rollout: Rollout, seed: int) -> Rollout:
    """Log-probs, values and reference that are off, so that no metric is 0 or 1."""
    mask, generator = rollout.response_mask, torch.Generator().manual_seed(seed)

    def off(x: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.where(mask, x + torch.randn(mask.shape, generator=generator) * scale, 0.0)

    return rollout._replace(
        logp_old=off(rollout.logp_old, 0.2), logp_ref=off(rollout.logp_ref, 0.3), values=off(rollout.values, 0.4)
    )


@pytest.fixture(scope="module")
def trainer(gold_run, tmp_path_factory):
    """The weights do not move: what is measured in any minibatch is measured of the same models."""
    run = gold_run.copy(tmp_path_factory.mktemp("metrics"), "ppo", "copy")
    config = run.config(*SETTINGS)
    with open_stage(config, "ppo") as stage:
        trainer = make_trainer(config, stage)
        config.pretrain.micro_batch_sequences = 2  # of the 3 blocks of a minibatch
        trainer.engine.optimizer.step = lambda: None
        yield trainer


@pytest.fixture(scope="module")
def seen(trainer) -> Seen:
    """The third update, the policy's second, on disturbed rollouts with two reward sources."""
    found = Seen(trainer)
    sample, score, train, draw = (
        ppo.sample_responses, ppo.score_responses, ppo_update.train_minibatch, trainer.prompts.blocks.draw,
    )  # fmt: skip

    def sample_cut(engine, sampler, tokenizer, *asked):
        samples = cut(sample(engine, sampler, tokenizer, *asked)[0])
        return samples, [response_text(tokenizer, ids) for ids in samples.responses]

    def count_tokens(episodes):
        found.lengths.append(np.array([len(response) for response in episodes.responses]))
        return torch.tensor([float(len(response)) for response in episodes.responses])

    def score_disturbed(config, engine, reference, reward, tokenizer, prompts, *sampled):
        found.records.append([record for record, _ in prompts])
        rollout = score(config, engine, reference, reward, tokenizer, prompts, *sampled)
        found.rollouts.append(disturbed(rollout, seed=len(found.rollouts)))
        return found.rollouts[-1]

    def train_watched(config, experience, chosen, *rest, **named):
        found.chosen.append(chosen)
        return train(config, experience, chosen, *rest, **named)

    def draw_watched(key, count):
        found.blocks.append(draw(key, count))
        return found.blocks[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "sample_responses", sample_cut)
        patch.setattr(ppo, "score_responses", score_disturbed)
        patch.setattr(ppo_update, "train_minibatch", train_watched)
        patch.setattr(trainer.prompts.blocks, "draw", draw_watched)
        watching = lambda episodes: torch.zeros(len(episodes.records))  # noqa: E731
        sources = {"model_0": trainer.reward, "function_1": count_tokens, "model_2": watching}
        patch.setattr(trainer, "reward", CombinedReward(sources, [1.0, LENGTH_WEIGHT, 0.0]))
        found.logged = trainer.update(3)
        held_out, found.rows = trainer.evaluate()
        found.logged |= held_out
    return found


def forward_alone(trainer: Trainer, tokens: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (A, V) and values (A,) in float64 before each response token of one row, without padding."""
    policy, critic = trainer.actor_critic.policy, trainer.actor_critic.critic
    row, before = tokens[None, :end], slice(start - 1, end - 1)
    return policy(row).logits[0, before].double(), oracles.token_values(critic, row)[0, before].double()


@torch.no_grad()
def evaluated(trainer: Trainer, rollout: Rollout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs, entropies and values (B, A) in float64, one row at a time."""
    found = [np.zeros(rollout.response_mask.shape) for _ in range(3)]
    for row, tokens in enumerate(rollout.tokens):
        start, end = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
        logits, values = forward_alone(trainer, tokens, start, end)
        found[0][row, : end - start] = oracles.token_logprobs(logits.numpy(), tokens[start:end].numpy())
        found[1][row, : end - start] = oracles.entropy(logits.numpy())
        found[2][row, : end - start] = values.numpy()
    return found[0], found[1], found[2]


def paid(rollout: Rollout) -> np.ndarray:
    """(B,) the score, at most -1 where there is no end token."""
    scores = rollout.scores.double().numpy()
    return np.where(rollout.ended.numpy(), scores, np.minimum(scores, -1.0))


def learned_from(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Whitened advantages and returns (B, A)."""
    mask, values = rollout.response_mask.numpy(), rollout.values.double().numpy()
    rewards = oracles.token_rewards(paid(rollout), rollout.logp_old.numpy(), rollout.logp_ref.numpy(), mask, 0.3)
    advantages, returns = oracles.gae(rewards, values, mask, gamma=1.0, lam=0.95)
    return oracles.whiten(advantages, mask), returns


def sequence_sums(x: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    return np.where(mask.numpy(), x.double().numpy(), 0.0).sum(1)


def judged(trainer: Trainer, records: list[Any], rollout: Rollout, name: str) -> dict[str, float]:
    """The mean of each part of the judge's view over the responses, called name + part."""
    views = []
    for row, record in enumerate(records):
        response = rollout.tokens[row, int(rollout.prompt_lengths[row]) : int(rollout.lengths[row])].tolist()
        text = decode_response(trainer.tokenizer, response).strip()
        views.append(judge(Task(**record.metadata["gold"]), text, ended=bool(rollout.ended[row])))
    return {name + part: float(np.mean([view[part] for view in views])) for part in views[0]}


def norm(module: nn.Module) -> float:
    return math.sqrt(sum(float(np.square(p.grad.double().numpy()).sum()) for p in module.parameters()))


def rollout_wanted(seen: Seen) -> dict[str, float]:
    rollout, mask = seen.rollouts[0], seen.rollouts[0].response_mask
    d = np.where(mask.numpy(), (rollout.logp_old.double() - rollout.logp_ref.double()).numpy(), 0.0)
    kl, score, lengths = d.sum(1).mean(), paid(rollout).mean(), seen.lengths[0]
    learned = rollout.scores.double().numpy() - LENGTH_WEIGHT * lengths
    _, returns = learned_from(rollout)
    return {
        "objective/kl": kl, "objective/kl_k3": np.where(mask.numpy(), np.exp(-d) - 1 + d, 0.0).sum(1).mean(),
        "objective/kl_coef": 0.3, "objective/scores": score,
        "objective/scores/model_0": learned.mean(), "objective/scores/model_2": 0.0,
        "objective/scores_std": np.stack((learned, 0 * learned)).std(0, ddof=1).mean(),
        "objective/scores/function_1": lengths.mean(), "objective/non_score_reward": -0.3 * kl,
        "objective/rlhf_reward": score - 0.3 * kl, "objective/entropy": -sequence_sums(rollout.logp_old, mask).mean(),
        "rollout/eos_fraction": 16 / 24, "rollout/response_len": mask.numpy().sum(1).mean(),
        "val/explained_var": oracles.explained_variance(rollout.values.numpy(), returns, mask.numpy()),
    } | judged(seen.trainer, seen.records[0], rollout, "gold/")  # fmt: skip


def update_wanted(seen: Seen) -> dict[str, float]:
    rollout, mask = seen.rollouts[0], seen.rollouts[0].response_mask.numpy()
    advantages, returns = learned_from(rollout)
    logp, entropies, values = evaluated(seen.trainer, rollout)
    loss, figures = oracles.policy_loss(logp, rollout.logp_old.numpy(), advantages, mask, 0.1)
    value, value_figures = oracles.value_loss(values, rollout.values.numpy(), returns, mask, 0.2)
    assert 0.05 < figures["clipfrac"] < 0.95 and 0.05 < value_figures["clipfrac"] < 0.95
    return {
        "loss/policy_avg": loss, "policy/approxkl_avg": figures["approxkl"], "policy/clipfrac_avg": figures["clipfrac"],
        "policy/ratio_max": figures["ratio_max"], "policy/entropy_avg": entropies[mask].mean(),
        "loss/value_avg": value, "val/clipfrac_avg": value_figures["clipfrac"],
        # 1 update of the policy is done and 2 of the critic, of 3 from a tenth
        "optim/lr": 0.05 * (0.1 + 0.9 * 1 / 3), "optim/critic_lr": 0.07 * (0.1 + 0.9 * 2 / 3), "optim/steps": 6,
    }  # fmt: skip


def gradients_wanted(seen: Seen) -> dict[str, float]:
    """Of the last minibatch, whose losses are written out over single rows."""
    trainer, rollout, chosen = seen.trainer, seen.rollouts[0], seen.chosen[-1]
    policy, critic = trainer.actor_critic.policy, trainer.actor_critic.critic
    advantages, returns = (torch.from_numpy(x) for x in learned_from(rollout))
    for module in (policy, critic):
        module.zero_grad()
    N = int(rollout.response_mask[chosen].sum())
    for row in chosen:
        start, end = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
        tokens, size = rollout.tokens[row], end - start
        logits, V = forward_alone(trainer, tokens, start, end)
        rho = (logits.log_softmax(-1)[torch.arange(size), tokens[start:end]] - rollout.logp_old[row, :size]).exp()
        A, R, V_old = advantages[row, :size], returns[row, :size], rollout.values[row, :size]
        clipped = torch.maximum(torch.minimum(V, V_old + 0.2), V_old - 0.2)
        surrogate = torch.maximum(-A * rho, -A * rho.clamp(0.9, 1.1)).sum() / N
        value = 0.5 * torch.maximum((V - R) ** 2, (clipped - R) ** 2).sum() / N
        (surrogate + 0.5 * value).backward()
    rl, of_critic = norm(policy), norm(critic)
    ours = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    (0.5 * torch.cat([-block_logprobs(seen, [block]) for block in seen.blocks[-1]]).mean()).backward()
    ptx = norm(policy)
    for p, gradient in zip(policy.parameters(), ours, strict=True):
        p.grad += gradient
    both = norm(policy)
    trainer.engine.optimizer.zero_grad()
    assert min(both, of_critic, rl, ptx) > 0.01, "ppo.max_grad_norm cuts all of them"
    return {
        "optim/rl_grad_norm": rl, "optim/ptx_grad_norm": ptx, "optim/policy_grad_norm": both,
        "optim/critic_grad_norm": of_critic, "optim/grad_norm": math.hypot(both, of_critic),
    }  # fmt: skip


def block_logprobs(seen: Seen, index: list[int]) -> torch.Tensor:
    """(blocks * (T - 1),) log-probs of the tokens of pretraining blocks, in float64."""
    blocks = seen.trainer.prompts.blocks
    batch = blocks.collate([blocks.blocks[i] for i in index])
    labels = batch.pop("labels")[:, 1:, None]
    logits = seen.trainer.actor_critic.policy(**batch, use_cache=False).logits[:, :-1]
    return logits.double().log_softmax(-1).gather(-1, labels).flatten()


@torch.no_grad()
def pretraining_wanted(seen: Seen) -> dict[str, float]:
    assert [len(drawn) for drawn in seen.blocks] == [3] * 6  # .375 blocks for each of 8 episodes
    logp = [block_logprobs(seen, [block]).numpy() for drawn in seen.blocks for block in drawn]
    return {"loss/ptx_avg": -np.concatenate(logp).mean()}


def held_out_wanted(seen: Seen) -> dict[str, float]:
    rollout, mask = seen.rollouts[1], seen.rollouts[1].response_mask
    return {
        "eval/dev/scores": paid(rollout).mean(),
        "eval/dev/kl": (sequence_sums(rollout.logp_old, mask) - sequence_sums(rollout.logp_ref, mask)).mean(),
        "eval/dev/entropy": -sequence_sums(rollout.logp_old, mask).mean(),
        "eval/dev/eos_fraction": 4 / 7,
        "eval/dev/response_len": mask.numpy().sum(1).mean(),
    } | judged(seen.trainer, seen.records[1], rollout, "eval/dev/gold/")


def throughput_wanted(seen: Seen) -> dict[str, float]:
    tokens, spent = int(seen.rollouts[0].response_mask.sum()), seen.logged
    seconds = spent["time/rollout_s"] + spent["time/score_s"] + spent["time/update_s"]
    return {
        "rollout/tokens_per_s": tokens / spent["time/rollout_s"],
        "time/tokens_per_s": tokens / seconds,
        "time/samples_per_s": EPISODES / seconds,
    }


WANTED: list[Callable[[Seen], dict[str, float]]] = [
    rollout_wanted, update_wanted, gradients_wanted, pretraining_wanted, held_out_wanted, throughput_wanted,
]  # fmt: skip


@pytest.mark.parametrize("wanted", WANTED, ids=[function.__name__ for function in WANTED])
def test_metrics_are_what_the_rollouts_and_the_models_say(seen, wanted):
    for name, number in wanted(seen).items():
        assert seen.logged[name] == pytest.approx(number, rel=1e-4, abs=1e-6), name


def mismatch_wanted(rollout: Rollout) -> dict[str, float]:
    """The mismatch of a rollout whose logp_old has normal noise of 0.2."""
    gaps = (rollout.logp_old.double() - rollout.logp_sampled.double())[rollout.response_mask].numpy()
    ratios = np.exp(gaps)
    return {
        "rollout/mismatch": np.abs(gaps).mean(),
        "rollout/mismatch_p99": np.quantile(np.abs(gaps), 0.99, method="inverted_cdf"),
        "rollout/mismatch_outside": ((ratios < 0.8) | (ratios > 1.25)).mean(),
        "rollout/mismatch_ess": ratios.sum() ** 2 / (ratios**2).sum() / len(ratios),
        "rollout/corrected": (ratios != 1).mean(),
    }


def test_the_mismatch_of_sampler_and_trainer(seen):
    """By default it is corrected, since it is above 0.01 nats: by the ratio, at most 2."""
    rollout, sums = seen.rollouts[0], Sums()
    weights = weigh_by_sampler(seen.trainer.config, rollout, seen.trainer.engine.ranks, sums)
    for name, number in mismatch_wanted(rollout).items():
        assert sums.reduce()[name] == pytest.approx(number, rel=1e-4), name
    ratios = (rollout.logp_old - rollout.logp_sampled).exp().clamp(max=2.0)
    torch.testing.assert_close(weights, torch.where(rollout.response_mask, ratios, 0.0))
    alike = rollout._replace(logp_old=rollout.logp_sampled)
    weights = weigh_by_sampler(seen.trainer.config, alike, seen.trainer.engine.ranks, Sums())
    assert torch.equal(weights > 0, rollout.response_mask)


def test_every_metric_that_an_update_logs_is_tested_as_a_value(seen):
    tested = {name for wanted in WANTED for name in wanted(seen)}
    assert seen.logged.keys() - tested == UNTESTED
    assert all(seen.logged[name] > 0 for name in UNTESTED)
    families = ("objective/", "policy/", "loss/", "val/", "rollout/", "optim/critic_", "optim/policy_", "time/rollout_s",
                "time/score_s", "time/update_s", "optim/steps", "optim/rl_", "optim/ptx_")  # fmt: skip
    table = {metric.name for metric in METRICS if metric.name.startswith(families) and "<" not in metric.name}
    table -= mismatch_wanted(seen.rollouts[0]).keys()  # logged if the sampler's log-probs are not the policy's
    absent = table - seen.logged.keys()
    assert absent == {"objective/sqrt_kl", "rollout/dropped"}  # of the tracker and of ppo.drop_tied_groups


def test_rows_of_the_samples_table_are_those_of_the_held_out_prompts(seen):
    rollout, rows = seen.rollouts[1], seen.rows
    assert len(rows) == HELD_OUT
    assert [row["id"] for row in rows] == [record.id for record, _ in seen.trainer.prompts.held_out]
    kl = sequence_sums(rollout.logp_old, rollout.response_mask) - sequence_sums(rollout.logp_ref, rollout.response_mask)
    for i, row in enumerate(rows):
        assert row["length"] == int(rollout.response_mask[i].sum())
        assert row["kl"] == pytest.approx(kl[i], abs=1e-5) and row["score"] == pytest.approx(paid(rollout)[i], abs=1e-5)


def test_held_out_prompts_are_answered_the_same_way_every_time(trainer):
    (first, _), (again, _) = trainer.evaluate(), trainer.evaluate()
    assert first.keys() >= {"eval/dev/scores", "eval/dev/kl"} and again == first


def test_an_entropy_outside_its_bounds_is_refused():
    none_off = torch.zeros(2)
    for entropies, refused in (([0.1, 2.0], False), ([-0.01, 2.0], True), ([0.1, math.log(10) + 0.01], True)):
        minibatch = [ppo_update.Checked(none_off, none_off, torch.tensor(entropies), clipped=0.0)]
        with pytest.raises(UserError, match="invariant 7 fails") if refused else nullcontext():
            ppo_update.check_first_minibatch(minibatch, vocab_size=10, half=False)

"""PPO's fifth step: `epochs` passes over one rollout in minibatches, with one optimizer step each.

A minibatch is the same set of episodes on any number of ranks; each rank has a part of it, split into micro-batches.
A micro-batch's loss is a sum divided by the minibatch's global number of response tokens, so neither split changes a
loss or a gradient.
"""

import math
import random

import torch
from torch import Tensor, nn

from rlhf.config import PpoConfig
from rlhf.model.batching import by_length
from rlhf.ops.kl import kl_estimate
from rlhf.ops.ppo import policy_loss, value_loss
from rlhf.ppo.invariants import Checked, check_first_minibatch
from rlhf.ppo.rollout import Experience, Rollout
from rlhf.ppo.setup import PpoRun
from rlhf.runs.metrics import Sums
from rlhf.system.processes import gather
from rlhf.training.engine import ZeroEngine
from rlhf.training.loop import gradient_norm, refuse_nonfinite


def optimize(run: PpoRun, update: int, experience: Experience, episodes: list[int], sums: Sums) -> None:
    """All minibatches of one update. `episodes`: the numbers of this rank's episodes among those of all ranks."""
    config = run.config.ppo
    first_of_policy = 1 + config.critic_warmup_updates
    with_policy = update >= first_of_policy
    factors = {"policy": rate_factor(config, update, first_of_policy), "critic": rate_factor(config, update, 1)}
    # Dropout is 0 everywhere, so training mode only enables gradient checkpointing.
    run.engine.module.train(run.config.gradient_checkpointing)
    row_of = {episode: row for row, episode in enumerate(episodes)}
    size = config.episodes_per_update // config.minibatches
    for epoch in range(config.epochs):
        order = shuffled_prompts(config, random.Random(f"minibatch-{run.config.seed}-{update}-{epoch}"))
        for number in range(config.minibatches):
            chosen = [row_of[e] for e in order[number * size : (number + 1) * size] if e in row_of]
            key = (update, epoch, number)
            train_minibatch(run, experience, chosen, sums, with_policy, check=key == (first_of_policy, 0, 0), key=key)
            step(run, factors, with_policy, sums)
    sums.add("optim/steps", config.epochs * config.minibatches)
    sums.add("optim/lr", config.lr * factors["policy"] if with_policy else 0.0)
    if run.actor_critic.critic is not None:
        sums.add("optim/critic_lr", config.critic_lr * factors["critic"])


def shuffled_prompts(config: PpoConfig, rng: random.Random) -> list[int]:
    """The episodes of one update, prompts in random order. Responses to one prompt stay together: they share its cost."""
    k = config.responses_per_prompt
    prompts = list(range(config.episodes_per_update // k))
    rng.shuffle(prompts)
    return [prompt * k + i for prompt in prompts for i in range(k)]


def rate_factor(config: PpoConfig, update: int, first: int) -> float:
    """Factor on a model's learning rate at an update, from 1 on; `first`: the first update in which it trains.

    It rises from 0.1 to 1 over warmup_updates, times a line from 1 at the first update that would reach final_lr_fraction after the last.
    """
    done, updates = max(0, update - first), config.episodes // config.episodes_per_update
    warm = min(1.0, 0.1 + 0.9 * done / config.warmup_updates) if config.warmup_updates else 1.0
    return warm * (1.0 - (1.0 - config.final_lr_fraction) * (update - 1) / updates)


def step(run: PpoRun, factors: dict[str, float], with_policy: bool, sums: Sums) -> None:
    """One optimizer step, with each model's learning rate times its factor."""
    rates = {"policy": run.config.ppo.lr, "critic": run.config.ppo.critic_lr}
    engine = run.engine
    engine.step([rates[name] * factors[name] for name in run.actor_critic.parts()])
    if isinstance(engine, ZeroEngine):
        norm = engine.gradient_norm()
        refuse_nonfinite(run.stage, {"optim/grad_norm": norm}, {})
        sums.add("optim/grad_norm", norm)
        if not with_policy:  # its steps had no gradient; without ZeRO, AdamW skips such parameters
            engine.whole_state.set_steps({0: 0.0})
    if run.ema is not None and with_policy:
        run.ema.update()


def train_minibatch(
    run: PpoRun,
    experience: Experience,
    chosen: list[int],
    sums: Sums,
    with_policy: bool = True,
    *,
    check: bool = False,
    key: tuple = (),
) -> None:
    """Gradients of one minibatch. chosen: this rank's rows of it. check: whether it is the policy's first. key: of the
    pretraining blocks that are drawn with it.
    """
    config, model, ranks = run.config.ppo, run.actor_critic, run.ranks
    tokens = int(ranks.sum(experience.rollout.response_mask[chosen].sum()))  # N
    checked: list[Checked] | None = [] if check else None
    for group in by_length_on_all_ranks(run, experience.rollout, chosen):
        # a rank with fewer micro-batches adds one whose tokens do not count
        part = experience.rows(group) if group else experience.rows([0]).without_tokens()
        for models in models_at_once(run, with_policy):
            loss = micro_batch_loss(run, part, tokens, models, sums, checked)
            refuse_nonfinite(run.stage, {"loss": loss}, part.rollout._asdict())
            run.engine.backward(loss)
    # During the critic's warm-up the policy has no gradient; it must have none on several ranks too.
    run.engine.reduce(list((model if with_policy or model.critic is None else model.critic).parameters()))
    if checked is not None:
        parts = [part for of_rank in gather(checked) for part in of_rank]
        check_first_minibatch(parts, model.policy.config.vocab_size, run.engine.bfloat16)
    if run.blocks is not None and with_policy:
        add_pretraining_gradient(run, key, sums)
    if not run.engine.sharded:  # ZeRO computes and clips the joint norm of both models in its step
        norms = {name: gradient_norm(module.parameters()) for name, module in model.parts().items()}
        sums.add("optim/grad_norm", torch.stack(list(norms.values())).norm().item())
        refuse_nonfinite(run.stage, norms, experience.rollout.rows(chosen or [0])._asdict())
        for name, module in model.parts().items():
            sums.add(f"optim/{name}_grad_norm", norms[name].item())
            nn.utils.clip_grad_norm_(module.parameters(), config.max_grad_norm)


def models_at_once(run: PpoRun, with_policy: bool) -> list[dict[str, bool]]:
    """What `ActorCritic.evaluate` is asked for, in turn: critic and policy one after the other, so that memory holds the
    activations of one; together if they share a trunk that trains, and under ZeRO: DeepSpeed's first backward of a step
    overwrites gradients, and all others add to them.
    """
    if run.actor_critic.critic is None or run.actor_critic.shared or not with_policy or run.engine.sharded:
        return [{"with_policy": with_policy}]
    return [{"with_policy": False}, {"with_values": False}]


def by_length_on_all_ranks(run: PpoRun, rollout: Rollout, chosen: list[int]) -> list[list[int]]:
    """Micro-batches of similar length, the same number on every rank; empty ones on ranks that have fewer."""
    groups = [
        [chosen[i] for i in group]
        for group in by_length(rollout.lengths[chosen].tolist(), run.config.ppo.micro_batch_episodes)
    ]
    return groups + [[]] * (int(run.ranks.max(len(groups))) - len(groups))


def micro_batch_loss(
    run: PpoRun, part: Experience, tokens: int, models: dict[str, bool], sums: Sums, checked: list[Checked] | None
) -> Tensor:
    """The loss of one micro-batch, divided by the minibatch's N = `tokens`; its metrics are added to `sums`."""
    config, rollout, mask = run.config.ppo, part.rollout, part.rollout.response_mask
    count = int(mask.sum())
    logp, entropies, values = run.engine(
        rollout.tokens,
        rollout.prompt_lengths,
        mask,
        **models,
        entropy_gradient=config.entropy_coef > 0,
    )
    loss = torch.zeros((), device=mask.device)
    if values is not None:
        critic_loss, statistics = value_loss(
            values,
            rollout.values,
            part.returns,
            mask,
            clip_range=config.value_clip_range,
            denominator=tokens,
        )
        loss = run.value_coef * critic_loss
        sums.add("loss/value_avg", float(statistics["loss"]) * tokens, count)
        sums.add("val/clipfrac_avg", float(statistics["clipfrac"]) * tokens, count)
    if logp is not None:
        surrogate, statistics = policy_loss(
            logp,
            rollout.logp_old,
            part.advantages,
            mask,
            clip_range=config.clip_range or math.inf,
            denominator=tokens,
        )
        loss = loss + surrogate
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropies.sum() / tokens
        if run.config.kl.penalty == "loss":
            k3 = torch.where(mask, kl_estimate(logp, rollout.logp_ref, kind="k3"), 0.0).sum() / tokens
            loss = loss + run.kl.coef * k3
        sums.add("loss/policy_avg", float(statistics["loss"]) * tokens, count)
        sums.add("policy/approxkl_avg", float(statistics["approxkl"]) * tokens, count)
        sums.add("policy/clipfrac_avg", float(statistics["clipfrac"]) * tokens, count)
        sums.add("policy/ratio_max", float(statistics["ratio_max"]))
        sums.add("policy/entropy_avg", float(entropies.detach().sum()), count)
        if checked is not None and count:
            logp_old, clipped = rollout.logp_old[mask], float(statistics["clipfrac"]) * tokens
            gaps = logp.detach()[mask] - logp_old
            checked.append(Checked(gaps.cpu(), logp_old.cpu(), entropies.detach()[mask].cpu(), clipped))
    return loss


def add_pretraining_gradient(run: PpoRun, key: tuple, sums: Sums) -> None:
    """PPO-ptx: add ptx_coef times the gradient of the pretraining loss to the policy's, and log both norms.

    ZeRO accumulates gradients as they arrive, so the two norms are not logged under ZeRO.
    """
    config, ranks, engine, blocks = run.config.ppo, run.ranks, run.engine, run.blocks
    assert blocks is not None
    parameters = [p for p in run.actor_critic.policy.parameters() if p.requires_grad]
    rl_gradients = [p.grad for p in parameters]
    if not engine.sharded:
        sums.add("optim/rl_grad_norm", gradient_norm(parameters).item())
        for p in parameters:
            p.grad = None
    episodes = config.episodes_per_update // config.minibatches
    drawn = blocks.draw(key, max(1, round(config.ptx_blocks_per_episode * episodes)))
    width = blocks.blocks[0]["input_ids"].shape[0]
    tokens = len(drawn) * (width - 1)
    of_rank = drawn[ranks.rank :: ranks.count]
    size = run.config.pretrain.micro_batch_sequences
    for start in range(0, -(-len(drawn) // ranks.count), size):
        counted = of_rank[start : start + size]
        # a rank without blocks left computes one that does not count
        batch = blocks.batch(counted or drawn[:1], run.device)
        loss = engine(batch, tokens, method="pretraining_loss") * bool(counted)
        refuse_nonfinite(run.stage, {"loss/ptx_avg": loss}, batch)
        engine.backward(config.ptx_coef * loss)
        sums.add("loss/ptx_avg", loss.item() * tokens, len(counted) * (width - 1))
    if engine.sharded:
        return
    engine.reduce(parameters)
    sums.add("optim/ptx_grad_norm", gradient_norm(parameters).item())
    for p, gradient in zip(parameters, rl_gradients, strict=True):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad + gradient

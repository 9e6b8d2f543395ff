"""PPO's fifth step: `epochs` passes over one rollout in minibatches, with one optimizer step each.

A minibatch is the same set of episodes on any number of ranks; each rank has a part of it, split into micro-batches.
A micro-batch's loss is a sum divided by the minibatch's global number of response tokens, so neither split changes a
loss or a gradient.
"""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.config.stages import PpoConfig
from rlhf.model.batching import by_length
from rlhf.ops.kl import FixedKL, kl_loss
from rlhf.ops.masked import wide
from rlhf.ops.ppo import policy_loss, value_loss
from rlhf.ppo.experience import Experience, PretrainingBlocks
from rlhf.ppo.invariants import Checked, check_first_minibatch
from rlhf.runs.metric_table import Sums
from rlhf.system.processes import gather
from rlhf.training.engine import Engine
from rlhf.training.optim import fallen

SHARED_VALUE_COEF = 0.1


@dataclass(slots=True)
class State:
    """What an update changes; checkpoints contain it."""

    engine: Engine  # policy and critic with their optimizer; the average of the policy's weights
    kl: FixedKL
    tokens: int = 0  # response tokens sampled so far


def optimize(
    config: Config,
    update: int,
    experience: Experience,
    episodes: list[int],
    state: State,
    blocks: PretrainingBlocks | None,
    sums: Sums,
) -> None:
    """All minibatches of one update. `episodes`: the numbers of this rank's episodes among those of all ranks."""
    settings, first_of_policy = config.ppo, 1 + config.ppo.critic_warmup_updates
    with_policy = update >= first_of_policy
    firsts = {"critic": 1} if state.engine.module.critic is not None else {}
    firsts |= {"policy": first_of_policy} if with_policy else {}
    factors = {name: rate_factor(settings, update, first) for name, first in firsts.items()}
    # Dropout is 0 everywhere, so training mode only enables gradient checkpointing.
    state.engine.module.train(state.engine.recomputes)
    dropped = tied_rows(settings, experience.scores) if settings.drop_tied_groups else []
    row_of = {episode: row for row, episode in enumerate(episodes) if row not in dropped}
    if settings.drop_tied_groups:
        sums.add("rollout/dropped", len(dropped), len(episodes))
    size = settings.episodes_per_update // settings.minibatches
    for epoch in range(settings.epochs):
        # prompts in random order; responses to one prompt stay together, since they share its cost
        k = settings.responses_per_prompt
        prompts = list(range(settings.episodes_per_update // k))
        random.Random(f"minibatch-{config.seed}-{update}-{epoch}").shuffle(prompts)
        order = [prompt * k + i for prompt in prompts for i in range(k)]
        for number in range(settings.minibatches):
            chosen = [row_of[e] for e in order[number * size : (number + 1) * size] if e in row_of]
            check = (update, epoch, number) == (first_of_policy, 0, 0)
            train_minibatch(config, experience, chosen, state, sums, with_policy=with_policy, check=check)
            if blocks is not None and with_policy:
                add_pretraining_gradient(config, state, blocks, (update, epoch, number), sums)
            for name, norm in state.engine.step(factors).items():
                sums.add(name, norm)
    sums.add("optim/steps", settings.epochs * settings.minibatches)
    sums.add("optim/lr", settings.lr * factors.get("policy", 0.0))
    if "critic" in factors:
        sums.add("optim/critic_lr", settings.critic_lr * factors["critic"])


def tied_rows(config: PpoConfig, scores: Tensor) -> set[int]:
    """The rows whose prompt's responses all have one score. Source: Yu et al. 2025 (DAPO), section 3.2, without sampling others."""
    low, high = scores.view(-1, config.responses_per_prompt).aminmax(dim=1)
    return {*(low == high).repeat_interleave(config.responses_per_prompt).nonzero().flatten().tolist()}


def rate_factor(config: PpoConfig, update: int, first: int) -> float:
    """Factor on a model's learning rate at an update, from 1 on; `first`: the first update in which it trains.

    It rises from 0.1 to 1 over warmup_updates, times the schedule from 1 at the first update to final_lr_fraction after the last.
    """
    done, updates = max(0, update - first), config.episodes // config.episodes_per_update
    warm = min(1.0, 0.1 + 0.9 * done / config.warmup_updates) if config.warmup_updates else 1.0
    return warm * fallen(config, update - 1, updates)


def train_minibatch(
    config: Config,
    experience: Experience,
    chosen: list[int],
    state: State,
    sums: Sums,
    *,
    with_policy: bool = True,
    check: bool = False,
) -> None:
    """Add up the gradients of one minibatch; `optimize` takes the step.

    chosen: this rank's rows of it. check: whether it is the policy's first.
    """
    engine, rollout = state.engine, experience.rollout
    model = engine.module
    tokens = max(1, int(engine.ranks.sum(rollout.response_mask[chosen].sum())))  # N
    alike = by_length(rollout.lengths[chosen].tolist(), config.ppo.micro_batch_episodes, engine.most_tokens)
    groups = [[chosen[i] for i in group] for group in alike]
    # Critic and policy one after the other, so that memory holds the activations of one; together if they share a trunk that
    # trains, and under ZeRO: DeepSpeed's first backward of a step overwrites gradients, and all others add to them.
    if model.critic is None or model.shared or not with_policy or engine.sharded:
        passes = [{"with_policy": with_policy}]
    else:
        passes = [{"with_policy": False}, {"with_values": False}]
    checked: list[Checked] | None = [] if check else None
    for number in range(max(1, int(engine.ranks.max(len(groups))))):
        # a rank with fewer micro-batches adds ones whose tokens do not count
        part = experience.rows(groups[number]) if number < len(groups) else experience.rows([0]).without_tokens()
        for models in passes:
            loss = micro_batch_loss(config, part, tokens, models, state, sums, checked)
            engine.backward(loss, part.rollout._asdict())
    if checked is not None:
        found = [part for of_rank in gather(checked) for part in of_rank]
        if found:
            check_first_minibatch(found, model.policy.config.vocab_size, engine.bfloat16)


def micro_batch_loss(
    config: Config,
    part: Experience,
    tokens: int,
    models: dict[str, bool],
    state: State,
    sums: Sums,
    checked: list[Checked] | None,
) -> Tensor:
    """The loss of one micro-batch, divided by the minibatch's N = `tokens`; its metrics are added to `sums`.

    models: which of them run, arguments of `ActorCritic.evaluate`.
    """
    settings, rollout, mask = config.ppo, part.rollout, part.rollout.response_mask
    count = mask.sum()
    logp, entropies, values = state.engine(
        rollout.tokens, rollout.prompt_lengths, mask, **models, entropy_gradient=settings.entropy_coef > 0
    )
    loss = torch.zeros((), device=mask.device)
    if values is not None:
        clip_range = settings.value_clip_range or math.inf
        critic_loss, statistics = value_loss(values, rollout.values, part.returns, mask, clip_range, tokens)
        default = SHARED_VALUE_COEF if settings.shared_critic else 1.0
        loss = (default if settings.value_coef is None else settings.value_coef) * critic_loss
        sums.add("loss/value_avg", wide(statistics["loss"]) * tokens, count)
        sums.add("val/clipfrac_avg", wide(statistics["clipfrac"]) * tokens, count)
    if logp is not None:
        clip_range = settings.clip_range or math.inf
        surrogate, statistics = policy_loss(
            logp, rollout.logp_old, part.advantages, mask, clip_range, tokens, settings.clip_range_high
        )
        loss = loss + surrogate
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * entropies.sum() / tokens
        if config.kl_in_loss:
            penalty = kl_loss(logp, rollout.logp_old, rollout.logp_ref, mask, denominator=tokens)
            loss = loss + state.kl.coef * penalty
        sums.add("loss/policy_avg", wide(statistics["loss"]) * tokens, count)
        sums.add("policy/approxkl_avg", wide(statistics["approxkl"]) * tokens, count)
        sums.add("policy/clipfrac_avg", wide(statistics["clipfrac"]) * tokens, count)
        sums.add("policy/ratio_max", statistics["ratio_max"])
        sums.add("policy/entropy_avg", entropies.detach().sum(), count)
        if checked is not None and count:
            logp_old, clipped = rollout.logp_old[mask], float(statistics["clipfrac"]) * tokens
            gaps = logp.detach()[mask] - logp_old
            checked.append(Checked(gaps.cpu(), logp_old.cpu(), entropies.detach()[mask].cpu(), clipped))
    return loss


def add_pretraining_gradient(config: Config, state: State, blocks: PretrainingBlocks, key: tuple, sums: Sums) -> None:
    """PPO-ptx: add ptx_coef times the gradient of the pretraining loss to the policy's, and log both norms.

    key: of the blocks that are drawn. ZeRO accumulates gradients as they arrive, so the two norms are not logged under ZeRO.
    """
    settings, engine, ranks = config.ppo, state.engine, state.engine.ranks
    parameters = [p for p in engine.module.policy.parameters() if p.requires_grad]
    rl_gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    if not engine.sharded:
        sums.add("optim/rl_grad_norm", engine.gradient_norm(parameters))
        for p in parameters:
            p.grad = None
    episodes = settings.episodes_per_update // settings.minibatches
    drawn = blocks.draw(key, max(1, round(settings.ptx_blocks_per_episode * episodes)))
    width = blocks.blocks[0]["input_ids"].shape[0]
    tokens = len(drawn) * (width - 1)
    of_rank = drawn[ranks.rank :: ranks.count]
    size = min(config.pretrain.micro_batch_sequences, max(1, (engine.most_tokens or tokens) // width))
    for start in range(0, -(-len(drawn) // ranks.count), size):
        counted = of_rank[start : start + size]
        # a rank without blocks left computes one that does not count
        batch = blocks.batch(counted or drawn[:1], engine.device)
        loss = engine(batch, tokens, method="pretraining_loss") * bool(counted)
        engine.backward(settings.ptx_coef * loss, batch)
        sums.add("loss/ptx_avg", loss.item() * tokens, len(counted) * (width - 1))
    if engine.sharded:
        return
    sums.add("optim/ptx_grad_norm", engine.gradient_norm(parameters))
    for p, gradient in zip(parameters, rl_gradients, strict=True):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad + gradient

"""PPO's fifth step: `epochs` passes over one rollout in minibatches, with one optimizer step each; and the recipe's
invariants, which are checked on the first update: training is refused if one fails.

A minibatch is the same set of episodes on any number of ranks; each rank has a part of it, split into micro-batches.
A micro-batch's loss is a sum divided by the minibatch's global number of response tokens, so neither split changes a
loss or a gradient.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.config.stages import PpoConfig
from rlhf.errors import UserError
from rlhf.model.batching import by_length
from rlhf.ops.kl import FixedKL, kl_loss
from rlhf.ops.masked import wide
from rlhf.ops.ppo import policy_loss, value_loss
from rlhf.ppo.experience import Experience, PretrainingBlocks, Rollout
from rlhf.runs.metric_table import Sums
from rlhf.system.processes import gather
from rlhf.training.batches import put, shuffled_order
from rlhf.training.engine import Engine
from rlhf.training.optim import fallen

SHARED_VALUE_COEF = 0.1


@dataclass(slots=True)
class State:
    """What an update changes; checkpoints contain it."""

    engine: Engine  # policy and critic with their optimizer; the average of the policy's weights
    kl: FixedKL
    tokens: int = 0  # response tokens sampled so far


class Checked(NamedTuple):
    """The figures that are checked of N tokens of the policy's first minibatch, on the CPU."""

    log_ratios: Tensor  # (N,), as the next two
    logp_old: Tensor
    entropies: Tensor
    clipped: float  # tokens


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
    settings, engine, first_of_policy = config.ppo, state.engine, 1 + config.ppo.critic_warmup_updates
    with_policy = update >= first_of_policy
    factors = {} if engine.module.critic is None else {"critic": rate_factor(settings, update, 1)}
    if with_policy:
        factors["policy"] = rate_factor(settings, update, first_of_policy)
    # Dropout is 0 everywhere, so training mode only enables gradient checkpointing.
    engine.module.train(engine.recomputes)
    k, size = settings.responses_per_prompt, settings.episodes_per_update // settings.minibatches
    dropped: list[int] = []  # rows of prompts whose responses all have one score: Yu et al. 2025 (DAPO), section 3.2
    if settings.drop_tied_groups:
        low, high = experience.scores.view(-1, k).aminmax(dim=1)
        dropped = (low == high).repeat_interleave(k).nonzero().flatten().tolist()
        sums.add("rollout/dropped", len(dropped), len(episodes))
    row_of = {episode: row for row, episode in enumerate(episodes) if row not in dropped}
    for epoch in range(settings.epochs):
        # prompts in random order; responses to one prompt stay together, since they share its cost
        prompts = shuffled_order(f"minibatch-{config.seed}-{update}")(settings.episodes_per_update // k, epoch)
        order = [prompt * k + i for prompt in prompts for i in range(k)]
        for number in range(settings.minibatches):
            chosen = [row_of[e] for e in order[number * size : (number + 1) * size] if e in row_of]
            check = (update, epoch, number) == (first_of_policy, 0, 0)
            train_minibatch(config, experience, chosen, state, sums, with_policy=with_policy, check=check)
            if blocks is not None and with_policy:
                add_pretraining_gradient(config, state, blocks, (update, epoch, number), sums)
            for name, norm in engine.step(factors).items():
                sums.add(name, norm)
    sums.add("optim/steps", settings.epochs * settings.minibatches)
    sums.add("optim/lr", settings.lr * factors.get("policy", 0.0))
    if "critic" in factors:
        sums.add("optim/critic_lr", settings.critic_lr * factors["critic"])


def rate_factor(config: PpoConfig, update: int, first: int) -> float:
    """Factor on a model's learning rate at an update, from 1 on; `first`: the first update in which it trains.
    It rises from 0.1 to 1 over warmup_updates, times the schedule from 1 at the first update to final_lr_fraction after
    the last.
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
    """Add up the gradients of a minibatch, this rank's rows `chosen`. check: whether it is the policy's first."""
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
        part = experience.rows(groups[number] if number < len(groups) else [0])
        if number >= len(groups):  # a rank with fewer micro-batches adds ones whose tokens do not count
            nothing = torch.zeros_like(part.rollout.response_mask)
            part = part._replace(rollout=part.rollout._replace(response_mask=nothing))
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
    """A micro-batch's part of the loss, over the minibatch's `tokens`. models: arguments of `ActorCritic.evaluate`."""
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
            loss = loss + state.kl.coef * kl_loss(logp, rollout.logp_old, rollout.logp_ref, mask, denominator=tokens)
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
    key: of the blocks that are drawn. ZeRO accumulates gradients as they arrive, so the two norms are not logged under
    ZeRO.
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
        batch = put(blocks.collate([blocks.blocks[i] for i in counted or drawn[:1]]), engine.device)
        loss = engine(batch, tokens, method="pretraining_loss") * bool(counted)
        engine.backward(settings.ptx_coef * loss, batch)
        sums.add("loss/ptx_avg", loss.item() * tokens, len(counted) * (width - 1))
    if engine.sharded:
        return
    sums.add("optim/ptx_grad_norm", engine.gradient_norm(parameters))
    for p, gradient in zip(parameters, rl_gradients, strict=True):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad + gradient


# --- the invariants: 1 to 3 and 7 of the recipe; docs/ppo.md has the measurements behind the bounds ------------------

TOLERANCE = 1e-4  # bound on |log rho| per token, and on a token's gap to the reference; nats, float32
# How far two computations of the same log-probs may be apart in bf16: the mean and the quantile of a share of tokens, in standard
# deviations of the log-probs, since logits are rounded in proportion to their size.
FORWARDS = 0.02  # mean of two forwards over batches of different shapes
SAMPLER = 0.06  # mean of the sampler against a forward
QUANTILE, SHARE = 0.3, 0.999
LEAST_SPREAD = 0.02  # nats: lower bound of the standard deviation
# A KL to the reference in bf16 is refused if it is larger than this and larger than noise around 0
SEQUENCE_KL, STANDARD_ERRORS = 0.05, 5.0  # nats per sequence, mean over sequences
CLIPPED_SHARE = 0.01  # of tokens that rounding in bf16 may put outside ppo.clip_range
ENTROPY_TOLERANCE = 1e-4  # nats


def refuse(number: int, what: str, trained: str = "nothing was trained") -> None:
    raise UserError(f"ppo: invariant {number} fails on the first update: {what}: {trained}")


def gap_problem(gaps: Tensor, logprobs: Tensor, half: bool, bound: float = FORWARDS) -> str | None:
    """How far gaps (N,) between two computations of logprobs (N,) exceed rounding in bf16 (`half`) or float32; None if they do not."""
    ordered = gaps.abs().sort().values
    if not half:
        most = ordered[-1].item()  # NaN is sorted last
        return None if most <= TOLERANCE else f"by {most:.2e} nats on one token, want {TOLERANCE:.0e} or less"
    mean, most = ordered.mean().item(), ordered[round(SHARE * (len(ordered) - 1))].item()
    spread = max(logprobs.std(correction=0).item(), LEAST_SPREAD)
    if mean <= bound * spread and most <= QUANTILE * spread:
        return None
    found = f"by {mean:.2e} nats on average and {most:.2e} at the {SHARE:.1%} quantile"
    return f"{found}, want {bound * spread:.2e} and {QUANTILE * spread:.2e} or less"


def check_first_rollout(
    rollout: Rollout, rewards: Tensor, scores: Tensor, kl_coef: float, half: bool, from_reference: bool = True
) -> None:
    """Before any training: the policy equals the reference, if it starts from it (2), and the score is on the last
    response token, except for the parts that other tokens earn (3). half: whether log-probs are computed in bf16.
    Raises: UserError.
    """
    mask = rollout.response_mask
    if mask.any():
        check_sampler(rollout)
    if mask.any() and from_reference:
        gaps = (rollout.logp_old - rollout.logp_ref)[mask]
        problem = gap_problem(gaps, rollout.logp_old[mask], half)
        if half and problem is None:
            kl, noise = gaps.sum().item() / len(mask), gaps.std(correction=0).item() * len(gaps) ** 0.5 / len(mask)
            if abs(kl) > max(SEQUENCE_KL, STANDARD_ERRORS * noise):
                problem = f"by a KL of {kl:.2e} nats per sequence, want {SEQUENCE_KL} or {STANDARD_ERRORS:.0f} standard errors or less"
        if problem is not None:
            why = "the reference is not the model that the policy started from, or the sampler's log-probs are not the forward's"
            refuse(2, f"log-probs differ from the reference's {problem}: {why}")
    counts = mask.sum(1)
    if not (counts > 0).all():
        refuse(3, f"{int((counts == 0).sum())} responses have no token")
    last = counts[:, None] - 1
    if not mask.gather(1, last).all():
        refuse(3, "the last response token is masked out")
    earned = rollout.token_scores
    scored = torch.where(mask, rewards + kl_coef * (rollout.logp_old - rollout.logp_ref) - earned, 0.0)
    on_last, rest = scored.gather(1, last)[:, 0], scored.scatter(1, last, 0.0)
    if not torch.allclose(on_last, scores - earned.sum(1), atol=1e-4) or rest.abs().max() > 1e-4:
        refuse(3, "the score is not on the last response token, or not there alone")


def check_sampler(rollout: Rollout) -> None:
    """Invariant 1 if old log-probs are recomputed: the sampler drew from the distribution of the training forward.
    In float32 logp_old is the sampler's own, and `check_first_rollout` compares it with a forward. Raises: UserError.
    """
    if torch.equal(rollout.logp_sampled, rollout.logp_old):
        return
    gaps = (rollout.logp_sampled - rollout.logp_old)[rollout.response_mask]
    if problem := gap_problem(gaps, rollout.logp_old[rollout.response_mask], True, SAMPLER):
        why = "the sampler and the training forward differ (temperature, padding, position, or dtype?)"
        refuse(1, f"the sampler's log-probs differ from a forward's {problem}: {why}")


def check_first_minibatch(parts: list[Checked], vocab_size: int, half: bool) -> None:
    """Before the policy's first step, after the critic's warm-up: rho = 1 and nothing is clipped, and entropies are
    between 0 and log V.
    parts: the micro-batches of all ranks. half: as of `check_first_rollout`. Raises: UserError naming the invariant.
    """
    untouched = "the policy was not trained"  # the critic may have been
    log_ratios, logp_old, entropies = (torch.cat(x) for x in zip(*(part[:3] for part in parts), strict=True))
    clipped = sum(part.clipped for part in parts)
    if problem := gap_problem(log_ratios, logp_old, half):
        what = f"before any step log-probs differ from the rollout's {problem} (dropout, dtype, or temperature?)"
        refuse(1, what, untouched)
    if clipped > (CLIPPED_SHARE * len(log_ratios) if half else 0):
        what = f"{clipped:.0f} of {len(log_ratios)} tokens are clipped before any step, with |log rho| up to {log_ratios.abs().max():.2e}"
        remedy = "ppo.clip_range is narrower than the rounding of log-probs, raise it or set precision=float32"
        refuse(1, f"{what}: {remedy}", untouched)
    least, above = entropies.min().item(), entropies.max().item() - math.log(vocab_size)
    if least < -ENTROPY_TOLERANCE or above > ENTROPY_TOLERANCE:
        what = f"the entropy of a token is as low as {least:.4f} or {above:.4f} above log V, want 0 to log V nats"
        refuse(7, what, untouched)

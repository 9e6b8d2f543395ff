"""Step 3: PPO against the reward model, with a KL penalty towards the SFT model (Ouyang et al. 2022, C.4), or another
reference.

`one_update` is the recipe in the paper's order: 1. sample  2. score  3. rewards  4. advantages  5. update. The losses
of step 5 are in `rlhf.ppo.update`.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.data.tokenizer import load_tokenizer
from rlhf.engines.choosing import SamplingEngine
from rlhf.engines.sampling import make_sampler
from rlhf.gold.truth import Truth, make_truth
from rlhf.ops.fast import return_freed_memory
from rlhf.ops.gae import OF_GROUPS
from rlhf.ops.kl import AdaptiveKL, FixedKL
from rlhf.ops.masked import whiten
from rlhf.ops.ppo import token_rewards
from rlhf.ppo import Experience, State, adjust_scores, load_estimator, optimize, sample_responses, score_responses
from rlhf.ppo.experience import PretrainingBlocks, Prompt, Prompts, load_ppo_prompts, recomputes, weigh_by_sampler
from rlhf.ppo.metrics import Measure, add_rollout_metrics, add_times, held_out_metrics, load_measures
from rlhf.ppo.models import load_models
from rlhf.ppo.rewards import Reward, sources_of
from rlhf.ppo.update import check_first_rollout, train_minibatch
from rlhf.runs.folders import policy_folder
from rlhf.runs.metric_table import Sums
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.stage import Stage, open_stage
from rlhf.training.adapters import save_output
from rlhf.training.batches import shuffled_order
from rlhf.training.engine import Engine
from rlhf.training.loop import open_loop
from rlhf.training.setup import set_up
from rlhf.training.usage import set_budget

MOST_CUT = 0.2  # a larger share of responses without an end is warned of
Estimator = Callable[..., tuple[Tensor, Tensor]]  # of advantages and returns, see `compute_advantages`
ReferenceLogprobs = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, A) of ppo.reference, by (tokens, starts, mask)


@dataclass
class Parts:
    """What `one_update` works with, by name."""

    config: Config
    sampler: SamplingEngine
    reference: ReferenceLogprobs
    reward: Reward
    prompts: Prompts
    state: State
    estimate: Estimator
    measures: Sequence[Measure]


def run(config: Config) -> None:
    """Write runs/<run>/ppo/model."""
    with open_stage(config, "ppo") as stage:
        # Set up
        settings, truth = config.ppo, make_truth(config)
        parts = load_parts(config, stage, truth)
        state, engine, tokenizer = parts.state, parts.state.engine, parts.prompts.tokenizer

        # Loop
        updates = settings.episodes // settings.episodes_per_update
        with open_loop(stage, engine, updates, unit="update") as loop:
            limit_memory(stage, parts)
            metrics: dict[str, float] = {}
            if loop.done:
                state.kl.load_state_dict(loop.notes["kl"])
                state.tokens = loop.tokens
                metrics = [{}, *read_jsonl(stage.folder / "metrics.jsonl")][-1]  # reported if no update is left
            elif settings.eval_every:
                held_out, rows = evaluate_held_out(parts, truth)
                loop.tracker.samples(0, rows)
                loop.tracker.log(held_out, step=0, episodes=0)
            if loop.done < updates and not engine.sharded:  # ZeRO keeps gradients
                seconds, experience = measure_update(parts)
                if not loop.done:
                    say_measured(config, experience, stage.say)
                loop.say_time(seconds, f"the time of {settings.episodes_per_update // settings.minibatches} episodes")
            for update in loop.steps():
                metrics = one_update(update=update, **vars(parts))
                last = update == updates or above_ceiling(config, metrics["objective/kl"])
                if settings.eval_every and (update % settings.eval_every == 0 or last):
                    held_out, rows = evaluate_held_out(parts, truth)
                    metrics |= held_out
                    if update % settings.samples_every == 0 or last:
                        loop.tracker.samples(update, rows)
                episodes = update * settings.episodes_per_update
                loop.tracker.log(metrics, step=update, episodes=episodes, tokens=state.tokens)
                loop.tokens, loop.notes["kl"] = state.tokens, state.kl.state_dict()
                # for checkpoints.keep_best: by the setting, since an adaptive coefficient changes
                if "eval/dev/scores" in metrics:
                    loop.figure = metrics["eval/dev/scores"] - config.kl.coef * metrics["eval/dev/kl"]
                kl, length = metrics["objective/kl"], metrics["rollout/response_len"]
                loop.bar.update(1, reward=metrics["objective/scores"], KL=kl, length=length)
                if above_ceiling(config, kl):
                    above = f"KL {kl:.2f} nats is above kl.ceiling={config.kl.ceiling}"
                    stage.say(f"stopped at update {update}: {above}: the policy is kept as it was before")
                    break

        # Write
        write_models(stage, engine, tokenizer)
        stage.finish({name: metrics[name] for name in ("objective/scores", "objective/kl") if name in metrics})


def load_parts(config: Config, stage: Stage, truth: Truth | None = None) -> Parts:
    device, settings = set_up(config), config.ppo
    estimate, measures = load_estimator(settings.advantages), load_measures(config, truth)
    tokenizer = load_tokenizer(policy_folder(config, settings.policy) / "model")
    reference, reward, engine = load_models(config, stage, tokenizer, device)
    blocks = PretrainingBlocks(config, tokenizer) if settings.ptx_coef else None
    prompts = Prompts(*load_ppo_prompts(config, tokenizer, stage.say), tokenizer, blocks)
    sampler = make_sampler(config, engine.module.policy, tokenizer)
    return Parts(config, sampler, reference, reward, prompts, State(engine, make_kl(config)), estimate, measures)


def limit_memory(stage: Stage, parts: Parts) -> None:
    """Divide the forwards with gradients by tokens, to fit. Raises: UserError if the longest row does not."""
    settings, rollout = parts.config.ppo, parts.config.rollout
    longest = max(len(ids) for _, ids in parts.prompts.train) + rollout.max_new_tokens
    if (mixed := parts.prompts.blocks) is not None:
        longest = max(longest, mixed.blocks[0]["input_ids"].shape[0])
    minibatch = settings.episodes_per_update // settings.minibatches
    set_budget(stage, parts.state.engine, longest, min(settings.micro_batch_episodes, minibatch))


def one_update(
    *,
    config: Config,
    update: int,
    sampler: SamplingEngine,
    reference: ReferenceLogprobs,
    reward: Reward,
    prompts: Prompts,
    state: State,
    estimate: Estimator,
    measures: Sequence[Measure] = (),
) -> dict[str, float]:
    """One round of the recipe; returns its metrics."""
    settings, engine, sums = config.ppo, state.engine, Sums()
    started, seconds = time.monotonic(), dict[str, float]()  # by phase

    def end(phase: str) -> None:
        if config.lora.share_trunk:  # whose purpose is to save memory
            return_freed_memory()
        seconds[phase] = time.monotonic() - started - sum(seconds.values())

    chosen, ranks, k = choose_prompts(config, len(prompts.train), update), engine.ranks, settings.responses_per_prompt
    # this rank's: whole prompts, assigned to the ranks in turn
    episodes = [e for e in range(len(chosen)) if e // k % ranks.count == ranks.rank]
    asked = [prompts.train[chosen[episode]] for episode in episodes]

    # 1. Sample a response to each prompt from the policy
    keys = [("ppo", update, episode) for episode in episodes]
    samples, texts = sample_responses(engine, sampler, prompts.tokenizer, asked, keys)
    end("rollout")

    # 2. Score it; log-probs of policy and reference, values
    rollout = score_responses(config, engine, reference, reward, prompts.tokenizer, asked, samples, texts)
    mask = rollout.response_mask
    end("score")

    # 3. Rewards: r_t = -kl_coef * (logp_old_t - logp_ref_t);  r_last += score, or each token its part of it
    scores = adjust_scores(config, rollout.scores, rollout.ended)
    kl_coef = 0.0 if config.kl_in_loss else state.kl.coef
    rewards = token_rewards(scores, rollout.logp_old, rollout.logp_ref, mask, kl_coef, rollout.token_scores)

    # 4. Advantages: delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  whitened
    advantages, returns = estimate(rewards, rollout.values, mask, gamma=settings.gamma, lam=settings.lam, group_size=k)
    if settings.whiten_advantages and settings.advantages not in OF_GROUPS:
        advantages = whiten(advantages, mask, ranks.sum_tensor)
    if update == 1:
        same = settings.policy == settings.reference
        check_first_rollout(rollout, rewards, scores, kl_coef, engine.bfloat16, from_reference=same)
    if recomputes(config, engine):  # else the sampler's log-probs are the policy's
        advantages = advantages * weigh_by_sampler(config, rollout, ranks, sums)
        sums.add("time/weights_s", sampler.load_seconds)
    experience = Experience([record for record, _ in asked], texts, rollout, scores, rewards, advantages, returns)

    # 5. Update policy and critic, minibatch by minibatch; then the KL coefficient
    add_rollout_metrics(config, sums, experience, state.kl.coef, reward)
    for measure in measures:
        for name, value in measure(experience).items():
            sums.add(name, value * len(texts), len(texts))
    kl = ranks.sum(sums.state()["objective/kl"][0]) / settings.episodes_per_update  # nats per sequence
    if not above_ceiling(config, kl):
        optimize(config, update, experience, episodes, state, prompts.blocks, sums)
    end("update")
    trained = update > settings.critic_warmup_updates  # before that the policy does not change
    if trained:
        state.kl.update(kl, settings.episodes_per_update)

    state.tokens += int(ranks.sum(mask.sum()))
    add_times(config, sums, rollout, seconds, engine, (reference, *sources_of(reward)), trained)
    return ranks.merge(sums).reduce()


def respond(parts: Parts, asked: list[Prompt], keys: list[tuple]) -> Experience:
    """One scored response to each prompt, with no reward per token: for figures, not to learn from."""
    config, tokenizer, models = parts.config, parts.prompts.tokenizer, (parts.reference, parts.reward)
    samples, texts = sample_responses(parts.state.engine, parts.sampler, tokenizer, asked, keys)
    rollout = score_responses(config, parts.state.engine, *models, tokenizer, asked, samples, texts)
    scores, nothing = adjust_scores(config, rollout.scores, rollout.ended), torch.zeros_like(rollout.values)
    return Experience([record for record, _ in asked], texts, rollout, scores, nothing, nothing, nothing)


def measure_update(parts: Parts) -> tuple[float, Experience]:
    """Seconds of an update, by those of one minibatch that is sampled, scored and trained on, and its data; changes nothing."""
    config, prompts, state, settings = parts.config, parts.prompts, parts.state, parts.config.ppo
    engine, started = state.engine, time.monotonic()
    count = max(1, settings.episodes_per_update // settings.minibatches // engine.ranks.count)
    asked = [prompts.train[i] for i in choose_prompts(config, len(prompts.train), 1)[:count]]
    with torch.random.fork_rng():
        experience, scored = respond(parts, asked, [("measured", i) for i in range(count)]), time.monotonic()
        engine.module.train(engine.recomputes)
        train_minibatch(config, experience, list(range(count)), state, Sums(), check=False)
    engine.discard()
    return_freed_memory()
    return settings.minibatches * (scored - started + settings.epochs * (time.monotonic() - scored)), experience


def say_measured(config: Config, experience: Experience, say: Callable[[str], None]) -> None:
    """The lengths of the policy's responses; a warning if more than MOST_CUT of them are cut, or if all have one score."""
    rollout, scores, limit = experience.rollout, experience.scores, config.rollout.max_new_tokens
    cut = 1 - rollout.ended.float().mean().item()
    lengths = rollout.response_mask.sum(1).float().cpu()
    half, most = (lengths.quantile(share).item() for share in (0.5, 0.95))
    told = f"responses have {half:.0f} tokens in the median, {most:.0f} at 95%"
    say(f"{told}; {cut:.0%} are cut at rollout.max_new_tokens={limit}")
    if cut > MOST_CUT and config.ppo.missing_eos_rule != "none":
        remedy = f"set rollout.max_new_tokens={2 * limit}, or train SFT on shorter demonstrations"
        say(f"warning: ppo.missing_eos_rule lowers the scores of responses that are cut: {remedy}")
    if len(scores) > 1 and scores.max() == scores.min():
        remedy = "check ppo.rewards or the reward model, or give other prompts"
        say(f"warning: all {len(scores)} measured scores are {scores[0]:.4g}, so PPO cannot learn from them: {remedy}")


def above_ceiling(config: Config, kl: float) -> bool:
    return config.kl.ceiling is not None and kl > config.kl.ceiling


def choose_prompts(config: Config, count: int, update: int) -> list[int]:
    """Indices of an update's prompts, each k times in a row: passes over all `count`, each in a random order."""
    order, k = shuffled_order(f"ppo-{config.seed}"), config.ppo.responses_per_prompt
    size = config.ppo.episodes_per_update // k
    epoch, position = divmod((update - 1) * size, count)
    passes = itertools.chain.from_iterable(order(count, number) for number in itertools.count(epoch))
    return [index for index in itertools.islice(passes, position, position + size) for _ in range(k)]


def evaluate_held_out(parts: Parts, truth: Truth | None) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics of the policy (or of its average) on fixed held-out prompts, and rows of the samples table."""
    prompts, engine, ranks = parts.prompts, parts.state.engine, parts.state.engine.ranks
    # Under ZeRO-3 all ranks compute together, so each takes the same number of prompts; the rest are left out
    even = len(prompts.held_out) // ranks.count * ranks.count if engine.sharded else None
    asked = prompts.held_out[:even][ranks.rank :: ranks.count]
    if not asked:
        return ranks.merge(Sums()).reduce(), []
    with engine.ema.applied() if engine.ema is not None else contextlib.nullcontext():
        experience = respond(parts, asked, [("held out", record.id) for record, _ in asked])
    sums, rows = held_out_metrics(prompts.tokenizer, truth, experience)
    return ranks.merge(sums).reduce(), rows


def make_kl(config: Config) -> FixedKL:
    kl = config.kl
    return FixedKL(kl.coef) if kl.target is None else AdaptiveKL(init=kl.coef, target=kl.target, horizon=kl.horizon)


def write_models(stage: Stage, engine: Engine, tokenizer: Any) -> None:
    """`model`: the policy, or the average of its weights; then these are in `last`. Every rank has to call it."""
    policy, ema = engine.module.policy, engine.ema
    if ema is not None:
        save_output(policy, tokenizer, stage, "last")
    save_output(policy, tokenizer, stage, average=None if ema is None else ema.state_dict())

"""Stage 4: PPO against the reward model, with a KL penalty towards the SFT model (RECIPE: Ouyang et al. 2022, C.4).

`one_update` is the recipe in the paper's order: 1. sample  2. score  3. rewards  4. advantages  5. update. `rlhf.ppo.setup` loads the
models and the prompts; `rlhf.ppo.update` contains the losses of step 5.
"""

import contextlib
import random
import time

from rlhf.config import Config
from rlhf.ops.advantages import OF_GROUPS, compute_advantages
from rlhf.ops.masked import whiten
from rlhf.ops.ppo import token_rewards
from rlhf.ppo.checkpoint import restore, save, write_models
from rlhf.ppo.invariants import check_first_rollout
from rlhf.ppo.metrics import (
    SAMPLES_SHOWN,
    add_gold_parts,
    add_rollout_metrics,
    add_times,
    gold_parts,
    held_out_sums,
    sample_rows,
)
from rlhf.ppo.rewards import adjust_scores
from rlhf.ppo.rollout import Experience
from rlhf.ppo.setup import PpoRun, make_ppo_run
from rlhf.ppo.update import optimize
from rlhf.runs.metrics import Sums
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import hash_sources
from rlhf.runs.stage import open_stage
from rlhf.runs.trackers import Tracker
from rlhf.training.loop import open_loop
from rlhf.training.setup import set_up


def run(config: Config) -> None:
    """Write runs/<run>/ppo/model."""
    with open_stage(config, "ppo", hash_sources(config, "ppo")) as stage:
        run = make_ppo_run(config, stage, set_up(config))
        updates = config.ppo.episodes // config.ppo.episodes_per_update
        with open_loop(stage, run.ranks, updates, unit="update") as loop:
            if loop.resume:
                restore(run, loop.resume)
                logged = list(read_jsonl(stage.folder / "metrics.jsonl"))
                run.metrics = logged[-1] if logged else {}  # what is reported if no update is left
            elif config.ppo.eval_every:
                loop.tracker.log(evaluate_held_out(run, 0, loop.tracker), step=0, episodes=0)
            for update in loop.steps(lambda update: save(run, update)):
                metrics = run.metrics = one_update(run, update, loop.tracker)
                loop.bar.update(
                    1,
                    reward=metrics["objective/scores"],
                    KL=metrics["objective/kl"],
                    length=metrics["rollout/response_len"],
                )
                if above_ceiling(config, metrics["objective/kl"]):
                    stage.say(
                        f"stopped at update {update}: KL {metrics['objective/kl']:.2f} nats is above "
                        f"kl.ceiling={config.kl.ceiling}: the policy is kept as it was before this update"
                    )
                    break
        write_models(run)
        stage.finish({name: run.metrics[name] for name in ("objective/scores", "objective/kl") if name in run.metrics})


def one_update(run: PpoRun, update: int, tracker: Tracker) -> dict[str, float]:
    """One round of the recipe; returns its metrics."""
    settings, sums = run.config.ppo, Sums()
    run.spent.clear()
    run.mark = time.monotonic()
    chosen, episodes = choose_prompts(run, update), episodes_of_rank(run)
    prompts = [run.prompts[chosen[episode]] for episode in episodes]

    # 1. Sample a response to each prompt from the policy
    samples = run.sample(prompts, [("ppo", update, episode) for episode in episodes])

    # 2. Score it; log-probs of policy and reference, values
    rollout = run.score(prompts, samples)
    mask = rollout.response_mask

    # 3. Rewards: r_t = -kl_coef * (logp_old_t - logp_ref_t);  r_last += score, or each token its part of it
    scores = adjust_scores(run.config, rollout.scores, rollout.ended)
    kl_coef = run.kl.coef if run.config.kl.penalty == "reward" else 0.0
    rewards = token_rewards(scores, rollout.logp_old, rollout.logp_ref, mask, kl_coef, rollout.token_scores)

    # 4. Advantages: delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  whitened
    advantages, returns = compute_advantages(
        settings.advantages,
        rewards,
        rollout.values,
        mask,
        gamma=settings.gamma,
        lam=settings.lam,
        group_size=settings.responses_per_prompt,
    )
    if settings.whiten_advantages and settings.advantages not in OF_GROUPS:
        advantages = whiten(advantages, mask, run.ranks.sum_tensor)
    if update == 1:
        check_first_rollout(rollout, rewards, scores, kl_coef, run.engine.bfloat16)

    # 5. Update policy and critic, minibatch by minibatch; then the KL coefficient
    add_rollout_metrics(run, sums, rollout, scores, returns)
    add_gold_parts(run, sums, prompts, rollout)
    kl = run.ranks.sum(sums.state()["objective/kl"][0]) / settings.episodes_per_update  # nats per sequence
    if not above_ceiling(run.config, kl):
        optimize(run, update, Experience(rollout, advantages, returns), episodes, sums)
    run.end_phase("update")
    trained = update > settings.critic_warmup_updates  # before that the policy does not change
    if trained:
        run.kl.update(kl, settings.episodes_per_update)

    tokens = int(run.ranks.sum(mask.sum()))
    run.tokens += tokens
    add_times(run, sums, tokens, rollout, with_policy=trained)
    metrics = run.ranks.merge(sums).reduce()
    if settings.eval_every and update % settings.eval_every == 0:
        metrics |= evaluate_held_out(run, update, tracker)
    tracker.log(metrics, step=update, episodes=update * settings.episodes_per_update, tokens=run.tokens)
    return metrics


def above_ceiling(config: Config, kl: float) -> bool:
    return config.kl.ceiling is not None and kl > config.kl.ceiling


def choose_prompts(run: PpoRun, update: int) -> list[int]:
    """Indices of the prompts of one update: passes over all prompts, each in its own random order, cut into updates.

    With k responses per prompt, each index appears k times in a row.
    """
    settings = run.config.ppo
    size = settings.episodes_per_update // settings.responses_per_prompt
    chosen: list[int] = []
    for number in range((update - 1) * size, update * size):  # of the prompts of all updates
        epoch, position = divmod(number, len(run.prompts))
        if position == 0 or not chosen:
            order = list(range(len(run.prompts)))
            random.Random(f"ppo-{run.config.seed}-{epoch}").shuffle(order)
        chosen.append(order[position])
    return [index for index in chosen for _ in range(settings.responses_per_prompt)]


def episodes_of_rank(run: PpoRun) -> list[int]:
    """The episodes of an update that this rank samples: whole prompts, assigned to the ranks in turn."""
    settings, ranks = run.config.ppo, run.ranks
    episodes = range(settings.episodes_per_update)
    return [e for e in episodes if e // settings.responses_per_prompt % ranks.count == ranks.rank]


def evaluate_held_out(run: PpoRun, update: int, tracker: Tracker) -> dict[str, float]:
    """Metrics of the policy after `update` updates on fixed held-out prompts; also writes rows of the samples table.

    If the stage writes an average of the weights, the average is evaluated.
    """
    ranks = run.ranks
    # Under ZeRO-3 all ranks compute together, so each takes the same number of prompts; the rest are left out
    even = len(run.held_out) // ranks.count * ranks.count if run.engine.sharded else None
    prompts = run.held_out[:even][ranks.rank :: ranks.count]
    sums, rows = Sums(), []
    if prompts:
        records = [record for record, _ in prompts]
        with run.ema.applied() if run.ema is not None else contextlib.nullcontext():
            rollout = run.score(prompts, run.sample(prompts, [("held out", record.id) for record in records]))
        scores, gold = adjust_scores(run.config, rollout.scores, rollout.ended), gold_parts(run, records, rollout)
        sums = held_out_sums(rollout, scores, gold)
        rows = sample_rows(run.tokenizer, records, rollout, scores, gold)[:SAMPLES_SHOWN]
    if update % run.config.ppo.samples_every == 0:
        tracker.samples(update, rows)
    return ranks.merge(sums).reduce()

"""Stage 4: PPO against the reward model, with a KL penalty towards the SFT model (RECIPE: Ouyang et al. 2022, C.4).

The loop reads in the order of the paper: 1. sample  2. score  3. rewards  4. advantages  5. update. What a run holds is
set up in `ppo_setup.py`; the fifth step is in `ppo_update.py`.
"""

import contextlib
import functools
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.chat_template import decode_response
from rlhf.config import Config
from rlhf.data.records import PromptRecord
from rlhf.errors import UserError
from rlhf.interrupts import finish_step
from rlhf.model.heads import RewardModel
from rlhf.ops.advantages import compute_advantages
from rlhf.ops.kl import kl_estimate
from rlhf.ops.masked import whiten
from rlhf.ops.ppo import token_rewards
from rlhf.ppo.held_out import gold_parts, held_out_sums, sample_rows
from rlhf.ppo.invariants import check_first_rollout
from rlhf.ppo.rewards import CombinedReward, pay
from rlhf.ppo.rollout import Rollout, RolloutSetup, sample_responses, score_responses
from rlhf.ppo.setup import Trainer, make_trainer, merged_adapters
from rlhf.ppo.update import optimize
from rlhf.processes import on_first_rank
from rlhf.runs.checkpoints import checkpoint_due, checkpoint_step, latest_checkpoint, save_checkpoint
from rlhf.runs.folders import open_stage
from rlhf.runs.sources import hash_sources
from rlhf.tracking.metrics import Sums
from rlhf.tracking.progress import progress
from rlhf.tracking.writers import Tracker, read_jsonl
from rlhf.training.engine import on_cpu, read_state, write_state
from rlhf.training.gather import gathered_state, save_model_checked
from rlhf.training.loop import due_and_stop, refuse_nonfinite
from rlhf.training.setup import open_tracker, set_up
from rlhf.training.usage import update_flops, usage_metrics

SAMPLES_SHOWN = 8  # rows of the samples table a look


def run(config: Config) -> None:
    """Write runs/<run>/ppo/model."""
    with open_stage(config, "ppo", hash_sources(config, "ppo")) as stage:
        device = set_up(config)
        trainer = make_trainer(config, stage, device)
        updates = config.ppo.episodes // config.ppo.episodes_per_update
        first = 0
        metrics: dict[str, float] = {}
        if found := on_first_rank(lambda: latest_checkpoint(stage.checkpoints, stage.say)):
            first = restore(trainer, found)
            stage.say(f"resuming from update {first}")
            metrics = [{}, *read_jsonl(stage.folder / "metrics.jsonl")][-1]  # the last, where no update is left to do
        saved_at = stage.elapsed()
        stage.plan(updates)
        bar = progress(updates, "ppo", unit="update", initial=first)
        with finish_step("ppo"), open_tracker(stage, first) as tracker, bar:
            if first == 0 and config.ppo.eval_every:
                tracker.log(evaluate_held_out(trainer, 0, tracker), step=0, episodes=0)
            for update in range(first + 1, updates + 1):
                metrics = one_update(trainer, update, tracker)
                bar.update(1, reward=metrics["objective/scores"], KL=metrics["objective/kl"],
                           length=metrics["rollout/response_len"])  # fmt: skip
                if above_ceiling(config, metrics):
                    stage.say(f"stopped at update {update}: KL {metrics['objective/kl']:.2f} nats is above "
                              f"kl.ceiling={config.kl.ceiling}: the policy is kept as it was before this update")  # fmt: skip
                    break
                due, stop = due_and_stop(
                    trainer.ranks, checkpoint_due(config.checkpoints, update, stage.elapsed() - saved_at)
                )
                if due or stop:
                    save(trainer, update, metrics)
                    stage.note_progress()
                    saved_at = stage.elapsed()
                if stop:
                    raise KeyboardInterrupt
        write_models(trainer)
        stage.finish({name: metrics[name] for name in ("objective/scores", "objective/kl") if name in metrics})


def above_ceiling(config: Config, metrics: dict[str, float]) -> bool:
    return config.kl.ceiling is not None and metrics["objective/kl"] > config.kl.ceiling


def choose_prompts(trainer: Trainer, update: int) -> list[int]:
    """Indices of an update's prompts: passes over all of them, each in an order of its own, cut into updates.

    With k responses a prompt, each stands k times in a row.
    """
    settings = trainer.config.ppo
    count, size = len(trainer.prompts), settings.episodes_per_update // settings.responses_per_prompt
    chosen: list[int] = []
    for place in range((update - 1) * size, update * size):
        epoch, offset = divmod(place, count)
        if offset == 0 or not chosen:
            order = list(range(count))
            random.Random(f"ppo-{trainer.config.seed}-{epoch}").shuffle(order)
        chosen.append(order[offset])
    return [index for index in chosen for _ in range(settings.responses_per_prompt)]


def own_places(trainer: Trainer) -> list[int]:
    """Which of an update's episodes this rank samples: whole prompts, dealt out in turn."""
    settings, ranks = trainer.config.ppo, trainer.ranks
    everything = range(settings.episodes_per_update)
    return [place for place in everything if place // settings.responses_per_prompt % ranks.count == ranks.rank]


def sample_and_score(trainer: Trainer, prompts: list[tuple[PromptRecord, list[int]]], keys: list[tuple]) -> Rollout:
    """Steps 1 and 2: one response to each prompt, with its log-probs, values and score."""
    config, model, engine, tokenizer = trainer.config, trainer.actor_critic, trainer.engine, trainer.tokenizer
    setup = RolloutSetup(
        policy=lambda: engine.whole(model.policy),
        recompute=functools.partial(engine, method="policy_logprobs") if engine.bfloat16 else None,
        reference=trainer.reference, reward=trainer.reward,
        values=None if model.critic is None else functools.partial(engine, method="values_at"),
        texts=lambda responses: [decode_response(tokenizer, ids).strip() for ids in responses], seed=config.seed,
        max_new_tokens=config.rollout.max_new_tokens, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id,
        decode_batch=config.rollout.batch_size, forward_batch=2 * config.ppo.micro_batch_episodes,
    )  # fmt: skip
    model.eval()
    with engine.autocast():
        samples = sample_responses(setup, prompts, keys)
        trainer.clock("rollout")
        rollout = score_responses(setup, prompts, samples)
        trainer.clock("score")
    names = ("scores", "logp_old", "logp_ref", "values")
    refuse_nonfinite(trainer.stage, {name: getattr(rollout, name) for name in names}, rollout._asdict())
    return rollout


def one_update(trainer: Trainer, update: int, tracker: Tracker) -> dict[str, float]:
    """One round of the recipe; returns its metrics."""
    config, settings, ranks, sums = trainer.config, trainer.config.ppo, trainer.ranks, Sums()
    trainer.spent.clear()
    trainer.mark = time.monotonic()

    # 1. sample  2. score
    index, places = choose_prompts(trainer, update), own_places(trainer)
    prompts = [trainer.prompts[index[place]] for place in places]
    rollout = sample_and_score(trainer, prompts, [("ppo", update, place) for place in places])
    mask = rollout.response_mask

    # 3. rewards
    scores = pay(config, rollout.scores, rollout.ended)
    goes_on = ~rollout.ended if settings.truncation == "bootstrap" else torch.zeros_like(rollout.ended)
    scores = torch.where(goes_on, 0.0, scores)  # its score is still to come, and part of the value that stands there
    kl_coef = trainer.kl.coef if config.kl.penalty == "reward" else 0.0
    rewards = token_rewards(scores, rollout.logp_old, rollout.logp_ref, mask, kl_coef)

    # 4. advantages
    advantages, returns = compute_advantages(
        settings.advantages, rewards, rollout.values, mask, gamma=settings.gamma, lam=settings.lam,
        last_values=torch.where(goes_on, rollout.last_values, 0.0), group_size=settings.responses_per_prompt,
    )  # fmt: skip
    if settings.whiten_advantages and settings.advantages == "gae":
        advantages = whiten(advantages, mask, ranks.sum_tensor)
    if update == 1:
        check_first_rollout(rollout, rewards, scores, kl_coef, trainer.ratio_tolerance)

    # 5. update
    add_rollout_metrics(trainer, sums, rollout, scores, returns)
    for parts in gold_parts(trainer.tokenizer, [record for record, _ in prompts], rollout):
        for part, value in parts.items():
            sums.add(f"gold/{part}", value, 1)
    kl = ranks.sum(sums.state()["objective/kl"][0]) / len(index)
    if not above_ceiling(config, {"objective/kl": kl}):
        optimize(trainer, update, rollout, advantages, returns, places, sums)
    trainer.clock("update")
    if update > settings.critic_warmup_updates:  # before that the policy stands still
        trainer.kl.update(kl, len(index))

    tokens = int(ranks.sum(mask.sum()))
    trainer.tokens += tokens
    add_times(trainer, sums, tokens, rollout, with_policy=update > settings.critic_warmup_updates)
    metrics = trainer.ranks.merge(sums).reduce()
    if settings.eval_every and update % settings.eval_every == 0:
        metrics |= evaluate_held_out(trainer, update, tracker)
    tracker.log(metrics, step=update, episodes=update * len(index), tokens=trainer.tokens)
    return metrics


def evaluate_held_out(trainer: Trainer, update: int, tracker: Tracker) -> dict[str, float]:
    """Metrics of the policy after `update` updates on fixed held-out prompts, and rows of the samples table.

    Where the stage writes an average of the weights, it is the average that answers.
    """
    ranks = trainer.ranks
    # Under ZeRO-3 ranks compute together: they are asked equally often, and what is left over is not asked
    even = len(trainer.held_out) // ranks.count * ranks.count if trainer.engine.sharded else None
    asked = trainer.held_out[:even][ranks.rank :: ranks.count]
    sums, rows = Sums(), []
    if asked:
        records = [record for record, _ in asked]
        with trainer.ema.applied() if trainer.ema is not None else contextlib.nullcontext():
            rollout = sample_and_score(trainer, asked, [("held out", record.id) for record in records])
        scores, gold = (
            pay(trainer.config, rollout.scores, rollout.ended),
            gold_parts(trainer.tokenizer, records, rollout),
        )
        sums = held_out_sums(rollout, scores, gold)
        rows = sample_rows(trainer.tokenizer, records, rollout, scores, gold)[:SAMPLES_SHOWN]
    if update % trainer.config.ppo.samples_every == 0:
        tracker.samples(update, rows)
    return trainer.ranks.merge(sums).reduce()


def add_rollout_metrics(trainer: Trainer, sums: Sums, rollout: Rollout, scores: Tensor, returns: Tensor) -> None:
    """The objective/… and rollout/… metrics, as sums over sequences."""
    mask, count = rollout.response_mask, len(scores)
    kl = torch.where(mask, kl_estimate(rollout.logp_old, rollout.logp_ref, kind="k1"), 0.0).sum().item()
    k3 = torch.where(mask, kl_estimate(rollout.logp_old, rollout.logp_ref, kind="k3"), 0.0).sum().item()
    sums.add("objective/kl", kl, count)
    sums.add("objective/kl_k3", k3, count)
    sums.add("objective/kl_coef", trainer.kl.coef)
    sums.add("objective/scores", scores.sum().item(), count)
    paid = -trainer.kl.coef * kl if trainer.config.kl.penalty == "reward" else 0.0  # in the loss it is no reward
    sums.add("objective/non_score_reward", paid, count)
    sums.add("objective/rlhf_reward", scores.sum().item() + paid, count)
    sums.add("objective/entropy", -rollout.logp_old[mask].sum().item(), count)
    sums.add("rollout/eos_fraction", rollout.ended.sum().item(), count)
    sums.add("rollout/response_len", mask.sum().item(), count)
    if isinstance(trainer.reward, CombinedReward):
        for name, part in trainer.reward.parts.items():
            sums.add(f"objective/scores/{name}", part.sum().item(), count)
    if trainer.actor_critic.critic is None:
        return
    target, error = returns[mask].double(), (returns - rollout.values)[mask].double()
    sums.add("val/explained_var", error.sum().item(), error.square().sum().item(), target.sum().item(),
             target.square().sum().item(), target.numel())  # fmt: skip


def add_times(trainer: Trainer, sums: Sums, tokens: int, rollout: Rollout, with_policy: bool) -> None:
    """Seconds, throughput, the share of the device's peak, and peak memory of one update."""
    for phase in ("rollout", "score", "update"):
        sums.add(f"time/{phase}_s", trainer.spent[phase])
    sums.add("rollout/tokens_per_s", tokens / trainer.spent["rollout"])
    seconds = sum(trainer.spent.values())
    sums.add("time/tokens_per_s", tokens / seconds)
    sums.add("time/samples_per_s", trainer.config.ppo.episodes_per_update / seconds)
    model, settings = trainer.actor_critic, trainer.config.ppo
    whole, rows = trainer.ranks.sum(rollout.lengths.sum()), trainer.ranks.sum(len(rollout.lengths))
    passes = sums.state().get("optim/steps", [0.0])[0] / settings.minibatches
    flops = update_flops(model.policy, model.critic, trainer.frozen_models(), whole, whole / rows,
                         passes=passes, with_policy=with_policy)  # fmt: skip
    for name, value in usage_metrics(trainer.config, trainer.device, flops, seconds, trainer.ranks.count).items():
        sums.add(name, value)


def save(trainer: Trainer, update: int, metrics: dict[str, float] | None = None) -> None:
    """A checkpoint; every rank has to call it, and the first one writes.

    metrics: of this update; checkpoints.keep_best goes by the held-out score less the KL penalty.
    """
    state = trainer.engine.state()
    average = average_state(trainer)
    if state is None:
        return
    notes = {"update": update, "tokens": trainer.tokens, "kl": trainer.kl.state_dict()}
    if trainer.ema is not None:
        notes["averaged_steps"] = trainer.ema.steps
    found = state | ({} if average is None else {"ema": average})
    figure = None
    if metrics is not None and "eval/dev/scores" in metrics:
        figure = metrics["eval/dev/scores"] - trainer.kl.coef * metrics["eval/dev/kl"]
    save_checkpoint(
        trainer.stage.checkpoints,
        update,
        lambda path: write_state(path, found, notes),
        trainer.config.checkpoints,
        figure,
    )


def average_state(trainer: Trainer) -> dict[str, Tensor] | None:
    """The policy's averaged weights, whole, on the CPU."""
    return None if trainer.ema is None else {name: on_cpu(t) for name, t in trainer.ema.state_dict().items()}


def restore(trainer: Trainer, folder: Path) -> int:
    """Read a checkpoint; returns the updates that are done."""
    more = () if trainer.ema is None else ("ema",)
    state, notes = read_state(folder, *more)
    trainer.engine.restore(state, lambda: probe(trainer))
    if trainer.ema is not None:
        if "averaged_steps" not in notes:
            raise UserError(f"{folder}: was written by an earlier version, whose average started otherwise: run `rlhf ppo "
                            "overwrite=true` again")  # fmt: skip
        trainer.ema.load_state_dict(state["ema"], notes["averaged_steps"])
    trainer.kl.load_state_dict(notes["kl"])
    trainer.tokens = notes["tokens"]
    return checkpoint_step(folder)


def probe(trainer: Trainer) -> Tensor:
    """A loss that reaches every weight: of one prompt, its last token taken for the response."""
    tokens = torch.tensor([trainer.prompts[0][1]], device=trainer.device)
    one = torch.zeros(1, 1, device=trainer.device)
    row = torch.tensor([tokens.shape[1]], device=trainer.device)
    episode = Rollout(tokens, row - 1, row, one == 0, row > 0, one, one, one, one, one[0], one[0])
    logp, _, values = trainer.engine(episode)
    return logp.sum() if values is None else logp.sum() + values.sum()


def write_models(trainer: Trainer) -> None:
    """The stage's output: `model` (the average where there is one, adapters merged in), and the critic beside it."""
    stage, model = trainer.stage, trainer.actor_critic
    write_policy(trainer, stage.model if trainer.ema is None else stage.folder / "last", {})
    if trainer.ema is not None:
        average = average_state(trainer)
        with trainer.ema.applied():
            write_policy(trainer, stage.model, average or {})
    if isinstance(model.critic, RewardModel) and not trainer.config.lora.rank:
        save_model_checked(model.critic, stage.folder / "critic", gathered_state(model.critic))


def write_policy(trainer: Trainer, folder: Path, average: dict[str, Tensor]) -> None:
    """A model that loads without PEFT; the adapters by themselves beside it. Every rank has to call it.

    average: weights that are written instead of the policy's own.
    """
    policy = trainer.actor_critic.policy
    if trainer.adapters is None:
        state = gathered_state(policy)
        save_model_checked(policy, folder, None if state is None else state | average)
    elif trainer.stage.writes:
        trainer.adapters.save_pretrained(str(folder.with_name(f"{folder.name}_adapters")))
        with merged_adapters(trainer.adapters):
            save_model_checked(policy, folder, plain_weights(policy))
    if trainer.stage.writes:
        trainer.tokenizer.save_pretrained(str(folder))


def plain_weights(policy: Any) -> dict[str, Tensor]:
    """The weights under their own names, without what PEFT put around them."""
    return {
        name.replace(".base_layer.", "."): value.detach().cpu().clone()
        for name, value in policy.state_dict().items()
        if ".lora_" not in name
    }

"""Stage 4: PPO against the reward model, with a KL penalty towards the SFT model (RECIPE: Ouyang et al. 2022, C.4).

The loop reads in the order of the paper: 1. sample  2. score  3. rewards  4. advantages  5. update. Policy and critic are
one module, so one engine trains both; reference and reward model are frozen.
"""

import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config import Config
from rlhf.data.batching import by_length
from rlhf.data.prompts import encode_prompt_within, load_prompts
from rlhf.data.records import PromptRecord
from rlhf.data.splits import record_split
from rlhf.errors import UserError
from rlhf.model.heads import RewardModel
from rlhf.ops.gae import gae
from rlhf.ops.kl import AdaptiveKL, FixedKL, kl_estimate
from rlhf.ops.masked import whiten
from rlhf.ops.ppo import apply_missing_eos, policy_loss, token_rewards, value_loss
from rlhf.rollout import Rollout, collect_rollout, response_logprobs, response_values
from rlhf.runs import Stage, checkpoint_step, latest_checkpoint, open_stage, save_checkpoint, stage_folder
from rlhf.stages.common import check_tokenizer, load_policy, open_tracker, set_up
from rlhf.stages.invariants import check_first_minibatch, check_first_rollout
from rlhf.stages.loop import gradient_norm, load_training, make_accelerator, refuse_nonfinite, save_training
from rlhf.stages.sources import fractions, hash_sources, need_source
from rlhf.tokenizer import decode_response, load_tokenizer
from rlhf.tracking.metrics import Sums
from rlhf.tracking.progress import progress
from rlhf.tracking.writers import Tracker, read_jsonl

SAMPLES_SHOWN = 8  # rows of the samples table an update


class ActorCritic(nn.Module):
    """Policy and critic as one module: one engine, one optimizer, a learning rate each."""

    def __init__(self, policy: Any, critic: RewardModel):
        super().__init__()
        self.policy, self.critic = policy, critic

    def forward(self, batch: Rollout, with_policy: bool = True) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Log-probs, entropies and values, each (B, A), of the batch's responses."""
        where = (batch.tokens, batch.prompt_lengths, batch.response_mask)
        logp, entropies = response_logprobs(self.policy, *where, with_entropy=True) if with_policy else (None, None)
        return logp, entropies, response_values(self.critic, *where)


@dataclass(slots=True)
class Trainer:
    """Everything that one run of PPO holds."""

    config: Config
    stage: Stage
    accelerator: Any
    model: Any  # ActorCritic, prepared
    optimizer: Any
    reference: Any
    reward_model: RewardModel
    tokenizer: Any
    prompts: list[tuple[PromptRecord, list[int]]]
    kl: FixedKL | AdaptiveKL
    device: torch.device
    spent: dict[str, float] = field(default_factory=dict)
    mark: float = field(default_factory=time.monotonic)

    def clock(self, phase: str) -> None:
        """Book the time since the last call under `phase`."""
        now = time.monotonic()
        self.spent[phase] = self.spent.get(phase, 0.0) + now - self.mark
        self.mark = now

    @property
    def actor_critic(self) -> ActorCritic:
        return self.accelerator.unwrap_model(self.model)


def run(config: Config) -> None:
    """Write runs/<run>/ppo/model."""
    with open_stage(config, "ppo", hash_sources(config, "ppo")) as stage:
        device = set_up(config)
        trainer = make_trainer(config, stage, device)
        updates = config.ppo.episodes // config.ppo.episodes_per_update
        first = 0
        metrics: dict[str, float] = {}
        if found := latest_checkpoint(stage.checkpoints, stage.say):
            first = restore(trainer, found)
            stage.say(f"resuming from update {first}")
            metrics = [{}, *read_jsonl(stage.folder / "metrics.jsonl")][-1]  # the last, where no update is left to do
        saved_at = stage.elapsed()
        with open_tracker(stage, first) as tracker, progress(updates, "ppo", unit="update", initial=first) as bar:
            for update in range(first + 1, updates + 1):
                metrics = one_update(trainer, update, tracker)
                bar.update(1, score=metrics["objective/scores"], kl=metrics["objective/kl"])
                if stage.elapsed() - saved_at > config.checkpoints.every_seconds:
                    save(trainer, update)
                    stage.note_progress()
                    saved_at = stage.elapsed()
        trainer.actor_critic.policy.save_pretrained(str(stage.model))
        trainer.actor_critic.critic.save_pretrained(str(stage.folder / "critic"))
        trainer.tokenizer.save_pretrained(str(stage.model))
        stage.finish({name: metrics[name] for name in ("objective/scores", "objective/kl") if name in metrics})


def make_trainer(config: Config, stage: Stage, device: torch.device) -> Trainer:
    """Load the four models and the prompts. The policy starts from the SFT model, the critic from the reward model."""
    folder = stage_folder(config, "sft") / "model"
    tokenizer = load_tokenizer(folder)
    check_tokenizer(config, "reward", tokenizer)
    policy, reference = load_policy(folder, dropout=0.0), load_policy(folder)
    reward_folder = stage_folder(config, "reward") / "model"
    try:
        reward_model = RewardModel.from_pretrained(str(reward_folder), local_files_only=True).eval()
        critic = RewardModel.from_pretrained(str(reward_folder), local_files_only=True).fold_calibration()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{reward_folder}: not a readable reward model ({str(error).splitlines()[0]}): "
                        "run `rlhf reward overwrite=true` again") from error  # fmt: skip
    for frozen in (reference, reward_model):
        frozen.requires_grad_(False).to(device)
    accelerator = make_accelerator(device)
    model = ActorCritic(policy, critic)
    settings = config.ppo
    optimizer = torch.optim.AdamW(
        [{"params": list(policy.parameters()), "lr": settings.lr}, {"params": list(critic.parameters()), "lr": settings.critic_lr}],
        betas=(0.9, 0.95), weight_decay=0.0,
    )  # fmt: skip
    model, optimizer = accelerator.prepare(model, optimizer)
    kl: FixedKL | AdaptiveKL = FixedKL(config.kl.coef)
    if config.kl.target is not None:
        kl = AdaptiveKL(init=config.kl.coef, target=config.kl.target, horizon=config.kl.horizon)
    return Trainer(config, stage, accelerator, model, optimizer, reference, reward_model, tokenizer,
                   load_train_prompts(config, stage, tokenizer), kl, device)  # fmt: skip


def load_train_prompts(config: Config, stage: Stage, tokenizer: Any) -> list[tuple[PromptRecord, list[int]]]:
    """Prompts of the training split with their tokens. Raises: UserError where none is left."""
    records, info = load_prompts(need_source(config, "prompts"), config.data.format)
    for line in info.describe():
        stage.say(line)
    shares = fractions(config)
    room = tokenizer.model_max_length - config.rollout.max_new_tokens
    if room < 4:
        raise UserError(f"rollout.max_new_tokens={config.rollout.max_new_tokens}: leaves no room for a prompt in the context "
                        f"of {tokenizer.model_max_length} tokens: lower it")  # fmt: skip
    found, cut = [], 0
    for record in records:
        if record_split(record, config.seed, shares) == "train":
            fitted = encode_prompt_within(tokenizer, record.prompt, room)
            if fitted is not None:
                found.append((record, fitted[0]))
                cut += fitted[1]
    if not found:
        raise UserError("data.prompts: no prompt of the training split fits the context: add shorter prompts")
    stage.say(f"{len(found):,} prompts" + (f", {cut:,} of them cut from the left to fit" if cut else ""))
    return found


def choose_prompts(trainer: Trainer, update: int) -> list[int]:
    """Indices of an update's prompts: passes over all of them, each in an order of its own, cut into updates."""
    count, size = len(trainer.prompts), trainer.config.ppo.episodes_per_update
    chosen: list[int] = []
    for place in range((update - 1) * size, update * size):
        epoch, offset = divmod(place, count)
        if offset == 0 or not chosen:
            order = list(range(count))
            random.Random(f"ppo-{trainer.config.seed}-{epoch}").shuffle(order)
        chosen.append(order[offset])
    return chosen


def one_update(trainer: Trainer, update: int, tracker: Tracker) -> dict[str, float]:
    """One round of the recipe; returns its metrics."""
    config, sums = trainer.config, Sums()
    trainer.spent.clear()
    trainer.mark = time.monotonic()

    # 1. sample  2. score
    index = choose_prompts(trainer, update)
    model = trainer.actor_critic
    rollout = collect_rollout(
        [trainer.prompts[i][1] for i in index], [("ppo", update, place) for place in range(len(index))],
        policy=model.policy, reference=trainer.reference, critic=model.critic, reward_model=trainer.reward_model,
        seed=config.seed, max_new_tokens=config.rollout.max_new_tokens, eos=trainer.tokenizer.eos_token_id,
        pad=trainer.tokenizer.pad_token_id, decode_batch=config.rollout.batch_size,
        forward_batch=2 * config.ppo.micro_batch_episodes, clock=trainer.clock,
    )  # fmt: skip
    refuse_nonfinite(trainer.stage, {name: getattr(rollout, name) for name in ("scores", "logp_old", "logp_ref", "values")},
                     rollout._asdict())  # fmt: skip

    # 3. rewards
    scores = rollout.scores
    if config.ppo.missing_eos_score is not None:
        scores = apply_missing_eos(scores, rollout.ended, config.ppo.missing_eos_score)
    mask = rollout.response_mask
    rewards = token_rewards(scores, rollout.logp_old, rollout.logp_ref, mask, trainer.kl.coef)

    # 4. advantages
    advantages, returns = gae(rewards, rollout.values, mask, gamma=config.ppo.gamma, lam=config.ppo.lam)
    if config.ppo.whiten_advantages:
        advantages = whiten(advantages, mask)
    if update == 1:
        check_first_rollout(rollout, rewards, scores, trainer.kl.coef)

    # 5. update
    add_rollout_metrics(trainer, sums, rollout, scores, returns)
    samples = sample_rows(trainer, rollout, scores, index)
    for row in samples:
        for part, value in row.get("gold", {}).items():
            sums.add(f"gold/{part}", value, 1)
    optimize(trainer, update, rollout, advantages, returns, sums)
    trainer.clock("update")
    kl = sums.reduce()["objective/kl"]
    trainer.kl.update(kl, len(index))

    add_times(trainer, sums, int(mask.sum()))
    metrics = sums.reduce()
    if update % config.ppo.samples_every == 0:
        tracker.samples(update, samples[:SAMPLES_SHOWN])
    tracker.log(metrics, step=update, episodes=update * len(index))
    return metrics


def optimize(trainer: Trainer, update: int, rollout: Rollout, advantages: Tensor, returns: Tensor, sums: Sums) -> None:
    """`epochs` passes in minibatches, one optimizer step each; a split of a minibatch changes no loss."""
    config = trainer.config.ppo
    with_policy = update > config.critic_warmup_updates
    warmth = min(1.0, 0.1 + 0.9 * (update - 1) / config.warmup_updates) if config.warmup_updates else 1.0
    trainer.model.eval()  # dropout is off everywhere in this stage
    count = len(rollout.tokens)
    size = count // config.minibatches
    for epoch in range(config.epochs):
        order = list(range(count))
        random.Random(f"minibatch-{trainer.config.seed}-{update}-{epoch}").shuffle(order)
        for number in range(config.minibatches):
            chosen = order[number * size : (number + 1) * size]
            first = epoch == 0 and number == 0 and with_policy
            train_minibatch(trainer, rollout, advantages, returns, chosen, sums, with_policy, first)
            for group, lr in zip(trainer.optimizer.param_groups, (config.lr, config.critic_lr), strict=True):
                group["lr"] = lr * warmth
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    sums.add("optim/lr", config.lr * warmth if with_policy else 0.0)
    sums.add("optim/critic_lr", config.critic_lr * warmth)


def train_minibatch(
    trainer: Trainer, rollout: Rollout, advantages: Tensor, returns: Tensor, chosen: list[int], sums: Sums,
    with_policy: bool, check: bool,
) -> None:  # fmt: skip
    """Gradients of one minibatch, its micro-batches divided by its global count of response tokens."""
    config = trainer.config.ppo
    tokens = int(rollout.response_mask[chosen].sum())  # N
    clipped, ratio_max = 0.0, 0.0
    for group in by_length(rollout.lengths[chosen].tolist(), config.micro_batch_episodes):
        index = [chosen[i] for i in group]
        part = rollout.rows(index)
        mask = part.response_mask
        a = mask.shape[1]
        logp, entropies, values = trainer.model(part, with_policy)
        loss, value = value_loss(
            values, part.values, returns[index, :a], mask, clip_range=config.value_clip_range, denominator=tokens
        )
        loss = config.value_coef * loss
        n = int(mask.sum())
        sums.add("loss/value_avg", float(value["loss"]) * tokens, n)
        sums.add("val/clipfrac_avg", float(value["clipfrac"]) * tokens, n)
        if with_policy:
            surrogate, figures = policy_loss(
                logp, part.logp_old, advantages[index, :a], mask, clip_range=config.clip_range, denominator=tokens
            )
            loss = loss + surrogate
            sums.add("loss/policy_avg", float(figures["loss"]) * tokens, n)
            sums.add("policy/approxkl_avg", float(figures["approxkl"]) * tokens, n)
            sums.add("policy/clipfrac_avg", float(figures["clipfrac"]) * tokens, n)
            sums.add("policy/ratio_max", float(figures["ratio_max"]))
            sums.add("policy/entropy_avg", float(entropies.sum()), n)
            clipped += float(figures["clipfrac"]) * tokens
            ratio_max = max(ratio_max, float(torch.where(mask, logp.detach() - part.logp_old, 0.0).abs().max()))
        refuse_nonfinite(trainer.stage, {"loss": loss}, part._asdict())
        trainer.accelerator.backward(loss)
    if check:
        check_first_minibatch(ratio_max, clipped)
    model = trainer.actor_critic
    norms = {"policy": gradient_norm(model.policy.parameters()), "critic": gradient_norm(model.critic.parameters())}
    refuse_nonfinite(trainer.stage, norms, rollout.rows(chosen)._asdict())
    for name, module in (("policy", model.policy), ("critic", model.critic)):
        sums.add(f"optim/{name}_grad_norm", norms[name].item())
        trainer.accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm)


def add_rollout_metrics(trainer: Trainer, sums: Sums, rollout: Rollout, scores: Tensor, returns: Tensor) -> None:
    """The objective/… and rollout/… metrics, as sums over sequences."""
    mask, count = rollout.response_mask, len(scores)
    kl = torch.where(mask, kl_estimate(rollout.logp_old, rollout.logp_ref, kind="k1"), 0.0).sum().item()
    k3 = torch.where(mask, kl_estimate(rollout.logp_old, rollout.logp_ref, kind="k3"), 0.0).sum().item()
    sums.add("objective/kl", kl, count)
    sums.add("objective/kl_k3", k3, count)
    sums.add("objective/kl_coef", trainer.kl.coef)
    sums.add("objective/scores", scores.sum().item(), count)
    sums.add("objective/non_score_reward", -trainer.kl.coef * kl, count)
    sums.add("objective/rlhf_reward", scores.sum().item() - trainer.kl.coef * kl, count)
    sums.add("objective/entropy", -rollout.logp_old[mask].sum().item(), count)
    sums.add("rollout/eos_fraction", rollout.ended.sum().item(), count)
    sums.add("rollout/response_len", mask.sum().item(), count)
    target, error = returns[mask].double(), (returns - rollout.values)[mask].double()
    sums.add("val/explained_var", error.sum().item(), error.square().sum().item(), target.sum().item(),
             target.square().sum().item(), target.numel())  # fmt: skip


def add_times(trainer: Trainer, sums: Sums, tokens: int) -> None:
    for phase in ("rollout", "score", "update"):
        sums.add(f"time/{phase}_s", trainer.spent[phase])
    sums.add("rollout/tokens_per_s", tokens / trainer.spent["rollout"])
    sums.add("time/tokens_per_s", tokens / sum(trainer.spent.values()))


def sample_rows(trainer: Trainer, rollout: Rollout, scores: Tensor, index: list[int]) -> list[dict[str, Any]]:
    """Rollouts of this update as text, with score and KL; in the gold world with the judge's view, which trains nothing.

    Elsewhere only the few that the samples table shows.
    """
    rows = []
    for i in range(len(index) if trainer.config.gold.enabled else min(SAMPLES_SHOWN, len(index))):
        record, prompt = trainer.prompts[index[i]]
        response = rollout.tokens[i, len(prompt) : int(rollout.lengths[i])].tolist()
        text = decode_response(trainer.tokenizer, response)
        kl = (rollout.logp_old[i] - rollout.logp_ref[i])[rollout.response_mask[i]].sum().item()
        row: dict[str, Any] = {
            "id": record.id,
            "prompt": record.prompt[-1].content,
            "response": text,
            "score": scores[i].item(),
            "kl": kl,
        }
        if "gold" in record.metadata:
            from rlhf.gold.judge import judge
            from rlhf.gold.world import task_from_metadata

            row["gold"] = judge(task_from_metadata(record.metadata["gold"]), text.strip(), ended=bool(rollout.ended[i]))
        rows.append(row)
    return rows


def save(trainer: Trainer, update: int) -> None:
    state = {"update": update, "kl": trainer.kl.state_dict()}
    modules = {"policy": trainer.actor_critic.policy, "critic": trainer.actor_critic.critic}
    save_checkpoint(
        trainer.stage.checkpoints, update, lambda path: save_training(path, modules, trainer.optimizer, state),
        trainer.config.checkpoints.keep,
    )  # fmt: skip


def restore(trainer: Trainer, folder: Any) -> int:
    """Read a checkpoint; returns the updates that are done."""
    modules = {"policy": trainer.actor_critic.policy, "critic": trainer.actor_critic.critic}
    state = load_training(folder, modules, trainer.optimizer)
    trainer.kl.load_state_dict(state["kl"])
    return checkpoint_step(folder)

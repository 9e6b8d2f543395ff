"""Sets up a PPO run: the models, the prompts and the reward."""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.config import Config
from rlhf.cpu.allocator import return_freed_memory
from rlhf.data.chat_template import end_ids, response_text
from rlhf.data.prompts import fitting_prompts
from rlhf.data.records import PromptRecord
from rlhf.data.splits import prompt_key
from rlhf.data.tokenizer import load_tokenizer
from rlhf.engines.sampler import Samples, sample_as_configured
from rlhf.errors import UserError
from rlhf.gold.truth import Truth, make_truth
from rlhf.model.classifier import TextRewardModel, load_reward_model
from rlhf.model.gpt import GPTForCausalLM
from rlhf.model.half import hold_frozen
from rlhf.model.heads import RewardConfig, RewardModel
from rlhf.ops.kl import AdaptiveKL, FixedKL
from rlhf.ppo.actor_critic import ActorCritic, Reference, make_critic, turn_off_dropout
from rlhf.ppo.ptx import PretrainingBlocks
from rlhf.ppo.rewards import CombinedReward, FunctionReward, ModelReward, Reward, TextReward
from rlhf.ppo.rollout import Prompts, Rollout, score_responses
from rlhf.runs.folders import check_output, read_stage, stage_folder
from rlhf.runs.sources import (
    of_split,
    read_comparisons,
    read_prompts,
    reward_folder,
    reward_model_folder,
    reward_sources,
)
from rlhf.runs.stage import Stage
from rlhf.system.plugins import is_function
from rlhf.system.processes import Ranks
from rlhf.training.adapters import add_adapters, load_adapters, share_weights
from rlhf.training.ema import Ema
from rlhf.training.engine import Engine, make_engine, shard_frozen
from rlhf.training.loop import refuse_nonfinite
from rlhf.training.setup import check_tokenizer, load_policy
from rlhf.training.zero import zero_stage

SHARED_VALUE_COEF = 0.1


@dataclass(slots=True)
class PpoRun:
    """Models, prompts, reward and state of one PPO run."""

    config: Config
    stage: Stage
    engine: Engine  # of the ActorCritic
    reference: Callable[[Tensor, Tensor, Tensor], Tensor]  # log-probs of the SFT model
    reward: Reward
    tokenizer: Any
    prompts: Prompts  # of the training split
    held_out: Prompts  # of the dev split: for the evaluations during training
    kl: FixedKL | AdaptiveKL
    device: torch.device
    truth: Truth | None = None
    blocks: PretrainingBlocks | None = None  # of PPO-ptx
    ema: Ema | None = None
    tokens: int = 0  # response tokens trained on so far
    metrics: dict[str, float] = field(default_factory=dict)  # of the last update
    spent: dict[str, float] = field(default_factory=dict)
    mark: float = field(default_factory=time.monotonic)

    def end_phase(self, phase: str) -> None:
        """Add the time since the last call to `phase`; with a shared trunk, also return freed memory to the system."""
        if self.config.lora.share_trunk:  # its purpose is to save memory
            return_freed_memory()
        now = time.monotonic()
        self.spent[phase] = self.spent.get(phase, 0.0) + now - self.mark
        self.mark = now

    @torch.no_grad()
    def sample(self, prompts: Prompts, keys: list[tuple]) -> Samples:
        """One response to each prompt at temperature 1, determined by (seed, key), however the batch is split."""
        self.actor_critic.eval()
        with self.engine.autocast(), self.engine.whole(self.actor_critic.policy) as policy:
            samples = sample_as_configured(self.config, policy, self.tokenizer, [ids for _, ids in prompts], keys=keys)
        self.end_phase("rollout")
        return samples

    def score(self, prompts: Prompts, samples: Samples) -> Rollout:
        """The responses with log-probs, values and scores. Raises: UserError if one is not finite."""
        recomputes = self.engine.bfloat16 or not isinstance(self.actor_critic.policy, GPTForCausalLM)
        with self.engine.autocast():
            rollout = score_responses(
                prompts,
                samples,
                texts=[response_text(self.tokenizer, ids) for ids in samples.responses],
                pad=self.tokenizer.pad_token_id,
                batch=2 * self.config.ppo.micro_batch_episodes,
                evaluate=functools.partial(self.engine, with_policy=recomputes, with_entropy=False),
                reference=self.reference,
                reward=self.reward,
                by_token=self.config.ppo.score_by_token,
            )
        self.end_phase("score")
        names = ("scores", "logp_old", "logp_ref", "values")
        refuse_nonfinite(self.stage, {name: getattr(rollout, name) for name in names}, rollout._asdict())
        return rollout

    @property
    def ranks(self) -> Ranks:
        return self.engine.ranks

    def frozen_models(self) -> list[nn.Module]:
        """The models of the reference and of the reward."""
        models = [getattr(source, "model", None) for source in (self.reference, *sources_of(self.reward))]
        return [model for model in models if isinstance(model, nn.Module)]

    @property
    def actor_critic(self) -> ActorCritic:
        return self.engine.module  # type: ignore[return-value]

    @property
    def value_coef(self) -> float:
        if self.config.ppo.value_coef is not None:
            return self.config.ppo.value_coef
        return SHARED_VALUE_COEF if self.config.ppo.shared_critic else 1.0


def make_ppo_run(config: Config, stage: Stage, device: torch.device) -> PpoRun:
    """Load the models and the prompts. The policy starts from the SFT model, the critic from ppo.critic."""
    settings = config.ppo
    folder = stage_folder(config, "sft") / "model"
    tokenizer = load_tokenizer(folder)
    policy = turn_off_dropout(load_policy(folder, dropout=0.0))
    shared_trunk = policy if config.lora.share_trunk else None
    reward, reward_model = make_reward(config, tokenizer, device, stage.say, shared_trunk)
    if settings.score_by_token and not any(map(reads_several_tokens, sources_of(reward))):
        raise UserError(
            "ppo.score_by_token=true: no reward model reads more than the last token: train one with reward.read_tokens, "
            "or leave it out"
        )
    critic = make_critic(config, stage, policy, reward_model)
    for source in sources_of(reward):
        if isinstance(source, ModelReward) and shared_trunk is not None:
            source.model = source.model.to(device)
        elif isinstance(source, ModelReward):
            source.model = shard_frozen(config, source.model, device)
        elif isinstance(source, TextReward) and not zero_stage(config):  # under ZeRO there is no autocast
            hold_frozen(config, source.model, device)
    reference: nn.Module
    by_share = settings.score_by_token and not end_ids(tokenizer)
    if config.lora.rank:
        reference = Reference(share_weights(policy).requires_grad_(False))
        add_adapters(policy, config, folder, device)
        if isinstance(critic, RewardModel):
            from_reward = reward_model is not None and settings.critic == "reward"
            base = reward_model_folder(reward_folder(config, None)) if from_reward else folder
            add_adapters(critic, config, base, device)
        engine = make_actor_critic_engine(config, policy, critic, device, by_share)
        reference.to(device)
    else:
        engine = make_actor_critic_engine(config, policy, critic, device, by_share)
        reference = shard_frozen(config, Reference(load_policy(folder).requires_grad_(False)), device)
    kl: FixedKL | AdaptiveKL = FixedKL(config.kl.coef)
    if config.kl.target is not None:
        kl = AdaptiveKL(init=config.kl.coef, target=config.kl.target, horizon=config.kl.horizon)
    prompts, held_out = load_ppo_prompts(config, tokenizer, stage.say)
    return PpoRun(
        config=config,
        stage=stage,
        engine=engine,
        reference=reference,
        reward=reward,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        kl=kl,
        device=device,
        truth=make_truth(config),
        blocks=PretrainingBlocks.load(config, tokenizer) if settings.ptx_coef else None,
        ema=Ema(policy, settings.ema_decay) if settings.ema_decay is not None else None,
    )


def reads_several_tokens(source: Reward) -> bool:
    return isinstance(source, ModelReward) and source.model.config.read_tokens > 1


def sources_of(reward: Reward) -> list[Reward]:
    return list(reward.sources.values()) if isinstance(reward, CombinedReward) else [reward]


def make_actor_critic_engine(
    config: Config, policy: Any, critic: Any, device: torch.device, by_share: bool = False
) -> Engine:
    """One engine for policy and critic, with two learning rates. Raises: UserError for unsupported ranks or adapters."""
    settings = config.ppo
    if config.gradient_checkpointing:
        for module in (policy, critic):
            if isinstance(module, PreTrainedModel):
                module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = ActorCritic(policy, critic, by_share)
    rates = {"policy": settings.lr, "critic": settings.critic_lr}
    groups = [
        {"params": [p for p in module.parameters() if p.requires_grad], "lr": rates[name]}
        for name, module in model.parts().items()
    ]
    engine = make_engine(config, model, groups, device, max_grad_norm=settings.max_grad_norm, sampled=policy)
    check_shares(config, engine.ranks)
    return engine


def check_shares(config: Config, ranks: Ranks) -> None:
    """Raises: UserError if the prompts of an update cannot be divided among the ranks."""
    settings = config.ppo
    prompts = settings.episodes_per_update // settings.responses_per_prompt
    if prompts < ranks.count:
        raise UserError(
            f"ppo.episodes_per_update={settings.episodes_per_update}: {prompts} prompts per update for "
            f"{ranks.count} processes: want at least one each"
        )
    if zero_stage(config) == 3 and prompts % ranks.count:
        raise UserError(
            f"ppo.episodes_per_update={settings.episodes_per_update}: {prompts} prompts per update cannot be divided among "
            f"{ranks.count} processes, as ZeRO-3 requires: choose a multiple, or deepspeed=zero2"
        )


def load_on_trunk(config: Config, folder: Path, policy: Any) -> RewardModel:
    """The reward model of a stage's folder as adapters and a head on the policy's own trunk, the SFT model, frozen.

    Raises: UserError if it was not trained with adapters, or on another SFT model.
    """
    remedy = "or set lora.share_trunk=false"
    record, sft = read_stage(folder), stage_folder(config, "sft")
    if record is None or not (folder / "adapters").is_dir():
        raise UserError(
            f"lora.share_trunk=true: {folder} was not trained with adapters: train it with lora.rank, {remedy}"
        )
    theirs, ours = record["parents"].get("sft", ""), check_output(sft)["hash"]
    if theirs != ours:
        raise UserError(
            f"lora.share_trunk=true: {folder} was trained on another SFT model ({theirs[:8]}) than {sft} ({ours[:8]}): "
            f"train it on that one, {remedy}"
        )
    settings = RewardConfig.from_pretrained(str(folder / "model"))
    with torch.random.fork_rng():
        model = RewardModel.on_trunk(settings, share_weights(policy.base_model))
    load_adapters(model, folder / "adapters", "reward")
    return model


def make_reward(
    config: Config,
    tokenizer: Any,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
    policy: Any = None,
) -> tuple[Reward, RewardModel | None]:
    """The reward, and its first reward model with the policy's tokenizer, from which the critic can start.

    policy: the model whose trunk the reward models share, with their own adapters; None: each has its own weights.
    """
    settings = config.ppo
    batch = 2 * settings.micro_batch_episodes
    names, weights = reward_sources(config)
    sources: dict[str, Reward] = {}
    first: RewardModel | None = None
    for name in names:
        if name is not None and is_function(name):
            sources[f"function_{len(sources)}"] = FunctionReward(name, device)
            say(f"rewards come from the function {name}")
            continue
        folder = reward_folder(config, name)
        model: RewardModel | TextRewardModel
        if policy is None:
            model = load_reward_model(reward_model_folder(folder), device).requires_grad_(False)
        else:
            model = load_on_trunk(config, folder, policy)
        if not settings.calibrated:
            model.calibrate(gain=1.0, shift=0.0)
        if isinstance(model, RewardModel):
            check_tokenizer(folder, tokenizer)
            sources[f"model_{len(sources)}"] = ModelReward(model, tokenizer.pad_token_id, batch, device)
            first = first or model
        else:
            sources[f"model_{len(sources)}"] = TextReward(model, device)
            say(f"{folder}: scores text with its own tokenizer")
    if len(sources) == 1 and weights == [1.0]:
        return next(iter(sources.values())), first
    return CombinedReward(sources, weights), first


def load_ppo_prompts(config: Config, tokenizer: Any, say: Callable[[str], None]) -> tuple[Prompts, Prompts]:
    """Tokenised prompts of the training split, and some of the dev split. Raises: UserError if none is left."""
    records = read_prompts(config, say)
    room = tokenizer.model_max_length - config.rollout.max_new_tokens
    if room < 4:
        raise UserError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: leaves no room for a prompt in the context "
            f"of {tokenizer.model_max_length} tokens: lower it"
        )
    training = by_ranking(config, of_split(config, records, "train"))
    fitting = list(fitting_prompts(tokenizer, training, room))
    if not fitting:
        raise UserError("data.prompts: no prompt of the training split fits the context: add shorter prompts")
    cut = sum(was_cut for _, _, was_cut in fitting)
    say(f"{len(fitting):,} prompts" + (f", {cut:,} of them cut from the left to fit" if cut else ""))
    return [(record, ids) for record, ids, _ in fitting], held_out_prompts(config, records, tokenizer)


def by_ranking(config: Config, records: list[PromptRecord]) -> list[PromptRecord]:
    """The prompts of ppo.prompts: all, ranked or unranked by the comparisons. Raises: UserError if none is left."""
    wanted = config.ppo.prompts
    if wanted == "all":
        return records
    ranked = {prompt_key(ranking.prompt) for ranking in read_comparisons(config)}
    chosen = [record for record in records if (prompt_key(record.prompt) in ranked) == (wanted == "ranked")]
    if not chosen:
        raise UserError(
            f"ppo.prompts={wanted}: none of the {len(records):,} prompts of the training split is {wanted}: add prompts"
            + (" (gold.train_prompts above gold.comparison_prompts)" if config.gold.enabled else "")
            + ", or set ppo.prompts=all"
        )
    return chosen


def held_out_prompts(config: Config, records: Sequence[PromptRecord], tokenizer: Any) -> Prompts:
    """The first `ppo.eval_prompts` prompts of the dev split that fit the context, with their tokens."""
    room = tokenizer.model_max_length - config.rollout.max_new_tokens
    fitting = fitting_prompts(tokenizer, of_split(config, records, "dev"), room)
    return [(record, ids) for record, ids, _ in itertools.islice(fitting, config.ppo.eval_prompts)]

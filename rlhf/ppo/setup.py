"""What a run of PPO holds: the models by their settings, the prompts, and what pays. Not here: the loop (`ppo.py`)."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.config import Config
from rlhf.data.prompts import encode_prompt_within, load_prompts
from rlhf.data.records import PromptRecord
from rlhf.data.splits import record_split
from rlhf.errors import UserError
from rlhf.model.classifier import TextRewardModel, load_reward_model
from rlhf.model.heads import RewardConfig, RewardModel, ScalarHead
from rlhf.model.trunk import hidden_at
from rlhf.ops.kl import AdaptiveKL, FixedKL
from rlhf.ppo.held_out import held_out_prompts
from rlhf.ppo.invariants import HALF_RATIO_TOLERANCE, RATIO_TOLERANCE
from rlhf.ppo.ptx import PretrainingBlocks, pretraining_loss
from rlhf.ppo.rewards import CombinedReward, FunctionReward, ModelReward, Reward, TextReward
from rlhf.ppo.rollout import Rollout, before_responses, logprobs_of_hidden, response_logprobs, unpacked
from rlhf.processes import Ranks
from rlhf.runs.folders import Stage, stage_folder
from rlhf.runs.sources import fractions, is_function, need_source, reward_folder, reward_sources
from rlhf.tokenizer import load_tokenizer
from rlhf.training.ema import Ema
from rlhf.training.engine import Engine, make_engine, shard_frozen
from rlhf.training.setup import check_tokenizer, load_policy
from rlhf.training.zero import zero_stage

SHARED_VALUE_COEF = 0.1


class ActorCritic(nn.Module):
    """Policy and critic as one module: one engine, one optimizer, a learning rate each.

    critic: a model of its own; or a head (D -> 1) on the policy's trunk; or None where advantages need no values.
    """

    def __init__(self, policy: Any, critic: RewardModel | ScalarHead | None):
        super().__init__()
        self.policy, self.critic = policy, critic

    @property
    def shared(self) -> bool:
        return isinstance(self.critic, ScalarHead)

    def forward(self, *arguments: Any, method: str = "evaluate") -> Any:
        """`evaluate` or another method: an engine knows no other way in."""
        return getattr(self, method)(*arguments)

    def evaluate(
        self, batch: Rollout, with_policy: bool = True, entropy_gradient: bool = False
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Log-probs, entropies and values, each (B, A), of the batch's responses; None for what is not asked for."""
        tokens, starts, mask = batch.tokens, batch.prompt_lengths, batch.response_mask
        before = before_responses(starts, tokens.shape[1], mask)  # (N,)
        hidden: Any = None
        logp = entropies = None
        if with_policy or self.shared:
            hidden = hidden_at(self.policy.base_model, tokens, before)  # (N, D)
        if with_policy:
            chosen = tokens.flatten()[before + 1]
            logp, entropies = logprobs_of_hidden(self.policy, hidden, chosen, mask, True, entropy_gradient)
        if self.critic is None:
            return logp, entropies, None
        if hidden is not None and not with_policy:
            hidden = hidden.detach()  # of a shared trunk the head learns alone: the trunk is the policy
        values = self._values(hidden) if self.shared else self.values_at(tokens, before)
        return logp, entropies, unpacked(values, mask)

    def values_at(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Values (N,) after the tokens of (B, T) that `kept` names, by row * T + position."""
        if isinstance(self.critic, RewardModel):
            return self.critic.values_at(tokens, kept)
        return self._values(hidden_at(self.policy.base_model, tokens, kept))

    def policy_logprobs(self, tokens: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
        """Log-probs (B, A) of the response tokens."""
        return response_logprobs(self.policy, tokens, starts, mask)[0]

    def pretraining_loss(self, batch: dict[str, Tensor], denominator: int) -> Tensor:
        return pretraining_loss(self.policy, batch, denominator)

    def _values(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.critic, ScalarHead)
        return self.critic(hidden).squeeze(-1).float()

    def parts(self) -> dict[str, nn.Module]:
        """{"policy": …, "critic": …}, without a critic that is not there."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})


@dataclass(slots=True)
class Trainer:
    """Everything that one run of PPO holds."""

    config: Config
    stage: Stage
    engine: Engine  # of the ActorCritic
    reference: Callable[[Tensor, Tensor, Tensor], Tensor]  # log-probs of the SFT model
    reward: Reward
    tokenizer: Any
    prompts: list[tuple[PromptRecord, list[int]]]  # of the training split, with their tokens
    held_out: list[tuple[PromptRecord, list[int]]]  # of the dev split: what the policy is looked at with
    kl: FixedKL | AdaptiveKL
    device: torch.device
    blocks: PretrainingBlocks | None = None  # of PPO-ptx
    ema: Ema | None = None
    adapters: Any = None  # the policy as PEFT's model, which can set its adapters aside
    tokens: int = 0  # response tokens trained on so far
    spent: dict[str, float] = field(default_factory=dict)
    mark: float = field(default_factory=time.monotonic)

    def clock(self, phase: str) -> None:
        """Book the time since the last call under `phase`."""
        now = time.monotonic()
        self.spent[phase] = self.spent.get(phase, 0.0) + now - self.mark
        self.mark = now

    @property
    def ranks(self) -> Ranks:
        return self.engine.ranks

    def frozen_models(self) -> list[nn.Module]:
        """The reference's model and those that pay."""
        sources = self.reward.sources.values() if isinstance(self.reward, CombinedReward) else [self.reward]
        models = [getattr(source, "model", None) for source in (self.reference, *sources)]
        return [model for model in models if isinstance(model, nn.Module)]

    @property
    def actor_critic(self) -> ActorCritic:
        return self.engine.module  # type: ignore[return-value]

    @property
    def ratio_tolerance(self) -> float:
        return HALF_RATIO_TOLERANCE if self.engine.bfloat16 else RATIO_TOLERANCE

    @property
    def value_coef(self) -> float:
        given = self.config.ppo.value_coef
        return given if given is not None else SHARED_VALUE_COEF if self.config.ppo.shared_critic else 1.0


def make_trainer(config: Config, stage: Stage, device: torch.device) -> Trainer:
    """Load the models and the prompts. The policy starts from the SFT model, the critic as ppo.critic says."""
    settings = config.ppo
    folder = stage_folder(config, "sft") / "model"
    tokenizer = load_tokenizer(folder)
    policy = without_dropout(load_policy(folder, dropout=0.0))
    reward, own = make_reward(config, tokenizer, device, stage.say)
    critic = make_critic(config, stage, policy, own)
    for source in reward.sources.values() if isinstance(reward, CombinedReward) else [reward]:
        if isinstance(source, ModelReward):
            source.model = shard_frozen(config, source.model, device)
    adapters = None
    if config.lora.rank:
        adapters = add_adapters(policy, config)
        if isinstance(critic, RewardModel):
            add_adapters(critic, config)
            critic.head.requires_grad_(True)
    if config.gradient_checkpointing:
        for module in (policy, critic):
            if isinstance(module, PreTrainedModel):
                module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = ActorCritic(policy, critic)
    rates = {"policy": settings.lr, "critic": settings.critic_lr}
    groups = [
        {"params": [p for p in module.parameters() if p.requires_grad], "lr": rates[name]}
        for name, module in model.parts().items()
    ]
    engine = make_engine(config, model, groups, device, max_grad_norm=settings.max_grad_norm, sampled=policy)
    check_shares(config, engine.ranks)
    if config.lora.rank and engine.sharded and engine.bfloat16:
        raise UserError(f"lora.rank={config.lora.rank}: with deepspeed={config.deepspeed} adapters would be added to weights rounded to "
                        "bfloat16: use deepspeed=none, or precision=float32")  # fmt: skip
    frozen = policy if adapters is not None else load_policy(folder).requires_grad_(False)
    reference = Reference(frozen, adapters)
    if adapters is None:
        reference = shard_frozen(config, reference, device)  # type: ignore[assignment]
    kl: FixedKL | AdaptiveKL = FixedKL(config.kl.coef)
    if config.kl.target is not None:
        kl = AdaptiveKL(init=config.kl.coef, target=config.kl.target, horizon=config.kl.horizon)
    return Trainer(
        config, stage, engine, reference, reward, tokenizer,
        *load_ppo_prompts(config, stage, tokenizer), kl, device,
        blocks=PretrainingBlocks.load(config, tokenizer) if settings.ptx_coef else None,
        ema=Ema(policy, settings.ema_decay) if settings.ema_decay is not None else None, adapters=adapters,
    )  # fmt: skip


def without_dropout(model: nn.Module) -> nn.Module:
    """Dropout is off everywhere in this stage, in training mode too (gradient checkpointing needs that mode)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


class Reference(nn.Module):
    """Log-probs of the SFT model: a frozen copy; with LoRA the policy itself, its adapters set aside."""

    def __init__(self, model: Any, adapters: Any = None):
        super().__init__()
        self.model, self.adapters = model, adapters

    def forward(self, tokens: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
        with self.adapters.disable_adapter() if self.adapters is not None else contextlib.nullcontext():
            return response_logprobs(self.model, tokens, starts, mask)[0]


def add_adapters(model: Any, config: Config) -> Any:
    """Put low-rank adapters on every linear layer but the output's, and freeze the rest; returns PEFT's model."""
    try:
        import peft
    except ImportError:
        raise UserError("lora.rank: needs PEFT: pip install 'rlhf-recipe[peft]', or set lora.rank=0") from None
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    skip = {id(output), id(getattr(model, "head", None))}
    targets = [
        name for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and id(module) not in skip
    ]  # fmt: skip
    settings = peft.LoraConfig(
        r=config.lora.rank, lora_alpha=config.lora.alpha, lora_dropout=0.0, target_modules=targets,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )  # fmt: skip
    return peft.PeftModel(model, settings)


def check_shares(config: Config, ranks: Ranks) -> None:
    """Raises: UserError where the ranks' shares of an update do not fit what they have to do together."""
    settings = config.ppo
    prompts = settings.episodes_per_update // settings.responses_per_prompt
    if prompts < ranks.count:
        raise UserError(f"ppo.episodes_per_update={settings.episodes_per_update}: {prompts} prompts an update for "
                        f"{ranks.count} processes: want one each at least")  # fmt: skip
    if zero_stage(config) == 3 and prompts % ranks.count:
        raise UserError(f"ppo.episodes_per_update={settings.episodes_per_update}: {prompts} prompts an update do not divide by "
                        f"{ranks.count} processes, which ZeRO-3 needs: choose a multiple, or deepspeed=zero2")  # fmt: skip


def load_reward(folder: Path, device: torch.device) -> RewardModel | TextRewardModel:
    """A reward model of either kind, frozen. Raises: UserError."""
    try:
        return load_reward_model(folder, device).requires_grad_(False)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder}: not a readable reward model ({str(error).splitlines()[0]}): "
                        "run `rlhf reward overwrite=true` again") from error  # fmt: skip


def make_reward(
    config: Config, tokenizer: Any, device: torch.device, say: Callable[[str], None] = lambda text: None
) -> tuple[Reward, RewardModel | None]:
    """What pays, and the run's own reward model where the critic can start from it."""
    settings = config.ppo
    batch = 2 * settings.micro_batch_episodes
    names, weights = reward_sources(config)
    sources: dict[str, Reward] = {}
    own: RewardModel | None = None
    for name in names:
        if name is not None and is_function(name):
            sources[f"function_{len(sources)}"] = FunctionReward(name, device)
            say(f"rewards come from the function {name}")
            continue
        folder = reward_folder(config, name)
        model = load_reward(folder / "model", device)
        if not settings.calibrated:
            model.calibrate(gain=1.0, shift=0.0)
        if isinstance(model, RewardModel):
            check_tokenizer(folder, tokenizer)
            sources[f"model_{len(sources)}"] = ModelReward(model, tokenizer.pad_token_id, batch, device)
            own = own or model
        else:
            sources[f"model_{len(sources)}"] = TextReward(model, device)
            say(f"{folder}: scores text with a tokenizer of its own")
    if len(sources) == 1 and weights == [1.0]:
        return next(iter(sources.values())), own
    return CombinedReward(sources, weights, settings.reward_combine), own


def make_critic(config: Config, stage: Stage, policy: Any, reward_model: RewardModel | None) -> Any:
    """The critic by ppo.critic; a head alone where the trunk is shared; None where advantages need no values."""
    settings = config.ppo
    if settings.advantages != "gae":
        return None
    if settings.shared_critic:
        return ScalarHead(policy.config.hidden_size).initialise()
    start = settings.critic
    if start == "reward" and reward_model is None:
        stage.say("no reward model with this tokenizer: the critic starts from the SFT model with a new head")
        start = "sft"
    if start == "reward":
        assert reward_model is not None
        return copy.deepcopy(reward_model).requires_grad_(True).fold_calibration()
    if start == "sft":
        return RewardModel.from_causal_lm(policy)
    return RewardModel(RewardConfig(trunk=policy.base_model.config))


Prompts = list[tuple[PromptRecord, list[int]]]


def load_ppo_prompts(config: Config, stage: Stage, tokenizer: Any) -> tuple[Prompts, Prompts]:
    """Prompts of the training split, and some of the dev split, with tokens. Raises: UserError where none is left."""
    records, info = load_prompts(need_source(config, "prompts"), config.data.format, config.data.allow_partial)
    for line in info.describe():
        stage.say(line)
    shares = fractions(config)
    room = tokenizer.model_max_length - config.rollout.max_new_tokens
    if room < 4:
        raise UserError(f"rollout.max_new_tokens={config.rollout.max_new_tokens}: leaves no room for a prompt in the context "
                        f"of {tokenizer.model_max_length} tokens: lower it")  # fmt: skip
    found: Prompts = []
    cut = 0
    for record in records:
        if record_split(record, config.data.split_seed, shares) == "train":
            fitted = encode_prompt_within(tokenizer, record.prompt, room)
            if fitted is not None:
                found.append((record, fitted[0]))
                cut += fitted[1]
    if not found:
        raise UserError("data.prompts: no prompt of the training split fits the context: add shorter prompts")
    stage.say(f"{len(found):,} prompts" + (f", {cut:,} of them cut from the left to fit" if cut else ""))
    return found, held_out_prompts(config, records, tokenizer, shares)


@contextlib.contextmanager
def merged_adapters(adapters: Any) -> Iterator[Any]:
    """The policy with its adapters added to the weights, for saving; afterwards they are apart again."""
    adapters.merge_adapter()
    try:
        yield adapters
    finally:
        adapters.unmerge_adapter()

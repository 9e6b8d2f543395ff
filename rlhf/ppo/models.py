"""The models of PPO: policy and critic as one module, the frozen reference, and how they are set up."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config import Config
from rlhf.data.chat_template import end_ids
from rlhf.errors import UserError
from rlhf.model.fused_loss import NextToken, before_responses, response_logprobs, unpacked
from rlhf.model.heads import RewardConfig, RewardModel, ScalarHead, width_of
from rlhf.model.interface import lm
from rlhf.model.linear import hold_frozen
from rlhf.ppo.rewards import CombinedReward, ModelReward, Reward, make_reward, sources_of
from rlhf.runs.folders import policy_folder
from rlhf.runs.sources import reward_folder, reward_model_folder
from rlhf.runs.stage import Stage
from rlhf.training.adapters import add_adapters, are_shared, share_weights
from rlhf.training.divided import load_lm, load_reward, reward_model_on
from rlhf.training.engine import Engine, make_engine, shard_frozen, zero_stage
from rlhf.training.optim import decay_groups
from rlhf.training.setup import check_tokenizer


class ActorCritic(nn.Module):
    """Policy and critic as one module: one engine, one optimizer, two learning rates.

    critic: a separate model; or a head (D -> 1) on the policy's trunk; or None if advantages need no values.
    scale_values: each token earns its own part of the score and responses have a fixed length, so V_t is the critic's
    output times `share_left`: no token shows the critic how many are left.
    """

    def __init__(self, policy: Any, critic: RewardModel | ScalarHead | None, scale_values: bool = False):
        super().__init__()
        self.policy: Any = policy
        self.critic: Any = critic
        self.scale_values = scale_values

    @property
    def shared(self) -> bool:
        return isinstance(self.critic, ScalarHead)

    def forward(self, *arguments: Any, method: str = "evaluate", **keywords: Any) -> Any:
        """`evaluate` or another method: an engine can only call `forward`."""
        return getattr(self, method)(*arguments, **keywords)

    def evaluate(
        self,
        tokens: Tensor,
        starts: Tensor,
        mask: Tensor,
        with_policy: bool = True,
        with_values: bool = True,
        with_entropy: bool = True,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Log-probs, entropies and values before each token, each (B, A), of the responses in tokens (B, T).
        starts (B,): the prompts' lengths; mask (B, A). None for what is not requested, and for values without a critic.
        """
        before = before_responses(starts, tokens.shape[1], mask)  # (N,)
        hidden = lm(self.policy).hidden(tokens, before) if self.shared else None  # (N, D)
        logp = entropies = values = None
        if with_policy:
            where = tokens, starts, mask
            logp, entropies = response_logprobs(self.policy, *where, with_entropy, entropy_gradient, hidden, before)
        if with_values and hidden is not None:
            # without the policy only the head trains: the shared trunk belongs to the policy
            values = self.critic(hidden if with_policy else hidden.detach()).squeeze(-1).float()
        elif with_values and self.critic is not None:
            values = self.critic.values_at(tokens, before)
        if values is not None:
            values = unpacked(values, mask) * (share_left(mask) if self.scale_values else 1.0)
        return logp, entropies, values

    def pretraining_loss(self, batch: dict[str, Tensor], denominator: int) -> Tensor:
        """- sum log P(u_i | u_<i) / denominator over the batch's next tokens, nats."""
        return NextToken(self.policy)(denominator=denominator, **batch)


def share_left(mask: Tensor) -> Tensor:
    """(n - t) / n before response token t = 0…n - 1 of n, (B, A) float32 of mask (B, A) bool, left-aligned; 0 outside it."""
    return mask.flip(1).cumsum(1).flip(1) / mask.sum(1, keepdim=True).clamp(min=1)


class Reference(nn.Module):
    """Log-probs of ppo.reference, the SFT model by default: a frozen copy; with LoRA, if PPO starts from it, the
    policy's own weights without its adapters.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
        return response_logprobs(self.model, tokens, starts, mask)[0]


def load_reference(config: Config, folder: Path, device: torch.device, policy: Any = None) -> nn.Module:
    """The frozen model of a folder as a `Reference`; policy: whose weights it shares, before it gets adapters."""
    if policy is not None:
        return Reference(share_weights(policy).requires_grad_(False)).to(device)
    return shard_frozen(config, Reference(load_lm(config, folder, device).requires_grad_(False)), device)


def load_models(config: Config, stage: Stage, tokenizer: Any, device: torch.device) -> tuple[nn.Module, Reward, Engine]:
    """Reference, reward, and the engine that trains policy and critic, the parts of its module, with two learning
    rates. The policy starts from ppo.policy, the critic from ppo.critic; it is None if advantages need no values.
    """
    settings = config.ppo
    folder = policy_folder(config, settings.policy, "ppo.policy") / "model"
    reference_folder = policy_folder(config, settings.reference, "ppo.reference") / "model"
    if folder != reference_folder:
        check_tokenizer(reference_folder.parent, tokenizer)
    policy = load_lm(config, folder, device, dropout=0.0)
    shared_trunk = policy if config.lora.share_trunk else None
    reward, reward_model = make_reward(config, tokenizer, device, stage.say, shared_trunk, divide=True)
    sources = [source for source in sources_of(reward) if isinstance(source, ModelReward)]
    if settings.score_by_token and not any(source.read_tokens > 1 for source in sources):
        remedy = "train one with reward.read_tokens, or leave it out"
        raise UserError(f"ppo.score_by_token=true: no reward model reads more than the last token: {remedy}")
    critic = make_critic(stage, device, policy, folder, reward, reward_model)
    for source in sources:
        if source.bare.reads_text:
            if not zero_stage(config):  # under ZeRO there is no autocast
                hold_frozen(config, source.model, device)
        elif shared_trunk is not None:
            source.model = source.model.to(device)
        else:
            source.model = shard_frozen(config, source.model, device)
    shares = are_shared(config) and folder == reference_folder
    reference = load_reference(config, folder, device, policy) if shares else None
    add_adapters(policy, config, folder)
    if config.lora.rank and critic is not None and not settings.shared_critic:
        from_reward = reward_model is not None and settings.critic == "reward"
        add_adapters(critic, config, reward_model_folder(reward_folder(config, None)) if from_reward else folder)
    model = ActorCritic(policy, critic, scale_values=settings.score_by_token and not end_ids(tokenizer))
    # Dropout is off everywhere in this stage, in training mode too (gradient checkpointing needs that mode).
    for module in model.modules():
        for name in ("p",) if isinstance(module, nn.Dropout) else ("dropout", "attention_dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    groups = decay_groups(policy, settings, lr=settings.lr, name="policy")
    if critic is not None:
        groups += decay_groups(critic, settings, lr=settings.critic_lr, name="critic")
    engine = make_engine(config, model, settings, device, groups=groups, sampled=policy)
    if settings.ema_decay is not None:
        engine.keep_average("policy", policy, settings.ema_decay)
    if reference is None:
        reference = load_reference(config, reference_folder, device)
    return reference, reward, engine


def make_critic(
    stage: Stage, device: torch.device, policy: Any, folder: Path, reward: Reward, reward_model: RewardModel | None
) -> Any:
    """The critic by ppo.critic; only a head if the trunk is shared; None if advantages need no values."""
    config, settings = stage.config, stage.config.ppo
    if not settings.has_critic:
        return None
    if settings.shared_critic:
        return scaled(ScalarHead(width_of(policy.config)), 0.0)
    if settings.critic == "random":
        return scaled(RewardModel(RewardConfig(trunk=policy.base_model.config)), 0.0)
    if settings.critic == "reward" and reward_model is not None:
        if zero_stage(config) == 3:
            critic: Any = load_reward(config, Path(str(reward_model.name_or_path)), device)
            critic.calibrate(reward_model.gain, reward_model.shift)
        else:
            shared = reward_model.trunk if config.lora.share_trunk else nn.Module()
            critic = share_weights(reward_model, shared).requires_grad_(True)
        # what other sources pay is not in the critic's first values
        weights = reward.weights if isinstance(reward, CombinedReward) else [1.0]
        paid = zip(sources_of(reward), weights, strict=True)
        own = next(weight for source, weight in paid if getattr(source, "bare", None) is reward_model)
        return scaled(critic.fold_calibration(), own)
    if settings.critic == "reward":
        stage.say("no reward model with this tokenizer in ppo.rewards: the critic is the SFT model with a new head")
    if config.lora.share_trunk:
        shared = share_weights(policy.base_model)
        return scaled(RewardModel.on_trunk(RewardConfig(trunk=policy.base_model.config), shared), 0.0)
    if zero_stage(config) == 3:
        return scaled(reward_model_on(config, folder, device), 0.0)
    return scaled(RewardModel.from_causal_lm(policy), 0.0)


@torch.no_grad()
def scaled(critic: Any, factor: float) -> Any:
    """The critic with its values times a factor: 0 for a new head, whose random values would be noise in the advantages."""
    for parameter in getattr(critic, "head", critic).parameters():
        parameter.mul_(factor)
    return critic

"""The models of PPO: policy and critic as one module, and the frozen reference."""

from typing import Any

from torch import Tensor, nn

from rlhf.config import Config
from rlhf.model.heads import RewardConfig, RewardModel, ScalarHead
from rlhf.model.interface import lm
from rlhf.ops.logprobs import token_logprobs
from rlhf.ppo.rollout import before_responses, response_logprobs, unpacked
from rlhf.runs.stage import Stage
from rlhf.training.adapters import share_weights


class ActorCritic(nn.Module):
    """Policy and critic as one module: one engine, one optimizer, two learning rates.

    critic: a separate model; or a head (D -> 1) on the policy's trunk; or None if advantages need no values.
    by_share: each token earns its own part of the score and responses have a fixed length, so V_t is the critic's output
    times `share_left`: no token shows the critic how many are left.
    """

    def __init__(self, policy: Any, critic: RewardModel | ScalarHead | None, by_share: bool = False):
        super().__init__()
        self.policy: Any = policy
        self.critic: Any = critic
        self.by_share = by_share

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
            logp, entropies = response_logprobs(self.policy, *where, with_entropy, entropy_gradient, hidden)
        if with_values and hidden is not None:
            # without the policy only the head trains: the shared trunk belongs to the policy
            values = self.critic(hidden if with_policy else hidden.detach()).squeeze(-1).float()
        elif with_values and self.critic is not None:
            values = self.critic.values_at(tokens, before)
        if values is not None:
            values = unpacked(values, mask) * (share_left(mask) if self.by_share else 1.0)
        return logp, entropies, values

    def pretraining_loss(self, batch: dict[str, Tensor], denominator: int) -> Tensor:
        """- sum log P(u_i | u_<i) / denominator over the batch's next tokens, nats."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = self.policy(**inputs, use_cache=False).logits[:, :-1]  # (B, T - 1, V)
        return -token_logprobs(logits, batch["labels"][:, 1:]).sum() / denominator

    def parts(self) -> dict[str, nn.Module]:
        """{"policy": …, "critic": …}, without the critic if there is none."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})


def share_left(mask: Tensor) -> Tensor:
    """(n - t) / n before response token t = 0…n - 1 of n, (B, A) float32 of mask (B, A) bool, left-aligned; 0 outside it."""
    left = mask.flip(1).cumsum(1).flip(1)
    return left / mask.sum(1, keepdim=True).clamp(min=1)


class Reference(nn.Module):
    """Log-probs of the SFT model: a frozen copy; with LoRA the policy's own weights without its adapters."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
        return response_logprobs(self.model, tokens, starts, mask)[0]


def make_critic(config: Config, stage: Stage, policy: Any, reward_model: RewardModel | None) -> Any:
    """The critic by ppo.critic; only a head if the trunk is shared; None if advantages need no values."""
    settings = config.ppo
    if settings.advantages != "gae":
        return None
    if settings.shared_critic:
        head = ScalarHead(policy.config.hidden_size)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)  # random values would be noise in the advantages until they are unlearned
        return head
    if settings.critic == "random":
        return RewardModel(RewardConfig(trunk=policy.base_model.config))
    if settings.critic == "reward" and reward_model is not None:
        shared = reward_model.trunk if config.lora.share_trunk else nn.Module()
        return share_weights(reward_model, shared).requires_grad_(True).fold_calibration()
    if settings.critic == "reward":
        stage.say("no reward model with this tokenizer: the critic starts from the SFT model with a new head")
    if config.lora.share_trunk:
        return RewardModel.on_trunk(RewardConfig(trunk=policy.base_model.config), share_weights(policy.base_model))
    return RewardModel.from_causal_lm(policy)


def turn_off_dropout(model: nn.Module) -> nn.Module:
    """Dropout is off everywhere in this stage, in training mode too (gradient checkpointing needs that mode)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model

"""Relations between settings, checked before anything runs: all problems come at once."""

from collections.abc import Mapping
from typing import Any

from rlhf.config import Config, ImportConfig, PlanConfig
from rlhf.errors import UserError
from rlhf.processes import process_count
from rlhf.recipe import STAGES

CHOICES = {
    "model.positions": ("learned", "rotary"),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.mlp": ("gelu", "swiglu"),
    "pretrain.optimizer": ("adamw", "muon"),
    "ppo.advantages": ("gae", "rloo", "grpo"),
    "ppo.critic": ("reward", "sft", "random"),
    "ppo.missing_eos_rule": ("min", "replace", "subtract", "none"),
    "ppo.truncation": ("terminal", "bootstrap"),
    "ppo.reward_combine": ("sum", "mean", "min", "uncertainty"),
    "kl.penalty": ("reward", "loss"),
    "tracking.kind": ("wandb", "tensorboard", "jsonl", "off"),
    "report.form": ("svg", "png"),
    "device": ("auto", "cpu", "cuda"),
    "precision": ("auto", "float32", "bfloat16"),
    "deepspeed": ("none", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"),
    "chat.stage": ("pretrain", "sft", "ppo"),
    "export.stage": ("pretrain", "sft", "ppo"),
    "export.form": ("auto", "gpt2", "llama", "rlhf"),
    "sample.stage": ("pretrain", "sft", "ppo"),
    "sample.split": ("train", "dev", "test"),
    "sample.tool": ("native", "label_studio", "csv"),
    "sample.interface": ("pairwise", "ranker"),
}
PLAN_CHOICES = {"dtype": ("bf16", "fp32")}
IMPORT_CHOICES = {"pii": ("flag", "drop", "keep"), "duplicates": ("drop", "keep")}
POSITIVE = (
    "model.n_layer", "model.n_head", "model.width", "model.context_length", "tokenizer.vocab_size", "pretrain.tokens",
    "pretrain.global_batch_tokens", "pretrain.micro_batch_sequences", "pretrain.lr", "sft.epochs", "sft.batch_size",
    "sft.micro_batch_size", "launcher.processes", "sharding.bucket_elements",
    "sft.lr", "reward.epochs", "reward.batch_prompts", "reward.micro_batch_responses", "reward.lr", "ppo.episodes",
    "ppo.episodes_per_update", "ppo.minibatches", "ppo.epochs", "ppo.micro_batch_episodes", "ppo.clip_range",
    "ppo.value_clip_range", "ppo.max_grad_norm", "ppo.samples_every", "tracking.log_every", "lora.alpha",
    "ppo.lr", "ppo.critic_lr", "rollout.temperature", "rollout.max_new_tokens",
    "rollout.batch_size", "evaluate.prompts", "evaluate.samples", "checkpoints.keep", "kl.horizon",
    "gold.rounds", "rejection.prompts", "rejection.samples", "rejection.epochs", "evaluate.updates", "evaluate.processes",
    "sample.prompts", "sample.responses", "sample.temperature",
)  # fmt: skip
SHARES = (
    "ppo.gamma", "ppo.lam", "data.dev", "data.test", "data.held_out", "gold.second_labeler", "model.dropout",
    "sft.dropout",
)  # fmt: skip


def get(config: Any, key: str) -> Any:
    value = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check_config(config: Config | ImportConfig, command: str) -> None:
    """Raises: UserError that lists every setting that does not fit, with what was wanted."""
    problems = _import_problems(config) if isinstance(config, ImportConfig) else _problems(config, command)
    if isinstance(config, PlanConfig):
        problems += _plan_problems(config)
    if problems:
        raise UserError("; ".join(problems))


def _wrong_choices(config: Any, choices: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [
        f"{key}={get(config, key)}: want one of {', '.join(names)}"
        for key, names in choices.items()
        if get(config, key) not in names
    ]


def _import_problems(config: ImportConfig) -> list[str]:
    problems = _wrong_choices(config, IMPORT_CHOICES)
    for key in ("path", "out"):
        if getattr(config, key) is None:
            wanted = {"path": "a file, a folder or a hub id", "out": "the folder to write"}[key]
            problems.append(f"{key} is not set: want {wanted}")
    for key in ("processes", "max_prompts_per_user", "prefix_characters"):
        if getattr(config, key) < 1:
            problems.append(f"{key}={getattr(config, key)}: want 1 or more")
    if config.max_rejects < 0:
        problems.append(f"max_rejects={config.max_rejects}: want 0 or more")
    problems += [f"{key}={get(config, key)}: want 0 to 1" for key in ("dev", "test") if not 0 <= get(config, key) <= 1]
    if config.dev + config.test >= 1:
        problems.append(f"dev + test = {config.dev + config.test}: want less than 1, the rest trains")
    return problems


def _plan_problems(config: PlanConfig) -> list[str]:
    problems = _wrong_choices(config, PLAN_CHOICES)
    numbers = ("gpus", "gpu_memory_gb", "mfu", "bandwidth_gb", "peak_tflops", "sequence")
    problems += [
        f"{key}={get(config, key)}: want more than 0"
        for key in numbers
        if not (get(config, key) is None or get(config, key) > 0)
    ]
    if config.mfu > 1:
        problems.append(f"mfu={config.mfu}: want at most 1, a share of the peak")
    if not 0 <= config.memory_margin < 1:
        problems.append(f"memory_margin={config.memory_margin}: want 0 up to less than 1")
    context, answer = config.model.context_length, config.rollout.max_new_tokens
    if config.sequence is not None and config.sequence > context:
        problems.append(f"sequence={config.sequence}: want at most model.context_length={context}")
    if answer >= (config.sequence or context):
        problems.append(
            f"rollout.max_new_tokens={answer}: leaves no room for a prompt in {config.sequence or context} tokens"
        )
    if config.model.n_kv_head is not None and (
        config.model.n_kv_head < 1 or config.model.n_head % config.model.n_kv_head
    ):
        problems.append(
            f"model.n_kv_head={config.model.n_kv_head}: want a divisor of model.n_head={config.model.n_head}"
        )
    if config.model.mlp_width is not None and config.model.mlp_width < 1:
        problems.append(f"model.mlp_width={config.model.mlp_width}: want 1 or more")
    if config.lora.rank:
        problems.append(f"lora.rank={config.lora.rank}: the plan counts training of all weights: want 0")
    return problems


def _problems(config: Config, command: str) -> list[str]:
    problems = _wrong_choices(config, CHOICES)
    problems += [f"{key}={get(config, key)}: want more than 0" for key in POSITIVE if not get(config, key) > 0]
    problems += [f"{key}={get(config, key)}: want 0 to 1" for key in SHARES if not 0 <= get(config, key) <= 1]
    problems += _relations(config, command)
    return problems


def _relations(config: Config, command: str) -> list[str]:
    problems = []
    if config.model.n_head > 0 and config.model.width % config.model.n_head:
        problems.append(f"model.width={config.model.width}: want a multiple of model.n_head={config.model.n_head}")
    if config.gold.enabled and command in ("world", "label", "pipeline"):
        problems += _gold_relations(config, command)
    ppo, pretrain, context = config.ppo, config.pretrain, config.model.context_length
    if not 0 <= config.seed < 2**32:
        problems.append(f"seed={config.seed}: want 0 to {2**32 - 1}")
    if config.threads < 0:
        problems.append(f"threads={config.threads}: want 0 (as many as there are cores) or more")
    if config.data.dev + config.data.test >= 1:
        problems.append(
            f"data.dev + data.test = {config.data.dev + config.data.test}: want less than 1, the rest trains"
        )
    sequences = pretrain.global_batch_tokens // max(1, context)
    if context > 0 and pretrain.global_batch_tokens % context:
        problems.append(f"pretrain.global_batch_tokens={pretrain.global_batch_tokens}: want a multiple of "
                        f"model.context_length={context}")  # fmt: skip
    elif (
        sequences > 0
        and pretrain.micro_batch_sequences > 0
        and sequences % min(pretrain.micro_batch_sequences, sequences)
    ):
        problems.append(f"pretrain.micro_batch_sequences={pretrain.micro_batch_sequences}: want a divisor of the "
                        f"{sequences} sequences of a batch")  # fmt: skip
    if ppo.minibatches > 0 and ppo.episodes_per_update % ppo.minibatches:
        problems.append(f"ppo.minibatches={ppo.minibatches}: want a divisor of ppo.episodes_per_update="
                        f"{ppo.episodes_per_update}")  # fmt: skip
    if ppo.episodes < ppo.episodes_per_update:
        problems.append(f"ppo.episodes={ppo.episodes}: want at least one update of {ppo.episodes_per_update}")
    if not config.kl.coef >= 0 or config.kl.coef == float("inf"):
        problems.append(f"kl.coef={config.kl.coef}: want 0 or more, since a negative one rewards leaving the SFT model")
    if config.kl.target is not None and not config.kl.target > 0:
        problems.append(
            f"kl.target={config.kl.target}: want more than 0 nats a sequence, or null for a fixed coefficient"
        )
    if config.kl.target is not None and config.kl.coef == 0:
        problems.append("kl.coef=0: with kl.target it would stay 0: want more than 0, or kl.target=null")
    if config.kl.target is not None and ppo.episodes_per_update >= 5 * config.kl.horizon:
        problems.append(f"kl.horizon={config.kl.horizon}: want more than a fifth of ppo.episodes_per_update="
                        f"{ppo.episodes_per_update}, or one update could take kl.coef to 0")  # fmt: skip
    if command in ("ppo", "pipeline") and config.rollout.temperature != 1.0:
        problems.append(f"rollout.temperature={config.rollout.temperature}: PPO needs 1, anything else biases the KL")
    updates = ppo.episodes // ppo.episodes_per_update if ppo.episodes_per_update > 0 else 0
    if command in ("ppo", "pipeline") and 0 < updates <= ppo.critic_warmup_updates:
        problems.append(f"ppo.critic_warmup_updates={ppo.critic_warmup_updates}: leaves the policy none of the {updates} updates: "
                        "lower it, or raise ppo.episodes")  # fmt: skip
    problems += _ppo_relations(config)
    if config.study not in (None, "frontier", "details"):
        problems.append(f"study={config.study}: want frontier, details or null")
    if config.gold.enabled and config.rollout.max_new_tokens >= context:
        problems.append(f"rollout.max_new_tokens={config.rollout.max_new_tokens}: leaves no room for a prompt in "
                        f"model.context_length={context}")  # fmt: skip
    if config.gold.responses_min < 2 or config.gold.responses_min > config.gold.responses_max:
        problems.append("gold.responses_min: want 2 up to gold.responses_max")
    if not 0 <= config.gold.held_out_labelers <= 2:
        problems.append(f"gold.held_out_labelers={config.gold.held_out_labelers}: want 0 to 2")
    problems += _labeler_problems(config)
    problems += _sharding_problems(config)
    problems += _launch_problems(config, command)
    return problems


def _launch_problems(config: Config, command: str) -> list[str]:
    problems = []
    if command in ("pretrain", "pipeline") and config.deepspeed != "none" and config.pretrain.optimizer == "muon":
        problems.append(f"pretrain.optimizer=muon: works on whole matrices, which deepspeed={config.deepspeed} divides: want "
                        "pretrain.optimizer=adamw")  # fmt: skip
    processes = process_count()
    if processes > 1 and not (command in STAGES and STAGES[command].several_processes):
        remedy = "set launcher.processes instead" if command == "pipeline" else "start it without a launcher"
        problems.append(f"{command}: started as {processes} processes, works as one: {remedy}")
    return problems


def _sharding_problems(config: Config) -> list[str]:
    """What ZeRO-3, whose ranks hold slices of each weight, cannot do."""
    if not config.deepspeed.startswith("zero3"):
        return []
    problems = []
    if config.lora.rank:
        problems.append(
            f"lora.rank={config.lora.rank}: adapters do not go with deepspeed={config.deepspeed}: use zero2"
        )
    if config.reward.model is not None:
        problems.append(f"reward.model={config.reward.model}: a text classifier does not go with "
                        f"deepspeed={config.deepspeed}: use zero2")  # fmt: skip
    return problems


def _labeler_problems(config: Config) -> list[str]:
    weights = config.reward.labeler_weights
    if weights is None:
        return []
    if not isinstance(weights, dict):
        return [f"reward.labeler_weights={weights}: want a weight by name, as '{{anna: 2, ben: 0.5}}'"]
    return [
        f"reward.labeler_weights: {name} has {value!r}: want a number of 0 or more"
        for name, value in weights.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf")
    ]


def _gold_relations(config: Config, command: str) -> list[str]:
    gold, ppo, problems = config.gold, config.ppo, []
    if not gold.rounds <= gold.comparison_prompts <= gold.train_prompts:
        problems.append(f"gold.comparison_prompts={gold.comparison_prompts}: want at least gold.rounds={gold.rounds} and at "
                        f"most gold.train_prompts={gold.train_prompts}")  # fmt: skip
    if command == "pipeline" and gold.rounds > 1 and gold.early_episodes is not None:
        least = ppo.episodes_per_update * (1 + max(0, ppo.critic_warmup_updates))
        if gold.early_episodes < least:
            problems.append(f"gold.early_episodes={gold.early_episodes}: want at least {least}, which is one update of the "
                            "policy, or null")  # fmt: skip
    return problems


def _ppo_relations(config: Config) -> list[str]:
    ppo, problems = config.ppo, []
    for key in ("ppo.entropy_coef", "ppo.ptx_coef", "ppo.eval_every", "ppo.eval_prompts", "ppo.warmup_updates",
                "ppo.critic_warmup_updates", "lora.rank", "evaluate.best_of", "checkpoints.keep_best",
                "checkpoints.keep_every"):  # fmt: skip
        if get(config, key) < 0:
            problems.append(f"{key}={get(config, key)}: want 0 or more")
    for key in ("ppo.score_clip", "kl.stop", "kl.ceiling", "ppo.value_coef", "tracking.peak_tflops"):
        value = get(config, key)
        if value is not None and not value > 0:
            problems.append(f"{key}={value}: want more than 0, or null")
    if ppo.ema_decay is not None and not 0 < ppo.ema_decay < 1:
        problems.append(f"ppo.ema_decay={ppo.ema_decay}: want between 0 and 1, or null")
    if ppo.responses_per_prompt < 1 or ppo.episodes_per_update % max(1, ppo.responses_per_prompt):
        problems.append(f"ppo.responses_per_prompt={ppo.responses_per_prompt}: want a divisor of "
                        f"ppo.episodes_per_update={ppo.episodes_per_update}")  # fmt: skip
    if ppo.advantages in ("rloo", "grpo"):
        if ppo.responses_per_prompt < 2:
            problems.append(f"ppo.advantages={ppo.advantages}: compares responses to one prompt: "
                            "want ppo.responses_per_prompt of 2 or more")  # fmt: skip
        if ppo.shared_critic or ppo.critic_warmup_updates or ppo.truncation == "bootstrap":
            problems.append(f"ppo.advantages={ppo.advantages}: has no critic: want ppo.shared_critic=false, "
                            "ppo.critic_warmup_updates=0 and ppo.truncation=terminal")  # fmt: skip
    names = [ppo.rewards] if ppo.rewards is None or isinstance(ppo.rewards, str) else list(ppo.rewards)
    weights = ppo.reward_weights
    if not names:
        problems.append("ppo.rewards=[]: want at least one source, or null for the run's own reward model")
    if weights is not None and len(weights if isinstance(weights, list) else [weights]) != len(names):
        problems.append(f"ppo.reward_weights={weights}: want one number for each of ppo.rewards")
    return problems

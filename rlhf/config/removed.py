"""Names of earlier versions and of other programs, each with what to use instead. The error messages read this table."""

COMMANDS: dict[str, str] = {
    "next": "`rlhf generate generate.logprobs=true` writes the log-probs of answers; for other tokens use `rlhf.load(run).policy(stage)`",
    "study": "use `python scripts/studies/<kind>.py`, such as frontier.py, which has options of its own",
}
_MODEL = (
    "name a pretrained model with model.pretrained=<hub id, @revision allowed>, in `rlhf pipeline`, or in `rlhf tokenizer` and "
    "`rlhf pretrain`"
)
# A row of a whole group of settings has the group's name.
SETTINGS: dict[str, str] = {
    **dict.fromkeys(
        ("evaluate.benchmarks", "evaluate.benchmark_tasks", "evaluate.benchmark_limit", "evaluate.benchmark_batch"),
        "run lm-eval on the folder of `rlhf export`: lm_eval --model hf --model_args pretrained=<folder> --tasks <tasks>",
    ),
    "evaluate.instructions": "run lm-eval's task ifeval of checked instructions on the folder of `rlhf export`",
    "evaluate.overlap": "`rlhf corpus path=<corpus> evaluation=<prompts> out=…` finds what they share, and cuts it out",
    "evaluate.judge_prices": "multiply the tokens in evaluations/judge.json by your prices",
    "export.form": "leave it out: a model is written in the architecture of its weights, else the first that fits",
    "rate.safety": "use rate.least='{safe: 0.8}', which takes any quality",
    "reward.lm_coef": "leave it out; `rlhf sft` and `rlhf classify` have lm_coef",
    "reward.audit_check": "compare two reward models with evaluate.pairs",
    "columns.rating": "a rating alone trains nothing; the format kto and the records have ratings",
    "report.figures": "the page contains each figure as SVG",
    "fused_attention": "leave it out: attention is fused in every stage",
    "gold.rounds": "use rounds, which also does rounds of people's labels",
    "gold.early_episodes": "use round.early_episodes",
    "gold.later_reward_epochs": "use round.later_reward_epochs",
    "dpo.warmup_steps": "use dpo.warmup_fraction, a fraction of the run's steps",
    "ppo.warmup_updates": "use ppo.warmup_fraction, a fraction of the run's updates",
    "prefix_characters": "leave it out: prompts that share their first 200 characters stay in one split, as in the stages",
    "processes": "`rlhf import` reads with one process: leave it out",
    **dict.fromkeys(
        ("rollout.temperature", "ppo.temperature", "temperature"),
        "PPO samples at temperature 1; chat, generate and sample have a setting such as chat.temperature",
    ),
    "stop_token": "leave it out: a response ends at an end token; ppo.missing_eos_rule is for those without",
    "sequence": "use data.max_tokens, which the stages use too",
    "tracking.artifacts": "W&B gets metrics, configuration and tables; upload a finished model with `wandb artifact put`",
    "study": "use the options of `python scripts/studies/<kind>.py`, which --help lists",
    **dict.fromkeys(
        (
            "model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_path", "model_id", "base_model", "pretrained",
            "checkpoint", "hf_model", "name_or_path", "revision", "model_revision",
        ),
        _MODEL,
    ),
}  # fmt: skip

# Settings of TRL's PPO, transformers' Trainer and OpenRLHF: ours that computes the same. A name without a dot is one of the command's own
# settings, or of PPO's. docs/from_trl.md says where the values differ.
EQUIVALENTS: dict[str, str] = {
    "learning_rate": "lr", "actor_learning_rate": "lr", "critic_learning_rate": "critic_lr", "num_train_epochs": "epochs",
    "num_ppo_epochs": "epochs", "max_epochs": "epochs", "total_episodes": "episodes", "num_episodes": "episodes",
    "lr_scheduler_type": "schedule", "lr_scheduler": "schedule", "warmup_ratio": "warmup_fraction", "lr_warmup_ratio": "warmup_fraction",
    "adam_beta1": "beta1", "adam_beta2": "beta2", "l2": "weight_decay", "max_norm": "max_grad_norm", "run_name": "tracking.name",
    "wandb_run_name": "tracking.name", "wandb_group": "tracking.group", "wandb_project": "tracking.project", "wandb_org": "tracking.entity",
    "eval_steps": "eval_every", "early_stopping_patience": "sft.patience", "epsilon_high": "clip_range_high", "loss_type": "dpo.loss",
    "lora_target_modules": "lora.target_modules", "lora_dropout": "lora.dropout", "dynamic_filtering": "drop_tied_groups",
    "num_mini_batches": "minibatches", "batch_size": "episodes_per_update", "rollout_batch_size": "episodes_per_update",
    "train_batch_size": "minibatches", "vf_coef": "value_coef", "cliprange": "clip_range", "eps_clip": "clip_range",
    "cliprange_value": "value_clip_range", "value_clip": "value_clip_range", "lambd": "lam", "whiten_rewards": "whiten_advantages",
    "missing_eos_penalty": "missing_eos_score", "num_generations": "responses_per_prompt", "n_samples_per_prompt": "responses_per_prompt",
    "advantage_estimator": "advantages", "reward_clip_range": "score_clip", "response_length": "rollout.max_new_tokens",
    "max_new_tokens": "rollout.max_new_tokens", "max_completion_length": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens", "max_length": "data.max_tokens", "max_len": "data.max_tokens",
    "prompt_max_len": "data.max_tokens", "kl_coef": "kl.coef", "init_kl_coef": "kl.coef", "kl_target": "kl.target",
    "kl_horizon": "kl.horizon", "reward_model_path": "ppo.rewards", "reward_pretrain": "ppo.rewards", "sft_model_path": "model.pretrained",
    "prompt_data": "data.prompts", "use_peft": "lora.rank", "lora_r": "lora.rank", "lora_rank": "lora.rank", "lora_alpha": "lora.alpha",
    "save_steps": "checkpoints.every_seconds", "save_total_limit": "checkpoints.keep", "output_dir": "run", "save_path": "run",
    "bf16": "precision", "fp16": "precision", "use_vllm": "rollout.engine", "zero_stage": "deepspeed", "report_to": "tracking.kind",
    "use_wandb": "tracking.kind", "logging_steps": "tracking.log_every", "gradient_accumulation_steps": "memory.budget_gb",
    "per_device_train_batch_size": "memory.budget_gb", "micro_train_batch_size": "memory.budget_gb",
}  # fmt: skip


def replacement(key: str) -> str | None:
    """What to use instead of a setting of this table, or of one whose group is in it; None for any other."""
    return SETTINGS.get(key) or SETTINGS.get(key.partition(".")[0])

"""Names of earlier versions and of other programs, each with what to use instead. The error messages read this table."""

COMMANDS: dict[str, str] = {
    "study": "use `python scripts/studies/<kind>.py`, such as frontier.py, which has options of its own"
}
_MODEL = (
    "name a pretrained model with model.pretrained=<hub id, @revision allowed>, in `rlhf pipeline`, or in `rlhf tokenizer` and "
    "`rlhf pretrain`"
)
# A row of a whole group of settings has the group's name.
SETTINGS: dict[str, str] = {
    "--figures": "use report.figures=<folder>",
    "gold.rounds": "use rounds, which also does rounds of people's labels",
    "gold.early_episodes": "use round.early_episodes",
    "gold.later_reward_epochs": "use round.later_reward_epochs",
    "processes": "`rlhf import` reads with one process: leave it out",
    "rollout.temperature": "PPO samples at temperature 1; `rlhf chat` has chat.temperature",
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


def replacement(key: str) -> str | None:
    """What to use instead of a setting of this table, or of one whose group is in it; None for any other."""
    return SETTINGS.get(key) or SETTINGS.get(key.partition(".")[0])

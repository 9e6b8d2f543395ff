"""The charts of each stage: one table, for the report's page, W&B's workspace, TensorBoard's custom scalars and `rlhf watch`."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Chart(NamedTuple):
    """Curves in one frame. A name may contain `*` for one word, end in `=label`, or begin with `-` to exclude a metric."""

    title: str
    names: tuple[str, ...]
    half: bool = False  # half the width of the page instead of a third
    log_y: bool = False  # in W&B; the report has both axes
    x: str = ""  # the metric on the x axis, if it is not the stage's axis
    watch: str = ""  # the label in `rlhf watch`, which shows only charts that have one

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names without labels and exclusions."""
        return tuple(name.partition("=")[0] for name in self.names if not name.startswith("-"))

    def expand(self, metrics: Iterable[str]) -> list[tuple[str, str]]:
        """The (metric, label) pairs of this chart among the given metrics.

        A label is what follows `=`, else the split of an eval/ metric, else the last word of the name.
        """
        metrics, pairs = list(metrics), dict[str, str]()
        for name in self.names:
            pattern, _, label = name.partition("=")
            for metric in filter(re.compile(metric_pattern((pattern,))).fullmatch, metrics):
                words = metric.split("/")
                word = words[1].replace("heldout", "held-out") if words[0] == "eval" else words[-1]
                if f"-{metric}" not in self.names:
                    pairs.setdefault(metric, label or word.replace("_", " "))
        return list(pairs.items())


def metric_pattern(names: tuple[str, ...]) -> str:
    """A regular expression for exactly these metrics; `*` matches one word."""
    return "^(" + "|".join(name.replace("*", "[^/]+") for name in names) + ")$"


COST = (
    Chart("Throughput", ("time/tokens_per_s",)),
    Chart("Sequences per second", ("time/samples_per_s",)),
    Chart("Share of the device's peak (MFU)", ("time/mfu",)),
    Chart("Peak memory, MB", ("memory/peak_rss_mb=process", "memory/peak_gpu_mb=GPU")),
)
TRAINING = (Chart("Learning rate", ("optim/lr",)), Chart("Gradient norm", ("optim/grad_norm",)), *COST)
CHARTS: dict[str, tuple[Chart, ...]] = {
    "pretrain": (
        Chart("Loss", ("pretrain/loss=training", "eval/*/loss"), log_y=True, watch="loss"),
        Chart("Bits per byte", ("eval/*/bpb",), watch="bits per byte"),
        *TRAINING,
    ),
    "sft": (
        Chart("Loss", ("sft/loss=training", "eval/*/loss"), watch="loss"),
        *TRAINING,
    ),
    "reward": (
        Chart("Loss", ("reward/loss=training", "eval/*/loss"), watch="loss"),
        Chart("Pair accuracy", ("reward/accuracy=training", "eval/*/accuracy"), watch="accuracy"),
        Chart("Margin between winner and loser", ("reward/margin=training", "eval/*/margin")),
        Chart("What bounds the accuracy", ("eval/*/length_baseline", "eval/*/noise_ceiling", "eval/*/labeler_agreement",
                                           "eval/*/gold_order_accuracy")),
        Chart("Scores", ("reward/mean=mean", "reward/std=standard deviation", "eval/*/mean", "eval/*/std")),
        Chart("Loss of the language model", ("reward/lm_loss",)),
        *TRAINING,
    ),
    "ppo": (
        Chart("Reward", ("objective/scores=score", "objective/rlhf_reward=score less KL", "eval/*/scores", "objective/scores/*"),
              half=True, watch="reward"),
        Chart("KL to the SFT model", ("objective/kl=KL", "objective/kl_k3=k3 estimate", "eval/*/kl"),
              half=True, watch="KL"),
        Chart("Reward against the root of KL", ("objective/scores", "gold/total"), x="objective/sqrt_kl"),
        Chart("Gold score", ("gold/total=rollouts", "eval/*/gold/total"), watch="gold"),
        Chart("Gold score by part", ("gold/*", "-gold/total")),
        Chart("Win rate over SFT", ("eval/*/win_rate", "eval/*/win_rate_greedy")),
        Chart("KL coefficient", ("objective/kl_coef",)),
        Chart("KL penalty", ("objective/non_score_reward",)),
        Chart("Entropy of responses", ("objective/entropy=rollouts", "eval/*/entropy")),
        Chart("Entropy per token", ("policy/entropy_avg",)),
        Chart("Clipped tokens", ("policy/clipfrac_avg=policy", "val/clipfrac_avg=value")),
        Chart("Approximate KL of the update", ("policy/approxkl_avg",)),
        Chart("Largest policy ratio", ("policy/ratio_max",)),
        Chart("Explained variance of the critic", ("val/explained_var",)),
        Chart("Response length", ("rollout/response_len=rollouts", "eval/*/response_len"), watch="length"),
        Chart("Responses that ended", ("rollout/eos_fraction=rollouts", "eval/*/eos_fraction")),
        Chart("Policy loss", ("loss/policy_avg",)),
        Chart("Value loss", ("loss/value_avg",)),
        Chart("Loss of the pretraining term", ("loss/ptx_avg",)),
        Chart("Learning rates", ("optim/lr=policy", "optim/critic_lr=critic")),
        Chart("Gradient norms", ("optim/grad_norm=both", "optim/policy_grad_norm=policy",
                                 "optim/critic_grad_norm=critic", "optim/rl_grad_norm=policy without pretraining",
                                 "optim/ptx_grad_norm=pretraining term"), log_y=True),
        Chart("Seconds per update", ("time/rollout_s=sampling", "time/score_s=scoring", "time/update_s=update")),
        Chart("Sampled tokens per second", ("rollout/tokens_per_s",)),
        *COST,
    ),
    "classify": (
        Chart("Loss", ("classify/loss=training", "eval/*/loss"), watch="loss"),
        Chart("Loss of the language model", ("classify/lm_loss",)),
        Chart("Accuracy", ("classify/accuracy=training", "eval/*/accuracy", "eval/*/macro_f1"), watch="accuracy"),
        *TRAINING,
    ),
    "dpo": (
        Chart("Loss", ("dpo/loss=training", "eval/*/loss"), watch="loss"),
        Chart("Pair accuracy", ("dpo/accuracy=training", "eval/*/accuracy"), watch="accuracy"),
        Chart("Margin between winner and loser", ("dpo/margin=training", "eval/*/margin")),
        *TRAINING,
    ),
}  # fmt: skip
CHARTS["judge"] = CHARTS["reward"]


class TablePanel(NamedTuple):
    """A table that W&B shows, or a chart of it."""

    title: str
    table: str
    chart: str = ""  # a W&B preset
    fields: tuple[tuple[str, str], ...] = ()  # the preset's axes by the table's columns


# Tables that stages log, and their columns.
TABLES = {
    "samples": ("step", "id", "prompt", "response", "score", "kl", "length"),
    "calibration": ("gap", "curve", "share", "n"),
    "score_histogram": ("score", "model", "share"),
}
LINES = "wandb/lineseries/v0"
TABLE_PANELS = {
    "ppo": (TablePanel("The same held-out prompts over time", "samples"),),
    "reward": (
        TablePanel("Calibration: wins against score gap", "calibration", LINES,
                   (("step", "gap"), ("lineKey", "curve"), ("lineVal", "share"))),
        TablePanel("Scores of SFT and PPO", "score_histogram", LINES,
                   (("step", "score"), ("lineKey", "model"), ("lineVal", "share"))),
    ),
}  # fmt: skip

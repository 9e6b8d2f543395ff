"""The metrics that a stage may log, with unit, mask, reduction and meaning, and the charts that show them.

A writer refuses a name that the table lacks, so that code, W&B and the report agree. The charts are those of the
report's page, W&B's workspace and `rlhf watch`. `Sums` combines numbers over micro-batches and ranks from global sums,
not as a mean of means.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `name` may contain `<split>`, a lower-case word, and `<part>`, any name that a function or a source gives."""

    name: str
    unit: str  # "" for a pure number
    mask: str  # the entries that count; "-" if nothing is masked
    reduction: str  # a key of REDUCTIONS
    meaning: str


def _variance(total: float, squares: float, n: float) -> float:
    return squares / n - (total / n) ** 2


def _explained(error: float, error_squares: float, target: float, target_squares: float, n: float) -> float | None:
    whole = _variance(target, target_squares, n)
    return 1.0 - _variance(error, error_squares, n) / whole if whole > 0 else None


# The global sums that each reduction needs, in the order of `Sums.add`, and the number that they give.
REDUCTIONS: dict[str, tuple[tuple[str, ...], Callable[..., float | None]]] = {
    "mean": (("total", "count"), lambda total, n: total / n),
    "std": (("total", "squares", "count"), lambda *sums: math.sqrt(max(_variance(*sums), 0.0))),
    "explained": (("error", "error_squares", "target", "target_squares", "count"), _explained),
    "ess": (("total", "squares", "count"), lambda total, squares, n: total**2 / squares / n),
    "max": (("value",), lambda *values: math.nan if any(map(math.isnan, values)) else max(values)),
    "last": (("value",), lambda value: value),  # the newest, which is the same on every rank
}

_NATS_TOKEN, _NATS_SEQUENCE, _SHARE = "nats per token", "nats per sequence", "share"
_RESPONSE, _SEQUENCES, _PAIRS = "response tokens", "sequences", "ordered pairs"

# fmt: off
METRICS: tuple[Metric, ...] = (
    # x axes
    Metric("progress/step", "optimizer steps; updates in ppo", "-", "last", "x axis of every curve"),
    Metric("progress/episodes", "episodes", "-", "last", "global prompts or rollouts seen so far"),
    Metric("progress/tokens", "tokens", "-", "last", "global tokens seen so far"),
    # pretraining and SFT
    Metric("pretrain/loss", _NATS_TOKEN, "tokens of full blocks; of an encoder the masked ones", "mean",
           "next-token loss; of an encoder masked-token loss"),
    Metric("pretrain/accuracy", _SHARE, "pairs of pretrain.pairs", "mean", "pairs whose label has the higher logit"),
    Metric("sft/loss", _NATS_TOKEN, "response tokens, end of turn included", "mean",
           "loss on the demonstrated response, with sft.lm_coef times that on the prompt"),
    # reward model
    Metric("reward/loss", "nats per prompt", "prompts with an ordered pair", "mean", "ranking loss"),
    Metric("reward/accuracy", _SHARE, _PAIRS, "mean", "pairs whose winner has the higher score"),
    Metric("reward/margin", "score", _PAIRS, "mean", "score of the winner minus score of the loser"),
    Metric("reward/mean", "score", "responses", "mean", "mean score"),
    Metric("reward/std", "score", "responses", "std", "standard deviation of the scores"),
    Metric("calibration/gain", "", "SFT samples", "last", "factor that gives scores of SFT samples standard deviation 1"),
    Metric("calibration/shift", "score", "demonstrations", "last", "bias that makes demonstrations score 0 on average"),
    # DPO
    Metric("dpo/loss", "nats per prompt", "prompts with an ordered pair", "mean", "ranking loss of beta * (logp - logp_ref)"),
    Metric("dpo/accuracy", _SHARE, _PAIRS, "mean", "pairs whose winner gained more log-probability over SFT"),
    Metric("dpo/margin", "score", _PAIRS, "mean", "beta * (logp - logp_ref) of the winner minus that of the loser"),
    # distillation
    Metric("distill/loss", "", _RESPONSE, "mean", "weighted sum of the three losses"),
    Metric("distill/kl", _NATS_TOKEN, _RESPONSE, "mean", "KL of the student from the teacher, both at distill.temperature"),
    Metric("distill/lm_loss", _NATS_TOKEN, _RESPONSE, "mean", "loss on the teacher's sampled tokens"),
    Metric("distill/cosine", "", _RESPONSE, "mean", "cosine of the student's and the teacher's last hidden states"),
    # labelled tasks
    Metric("classify/loss", "nats per example", "examples", "mean", "-log P(y | x)"),
    Metric("classify/accuracy", _SHARE, "examples", "mean", "examples whose likeliest class is the label"),
    Metric("classify/lm_loss", _NATS_TOKEN, "tokens after the first", "mean",
           "mean over examples of the language model's loss on their rows"),
    # PPO: the objective
    Metric("objective/kl", _NATS_SEQUENCE, _RESPONSE, "mean", "mean over sequences of sum_t (logp_old - logp_ref)"),
    Metric("objective/kl_k3", _NATS_SEQUENCE, _RESPONSE, "mean", "mean over sequences of sum_t (exp(-d) - 1 + d), d = logp_old - logp_ref"),
    Metric("objective/scores", "score", _SEQUENCES, "mean", "score in the reward: after score_clip and the rule for a missing end token"),
    Metric("objective/scores/<part>", "score", _SEQUENCES, "mean", "score of one of several sources, or of a part that a function names"),
    Metric("objective/scores_std", "score", _SEQUENCES, "mean", "standard deviation over several reward models of a response's score"),
    Metric("objective/non_score_reward", "score", _SEQUENCES, "mean", "-kl_coef * KL; 0 if the KL is in the loss"),
    Metric("objective/rlhf_reward", "score", _SEQUENCES, "mean", "objective/scores + objective/non_score_reward"),
    Metric("objective/entropy", _NATS_SEQUENCE, _RESPONSE, "mean", "mean over sequences of -sum_t logp_old"),
    Metric("objective/kl_coef", "score per nat", "-", "last", "KL coefficient in force"),
    Metric("objective/sqrt_kl", "sqrt(nats per sequence)", _RESPONSE, "last",
           "sqrt(max(objective/kl, 0)), the distance that reward is plotted against"),
    # PPO: the update
    Metric("policy/approxkl_avg", _NATS_TOKEN, _RESPONSE, "mean", "0.5 * mean of (logp - logp_old)^2"),
    Metric("policy/clipfrac_avg", _SHARE, _RESPONSE, "mean", "tokens whose policy ratio was clipped"),
    Metric("policy/entropy_avg", _NATS_TOKEN, _RESPONSE, "mean", "full-softmax entropy"),
    Metric("policy/ratio_max", "", _RESPONSE, "max", "largest policy ratio rho"),
    Metric("loss/policy_avg", "", _RESPONSE, "mean", "clipped surrogate"),
    Metric("loss/value_avg", "score squared", _RESPONSE, "mean", "half the clipped squared error"),
    Metric("loss/ptx_avg", _NATS_TOKEN, "tokens of pretraining blocks", "mean", "pretraining loss of PPO-ptx"),
    Metric("val/clipfrac_avg", _SHARE, _RESPONSE, "mean", "tokens whose value was clipped"),
    Metric("val/explained_var", "", _RESPONSE, "explained", "1 - var(returns - values) / var(returns)"),
    # PPO: the rollouts
    Metric("rollout/eos_fraction", _SHARE, _SEQUENCES, "mean", "responses that ended by themselves"),
    Metric("rollout/dropped", _SHARE, _SEQUENCES, "mean", "responses of ppo.drop_tied_groups, which train nothing"),
    Metric("rollout/response_len", "tokens", _SEQUENCES, "mean", "response tokens, end of turn included"),
    Metric("rollout/tokens_per_s", "tokens per second", _RESPONSE, "last", "global tokens over seconds"),
    Metric("rollout/mismatch", _NATS_TOKEN, _RESPONSE, "mean", "mean of |logp_old - logp_sampled|: trainer against sampler"),
    Metric("rollout/mismatch_p99", _NATS_TOKEN, _RESPONSE, "max", "99% quantile of |logp_old - logp_sampled|"),
    Metric("rollout/mismatch_outside", _SHARE, _RESPONSE, "mean", "tokens with a ratio of trainer to sampler outside 0.8 to 1.25"),
    Metric("rollout/mismatch_ess", _SHARE, _RESPONSE, "ess", "effective sample size of the ratios over the number of tokens"),
    Metric("rollout/corrected", _SHARE, _RESPONSE, "mean", "tokens whose weight by ppo.sampler_correction is not 1"),
    Metric("custom/<part>", "", _SEQUENCES, "mean", "a metric of the functions in ppo.metrics"),
    Metric("gold/<part>", "gold score", _SEQUENCES, "mean", "the judge's own score of the rollouts"),
    # optimizer
    Metric("optim/lr", "", "-", "last", "learning rate; the policy's in ppo"),
    Metric("optim/grad_norm", "", "-", "last", "gradient norm before clipping, all parameters"),
    Metric("optim/critic_lr", "", "-", "last", "learning rate of the critic"),
    Metric("optim/policy_grad_norm", "", "-", "last", "gradient norm of the policy before clipping"),
    Metric("optim/critic_grad_norm", "", "-", "last", "gradient norm of the critic before clipping"),
    Metric("optim/steps", "steps", "-", "last", "optimizer steps of an update"),
    Metric("optim/rl_grad_norm", "", "-", "last", "gradient norm of the policy without the pretraining term"),
    Metric("optim/ptx_grad_norm", "", "-", "last", "gradient norm of the pretraining term before clipping"),
    # cost
    Metric("time/elapsed_s", "seconds", "-", "last", "wall time of the stage, earlier attempts included"),
    Metric("time/rollout_s", "seconds", "-", "max", "sampling, one update"),
    Metric("time/weights_s", "seconds", "-", "max", "sending the policy's weights to the sampler, its check included"),
    Metric("time/score_s", "seconds", "-", "max", "reward, reference and values, one update"),
    Metric("time/update_s", "seconds", "-", "max", "optimisation, one update"),
    Metric("time/tokens_per_s", "tokens per second", "-", "last", "global tokens over seconds"),
    Metric("time/samples_per_s", "samples per second", "-", "last", "global sequences over seconds"),
    Metric("time/mfu", _SHARE, "-", "last", "the models' own FLOPs over what all devices could do meanwhile"),
    Metric("memory/peak_rss_mb", "MB", "-", "max", "peak resident memory of a process"),
    Metric("memory/peak_gpu_mb", "MB", "-", "max", "peak memory that tensors took on a GPU"),
    # held-out, always under eval/
    Metric("eval/<split>/loss", "nats", "as the stage's own loss", "mean", "the stage's loss, held out"),
    Metric("eval/<split>/bpb", "bits per byte", "text tokens, no separators", "mean",
           "nats of text tokens over bytes of text, in bits, held out"),
    Metric("eval/<split>/accuracy", _SHARE, "ordered pairs; examples; pairs of pretrain.pairs", "mean",
           "as reward/accuracy, dpo/accuracy or classify/accuracy, held out"),
    Metric("eval/<split>/macro_f1", _SHARE, "examples", "mean", "mean over classes of F1"),
    Metric("eval/<split>/margin", "score", _PAIRS, "mean", "as reward/margin or dpo/margin, held out"),
    Metric("eval/<split>/mean", "score", "responses", "mean", "as reward/mean, held out"),
    Metric("eval/<split>/std", "score", "responses", "std", "as reward/std, held out"),
    Metric("eval/<split>/length_baseline", _SHARE, _PAIRS, "mean",
           "pairs whose winner is the longer response, or the shorter where that is right more often"),
    Metric("eval/<split>/noise_ceiling", _SHARE, _PAIRS, "mean", "accuracy that the labels' own noise allows"),
    Metric("eval/<split>/gold_order_accuracy", _SHARE, _PAIRS, "mean", "pairs ordered as the judge orders them"),
    Metric("eval/<split>/labeler_agreement", _SHARE, "pairs labelled twice", "mean", "labelers who agree"),
    Metric("eval/<split>/scores", "score", _SEQUENCES, "mean", "reward-model score; in ppo as objective/scores"),
    Metric("eval/<split>/kl", _NATS_SEQUENCE, _RESPONSE, "mean", "as objective/kl, held out"),
    Metric("eval/<split>/entropy", _NATS_SEQUENCE, _RESPONSE, "mean", "as objective/entropy, held out"),
    Metric("eval/<split>/eos_fraction", _SHARE, _SEQUENCES, "mean", "responses that ended by themselves"),
    Metric("eval/<split>/response_len", "tokens", _SEQUENCES, "mean", "response tokens"),
    Metric("eval/<split>/win_rate", _SHARE, "prompts", "mean", "responses preferred to SFT's; a tie counts half"),
    Metric("eval/<split>/win_rate_greedy", _SHARE, "prompts", "mean", "as win_rate, both models decoding greedily"),
    Metric("eval/<split>/gold/<part>", "gold score", _SEQUENCES, "mean", "the judge's own score, held out"),
)
# fmt: on

# The x axis of a stage's curves, if it is not progress/step.
X_AXES = {"pretrain": "progress/tokens", "ppo": "progress/episodes"}

_PLACEHOLDERS = {"<split>": r"[a-z][a-z0-9_\-]*", "<part>": ".+"}
_PATTERNS = [(re.compile(re.sub("<[a-z]+>", lambda m: _PLACEHOLDERS[m[0]], metric.name)), metric) for metric in METRICS]


@functools.lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """The row of the table that `name` belongs to, or None. `eval/dev/loss` finds `eval/<split>/loss`."""
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def _reduction(name: str) -> str:
    return find(name).reduction  # type: ignore[union-attr]


def check_names(names: Iterable[str]) -> None:
    """Raises: ValueError that lists every name that the table lacks."""
    if unknown := [repr(name) for name in names if find(name) is None]:
        raise ValueError(f"unknown metric {', '.join(unknown)}: add it to rlhf/runs/metric_table.py")


# --- sums over micro-batches and ranks ----------------------------------------------------------------------


class Sums:
    """Global sums of many metrics, added micro-batch by micro-batch and rank by rank, divided once."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}  # of "max" all values

    def add(self, name: str, *sums: Any) -> None:
        """Adds one micro-batch's sums, in the order of REDUCTIONS, such as `add("objective/kl", kl.sum(), len(kl))`:
        numbers, or tensors of one element, which stay on their device until the end. Raises: ValueError if the table
        lacks `name` or it takes other sums.
        """
        from rlhf.ops.masked import wide

        check_names([name])
        reduction = _reduction(name)
        if len(sums) != len(wanted := REDUCTIONS[reduction][0]):
            raise ValueError(f"{name}: reduction {reduction!r} takes ({', '.join(wanted)}), got {len(sums)} sums")
        self._merge(name, [wide(x.detach().reshape(())) if hasattr(x, "detach") else float(x) for x in sums])

    def _merge(self, name: str, new: list[Any]) -> None:
        before, reduction = self._sums.get(name, []), _reduction(name)
        if not before or reduction == "last":
            self._sums[name] = new
        elif reduction == "max":
            self._sums[name] = before + new
        else:
            self._sums[name] = [a + b for a, b in zip(before, new, strict=True)]

    def state(self) -> dict[str, list[float]]:
        """The sums as numbers. Those on a GPU are read together, since each read waits for it."""
        tensors = [value for sums in self._sums.values() for value in sums if hasattr(value, "detach")]
        if tensors:
            import torch

            read = dict(zip(map(id, tensors), torch.stack(tensors).tolist(), strict=True))
            self._sums = {name: [read.get(id(v), v) for v in sums] for name, sums in self._sums.items()}
        return {name: list(sums) for name, sums in self._sums.items()}

    def merge(self, state: Mapping[str, Sequence[float]]) -> None:
        for name, sums in state.items():
            self._merge(name, list(sums))

    def reduce(self) -> dict[str, float]:
        """One number per metric, in the order in which they were first added; without those of which nothing was counted."""
        reduced = dict[str, float]()
        for name, sums in self.state().items():
            needed, close = REDUCTIONS[_reduction(name)]
            if (needed[-1] != "count" or sums[-1] != 0) and (value := close(*sums)) is not None:
                reduced[name] = value
        return reduced


# --- charts -------------------------------------------------------------------------------------------------


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
        Chart("Accuracy of pretrain.pairs", ("pretrain/accuracy=training", "eval/*/accuracy")),
        *TRAINING,
    ),
    "sft": (Chart("Loss", ("sft/loss=training", "eval/*/loss"), watch="loss"), *TRAINING),
    "reward": (
        Chart("Loss", ("reward/loss=training", "eval/*/loss"), watch="loss"),
        Chart("Pair accuracy", ("reward/accuracy=training", "eval/*/accuracy"), watch="accuracy"),
        Chart("Margin between winner and loser", ("reward/margin=training", "eval/*/margin")),
        Chart("What bounds the accuracy", ("eval/*/length_baseline", "eval/*/noise_ceiling", "eval/*/labeler_agreement",
                                           "eval/*/gold_order_accuracy")),
        Chart("Scores", ("reward/mean=mean", "reward/std=standard deviation", "eval/*/mean", "eval/*/std")),
        *TRAINING,
    ),
    "ppo": (
        Chart("Reward", ("objective/scores=score", "objective/rlhf_reward=score less KL", "eval/*/scores", "objective/scores/*"),
              half=True, watch="reward"),
        Chart("KL to the SFT model", ("objective/kl=KL", "objective/kl_k3=k3 estimate", "eval/*/kl"), half=True, watch="KL"),
        Chart("Reward against the root of KL", ("objective/scores", "gold/total"), x="objective/sqrt_kl"),
        Chart("Gold score", ("gold/total=rollouts", "eval/*/gold/total"), watch="gold"),
        Chart("Gold score by part", ("gold/*", "-gold/total")),
        Chart("Win rate over SFT", ("eval/*/win_rate", "eval/*/win_rate_greedy")),
        Chart("Spread of the reward models", ("objective/scores_std",)),
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
        Chart("Trainer against sampler", ("rollout/mismatch=mean", "rollout/mismatch_p99=99%")),
        Chart("Trainer against sampler: ratios", ("rollout/mismatch_outside=outside 0.8 to 1.25",
                                                  "rollout/mismatch_ess=effective sample size", "rollout/corrected=corrected")),
        Chart("Policy loss", ("loss/policy_avg",)),
        Chart("Value loss", ("loss/value_avg",)),
        Chart("Loss of the pretraining term", ("loss/ptx_avg",)),
        Chart("Learning rates", ("optim/lr=policy", "optim/critic_lr=critic")),
        Chart("Gradient norms", ("optim/grad_norm=both", "optim/policy_grad_norm=policy",
                                 "optim/critic_grad_norm=critic", "optim/rl_grad_norm=policy without pretraining",
                                 "optim/ptx_grad_norm=pretraining term"), log_y=True),
        Chart("Seconds per update", ("time/rollout_s=sampling", "time/weights_s=of it sending weights",
                                     "time/score_s=scoring", "time/update_s=update")),
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
    "distill": (
        Chart("Loss", ("distill/loss=training", "eval/*/loss"), watch="loss"),
        Chart("KL to the teacher", ("distill/kl",), watch="KL"),
        Chart("Loss on the teacher's tokens", ("distill/lm_loss",)),
        Chart("Cosine of the hidden states", ("distill/cosine",)),
        *TRAINING,
    ),
}  # fmt: skip
CHARTS["judge"] = CHARTS["reward"]

"""PPO's metrics: of a rollout, of an update's cost and of the held-out prompts; further ones from outside; the samples table."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.data.chat_template import decode_response
from rlhf.data.records import shown_prompt
from rlhf.errors import UserError
from rlhf.ops.kl import kl_estimate
from rlhf.ops.masked import wide
from rlhf.ppo.experience import Experience, Rollout
from rlhf.ppo.rewards import Reward, spread_of
from rlhf.runs.metric_table import Sums
from rlhf.system.plugins import load_named
from rlhf.training.engine import Engine
from rlhf.training.usage import update_flops, usage_metrics

if TYPE_CHECKING:
    from rlhf.gold.truth import Truth

SAMPLES_SHOWN = 8  # rows of the samples table per evaluation

Measure = Callable[[Experience], Mapping[str, float]]  # means over the experience's episodes, by the metric's name


def episode_sums(rollout: Rollout, scores: Tensor) -> dict[str, float]:
    """Sums over the episodes of the figures that updates and held-out prompts have in common; k1 estimates the KL."""
    mask = rollout.response_mask
    return {
        "scores": scores.sum().item(),
        "kl": torch.where(mask, kl_estimate(rollout.logp_old, rollout.logp_ref, kind="k1"), 0.0).sum().item(),
        "entropy": -rollout.logp_old[mask].sum().item(),
        "eos_fraction": rollout.ended.sum().item(),
        "response_len": mask.sum().item(),
    }


def add_rollout_metrics(config: Config, sums: Sums, experience: Experience, kl_coef: float, reward: Reward) -> None:
    """The objective/… and rollout/… metrics, as sums over sequences."""
    rollout, scores, returns = experience.rollout, experience.scores, experience.returns
    mask, count = rollout.response_mask, len(scores)
    totals = episode_sums(rollout, scores)
    for name, total in totals.items():
        group = "rollout" if name in ("eos_fraction", "response_len") else "objective"
        sums.add(f"{group}/{name}", total, count)
    k3 = torch.where(mask, kl_estimate(rollout.logp_old, rollout.logp_ref, kind="k3"), 0.0).sum().item()
    sums.add("objective/kl_k3", k3, count)
    sums.add("objective/kl_coef", kl_coef)
    kl_reward = 0.0 if config.kl_in_loss else -kl_coef * totals["kl"]
    sums.add("objective/non_score_reward", kl_reward, count)
    sums.add("objective/rlhf_reward", totals["scores"] + kl_reward, count)
    parts: dict[str, Tensor] = getattr(reward, "parts", {})
    for name, part in parts.items():
        sums.add(f"objective/scores/{name}", part.sum().item(), count)
    if (spread := spread_of(parts)) is not None:
        sums.add("objective/scores_std", spread.sum().item(), count)
    if config.ppo.has_critic:
        target, error = wide(returns[mask]), wide((returns - rollout.values)[mask])
        moments = (error.sum(), error.square().sum(), target.sum(), target.square().sum())
        sums.add("val/explained_var", *(x.item() for x in moments), target.numel())


def add_times(
    config: Config, sums: Sums, rollout: Rollout, phases: dict[str, float], engine: Engine, frozen: Iterable, both: bool
) -> None:
    """Throughput, MFU and memory of an update. frozen: reference and rewards. both: policy and critic were trained."""
    model, ranks, total = engine.module, engine.ranks, sum(phases.values())
    for phase, spent in phases.items():
        sums.add(f"time/{phase}_s", spent)
    tokens = ranks.sum(rollout.response_mask.sum())
    sums.add("rollout/tokens_per_s", tokens / phases["rollout"])
    sums.add("time/tokens_per_s", tokens / total)
    sums.add("time/samples_per_s", config.ppo.episodes_per_update / total)
    whole, rows = ranks.sum(rollout.lengths.sum()), ranks.sum(len(rollout.lengths))
    passes = sums.state().get("optim/steps", [0.0])[0] / config.ppo.minibatches
    models = [m for source in frozen if isinstance(m := getattr(source, "model", None), nn.Module)]
    critic = [] if model.critic is None else [model.critic]
    trained = [model.policy, *critic] if both else critic
    flops = update_flops([model.policy, *critic, *models], trained, whole, whole / rows, passes)
    for name, value in usage_metrics(config, engine.device, flops, total, ranks.count).items():
        sums.add(name, value)


def load_measures(config: Config, truth: "Truth | None") -> list[Measure]:
    """The functions of ppo.metrics, and the true scores if there are any. Raises: UserError."""

    def mean_truth(experience: Experience) -> dict[str, float]:
        parts = true_scores(truth, experience)
        return {f"gold/{name}": sum(part[name] for part in parts) / len(parts) for name in (parts[0] if parts else ())}

    return [mean_truth, *(load_measure(name) for name in listed(config.ppo.metrics))]


def load_measure(name: str) -> Measure:
    """The metrics of a function `module:name` or `file.py:name` of an `Experience`, as custom/…"""
    function = load_named("metric", name, ("experience",))

    def measure(experience: Experience) -> dict[str, float]:
        returned = function(experience)
        if not isinstance(returned, Mapping):
            raise UserError(f"metric {name}: returned a {type(returned).__name__}: return {{name: number}}")
        found = {}
        for key, value in returned.items():
            if not re.fullmatch(r"[a-z0-9_-]+", str(key)):
                raise UserError(f"metric {name}: {key!r} is no name: use lower-case letters, digits, _ and -")
            try:
                found[f"custom/{key}"] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise UserError(f"metric {name}: {key} is {value!r}: return one number per name") from None
        return found

    return measure


def true_scores(truth: "Truth | None", experience: Experience) -> list[dict[str, float]]:
    """The true scores of each response, not used in training; empty if there is no true score."""
    records, ended = experience.records, experience.rollout.ended.tolist()
    if truth is None or not records or not truth.knows(records[0]):
        return []
    return [truth.judge(*episode) for episode in zip(records, experience.texts, ended, strict=True)]


def held_out_metrics(tokenizer: Any, truth: "Truth | None", experience: Experience) -> tuple[Sums, list[dict]]:
    """The eval/dev/… metrics, as sums over responses; and rows of the samples table, responses as text with score and KL."""
    rollout, scores, gold = experience.rollout, experience.scores, true_scores(truth, experience)
    sums, rows = Sums(), list[dict]()
    for name, total in episode_sums(rollout, scores).items():
        sums.add(f"eval/dev/{name}", total, len(scores))
    for name, value in (part for one in gold for part in one.items()):
        sums.add(f"eval/dev/gold/{name}", value, 1)
    for i, record in enumerate(experience.records[:SAMPLES_SHOWN]):
        ids = rollout.tokens[i, int(rollout.prompt_lengths[i]) : int(rollout.lengths[i])].tolist()
        kl = (rollout.logp_old[i] - rollout.logp_ref[i])[rollout.response_mask[i]].sum()
        row: dict[str, Any] = {"id": record.id, "prompt": shown_prompt(record.prompt)}
        row |= {"response": decode_response(tokenizer, ids), "score": scores[i].item(), "kl": kl.item()}
        rows.append(row | {"length": len(ids)} | ({"gold": gold[i]} if gold else {}))
    return sums, rows

"""PPO's metrics: of a rollout, of an update's cost and of the held-out prompts; and rows of the samples table."""

from typing import Any

import torch
from torch import Tensor

from rlhf.data.chat_template import decode_response, response_text
from rlhf.data.records import PromptRecord
from rlhf.data.tasks import shown_prompt
from rlhf.ops.kl import kl_estimate
from rlhf.ppo.rewards import CombinedReward
from rlhf.ppo.rollout import Prompts, Rollout
from rlhf.ppo.setup import PpoRun
from rlhf.runs.metrics import Sums
from rlhf.training.usage import update_flops, usage_metrics

SAMPLES_SHOWN = 8  # rows of the samples table per evaluation


def add_rollout_metrics(run: PpoRun, sums: Sums, rollout: Rollout, scores: Tensor, returns: Tensor) -> None:
    """The objective/… and rollout/… metrics, as sums over sequences."""
    mask, count = rollout.response_mask, len(scores)
    kl = torch.where(mask, kl_estimate(rollout.logp_old, rollout.logp_ref, kind="k1"), 0.0).sum().item()
    k3 = torch.where(mask, kl_estimate(rollout.logp_old, rollout.logp_ref, kind="k3"), 0.0).sum().item()
    sums.add("objective/kl", kl, count)
    sums.add("objective/kl_k3", k3, count)
    sums.add("objective/kl_coef", run.kl.coef)
    sums.add("objective/scores", scores.sum().item(), count)
    # with kl.penalty=loss the KL is not part of the reward
    kl_reward = -run.kl.coef * kl if run.config.kl.penalty == "reward" else 0.0
    sums.add("objective/non_score_reward", kl_reward, count)
    sums.add("objective/rlhf_reward", scores.sum().item() + kl_reward, count)
    sums.add("objective/entropy", -rollout.logp_old[mask].sum().item(), count)
    sums.add("rollout/eos_fraction", rollout.ended.sum().item(), count)
    sums.add("rollout/response_len", mask.sum().item(), count)
    if isinstance(run.reward, CombinedReward):
        for name, part in run.reward.parts.items():
            sums.add(f"objective/scores/{name}", part.sum().item(), count)
    if run.actor_critic.critic is None:
        return
    target, error = returns[mask].double(), (returns - rollout.values)[mask].double()
    moments = (error.sum(), error.square().sum(), target.sum(), target.square().sum())
    sums.add("val/explained_var", *(x.item() for x in moments), target.numel())


def add_gold_parts(run: PpoRun, sums: Sums, prompts: Prompts, rollout: Rollout) -> None:
    """The gold/… metrics; they are not used in training."""
    for parts in gold_parts(run, [record for record, _ in prompts], rollout):
        for part, value in parts.items():
            sums.add(f"gold/{part}", value, 1)


def add_times(run: PpoRun, sums: Sums, tokens: int, rollout: Rollout, with_policy: bool) -> None:
    """Seconds, throughput, the share of the device's peak, and peak memory of one update."""
    for phase in ("rollout", "score", "update"):
        sums.add(f"time/{phase}_s", run.spent[phase])
    sums.add("rollout/tokens_per_s", tokens / run.spent["rollout"])
    seconds = sum(run.spent.values())
    sums.add("time/tokens_per_s", tokens / seconds)
    sums.add("time/samples_per_s", run.config.ppo.episodes_per_update / seconds)
    model, settings = run.actor_critic, run.config.ppo
    whole, rows = run.ranks.sum(rollout.lengths.sum()), run.ranks.sum(len(rollout.lengths))
    passes = sums.state().get("optim/steps", [0.0])[0] / settings.minibatches
    flops = update_flops(
        model.policy, model.critic, run.frozen_models(), whole, whole / rows, passes=passes, with_policy=with_policy
    )
    for name, value in usage_metrics(run.config, run.device, flops, seconds, run.ranks.count).items():
        sums.add(name, value)


def held_out_sums(rollout: Rollout, scores: torch.Tensor, gold: list[dict[str, float]]) -> Sums:
    """The eval/dev/… metrics of responses to the held-out prompts, as sums."""
    sums, mask, count = Sums(), rollout.response_mask, len(scores)
    kl = torch.where(mask, rollout.logp_old - rollout.logp_ref, 0.0)
    sums.add("eval/dev/scores", scores.sum().item(), count)
    sums.add("eval/dev/kl", kl.sum().item(), count)
    sums.add("eval/dev/entropy", -rollout.logp_old[mask].sum().item(), count)
    sums.add("eval/dev/eos_fraction", rollout.ended.sum().item(), count)
    sums.add("eval/dev/response_len", mask.sum().item(), count)
    for parts in gold:
        for part, value in parts.items():
            sums.add(f"eval/dev/gold/{part}", value, 1)
    return sums


def gold_parts(run: PpoRun, records: list[PromptRecord], rollout: Rollout) -> list[dict[str, float]]:
    """The true scores of each response, not used in training; empty if there is no true score."""
    if run.truth is None or not records or not run.truth.knows(records[0]):
        return []
    texts = [response_text(run.tokenizer, ids) for ids in response_ids(rollout)]
    return [
        run.truth.judge(record, text, ended)
        for record, text, ended in zip(records, texts, rollout.ended.tolist(), strict=True)
    ]


def response_ids(rollout: Rollout) -> list[list[int]]:
    where = zip(rollout.tokens.tolist(), rollout.prompt_lengths.tolist(), rollout.lengths.tolist(), strict=True)
    return [row[start:end] for row, start, end in where]


def sample_rows(
    tokenizer: Any, records: list[PromptRecord], rollout: Rollout, scores: torch.Tensor, gold: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """Rows of the samples table: each response as text with score and KL, and the KL of each token."""
    rows = []
    for i, ids in enumerate(response_ids(rollout)):
        kl_tokens = (rollout.logp_old[i] - rollout.logp_ref[i])[rollout.response_mask[i]]
        rows.append(
            {
                "id": records[i].id,
                "prompt": shown_prompt(records[i].prompt),
                "response": decode_response(tokenizer, ids),
                "score": scores[i].item(),
                "kl": kl_tokens.sum().item(),
                "length": len(ids),
                "tokens": [tokenizer.decode([token]) for token in ids],
                "kl_tokens": [round(value, 4) for value in kl_tokens.tolist()],
            }
            | ({"gold": gold[i]} if gold else {})
        )
    return rows

"""A look at the policy while PPO trains: the same held-out prompts each time, with the same random numbers."""

from typing import Any

import torch

from rlhf.chat_template import decode_response
from rlhf.config import Config
from rlhf.data.prompts import encode_prompt_within
from rlhf.data.records import PromptRecord
from rlhf.data.splits import record_split
from rlhf.ppo.rollout import Rollout
from rlhf.tracking.metrics import Sums


def held_out_prompts(
    config: Config, records: list[PromptRecord], tokenizer: Any, shares: dict[str, float]
) -> list[tuple[PromptRecord, list[int]]]:
    """The first `ppo.eval_prompts` prompts of the dev split that fit the context, with their tokens."""
    room = tokenizer.model_max_length - config.rollout.max_new_tokens
    found: list[tuple[PromptRecord, list[int]]] = []
    for record in records:
        if len(found) == config.ppo.eval_prompts:
            break
        if record_split(record, config.data.split_seed, shares) == "dev":
            fitted = encode_prompt_within(tokenizer, record.prompt, room)
            if fitted is not None:
                found.append((record, fitted[0]))
    return found


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


def gold_parts(tokenizer: Any, records: list[PromptRecord], rollout: Rollout) -> list[dict[str, float]]:
    """The judge's view of each response, which trains nothing; empty outside the gold world."""
    if not records or "gold" not in records[0].metadata:
        return []
    from rlhf.gold.judge import judge
    from rlhf.gold.world import task_from_metadata

    texts = [decode_response(tokenizer, ids).strip() for ids in response_ids(rollout)]
    return [
        judge(task_from_metadata(record.metadata["gold"]), text, ended=ended)
        for record, text, ended in zip(records, texts, rollout.ended.tolist(), strict=True)
    ]


def response_ids(rollout: Rollout) -> list[list[int]]:
    where = zip(rollout.tokens.tolist(), rollout.prompt_lengths.tolist(), rollout.lengths.tolist(), strict=True)
    return [row[start:end] for row, start, end in where]


def sample_rows(
    tokenizer: Any, records: list[PromptRecord], rollout: Rollout, scores: torch.Tensor, gold: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """Rows of the samples table: each response as text with score and KL, and what each of its tokens cost in KL."""
    rows = []
    for i, ids in enumerate(response_ids(rollout)):
        kl_tokens = (rollout.logp_old[i] - rollout.logp_ref[i])[rollout.response_mask[i]]
        rows.append(
            {
                "id": records[i].id,
                "prompt": records[i].prompt[-1].content,
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

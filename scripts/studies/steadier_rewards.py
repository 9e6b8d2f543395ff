"""A reward, an advantage estimator and a reference for steadier.py, given to PPO as functions.

PPO's first source is the first reward model, from which the critic starts; `reward` adds what the variant is more than that.
"""

import copy
import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.data.chat_template import encode_prompts
from rlhf.data.records import Message
from rlhf.data.tokenizer import load_tokenizer
from rlhf.model.classifier import load_reward_model
from rlhf.model.interface import score
from rlhf.ops.gae import gae
from rlhf.ppo.models import Reference

SPREADS = 1.0  # `lower` takes away this many standard deviations of the models' scores
DECAY = 0.9  # of the averaged reference: over about 10 of the 16 updates


@functools.cache
def loaded(folder: str) -> Any:
    return load_reward_model(folder, torch.device("cpu")).requires_grad_(False)


@torch.no_grad()
def scores_of(folders: list[str], prompts: list[Any], tokens: list[list[int]]) -> Tensor:
    """Calibrated scores (models, responses)."""
    dialogues = [[Message(role=turn["role"], content=turn["content"]) for turn in prompt] for prompt in prompts]
    encoded = encode_prompts(load_tokenizer(folders[0]), dialogues)
    rows = [prompt + response for prompt, response in zip(encoded, tokens, strict=True)]
    return torch.stack([score(loaded(folder), rows) for folder in folders])


def reward(
    prompts: list[Any], responses: list[str], metadata: Any, tokens: list[list[int]], kind: str, models: Any, facts: str
) -> list[float]:
    """What a variant pays more than the first model."""
    known = json.loads(Path(facts).read_text(encoding="utf-8"))
    by_model = scores_of(list(models if kind in ("lower", "worst", "mean") else models[:1]), prompts, tokens)
    first = by_model[0]
    if kind == "mean":
        varied = by_model.mean(0)
    elif kind == "lower":
        varied = by_model.mean(0) - SPREADS * by_model.std(0)
    elif kind == "worst":
        varied = by_model.min(0).values
    elif kind == "averaged":  # the weights' average, recalibrated
        varied = scores_of([known["averaged"]], prompts, tokens)[0]
    elif kind == "bounded":  # slope 1 at SFT's mean, and within 2 of it
        varied = 4 * torch.sigmoid(first - known["sft_mean"]) - 2
    else:  # "even": without what SFT's answers earn by their length alone
        lengths, expected = known["by_length"]
        varied = first - torch.from_numpy(np.interp([len(ids) for ids in tokens], lengths, expected)).float()
    return (varied - first).tolist()


def two_lambdas(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95, group_size: int = 1
) -> tuple[Tensor, Tensor]:
    """Advantages by GAE with `lam`, the critic's targets with lambda 1: the return itself (VC-PPO, arXiv 2503.01491)."""
    return gae(rewards, values, mask, gamma, lam)[0], gae(rewards, values, mask, gamma, 1.0)[1]


def average_reference() -> None:
    """A plugin: a KL penalty towards an average of PPO's policies in place of the SFT model (Xu et al. 2024, arXiv 2404.10719).

    After each update: reference <- DECAY * reference + (1 - DECAY) * policy. The held-out KL is to SFT, as in every other arm. A run
    that was interrupted cannot resume: delete its folder.
    """
    from rlhf.stages import ppo

    one_update, average = ppo.one_update, list[Any]()

    def averaged(*, update: int, state: Any, reference: Any, **parts: Any) -> dict[str, float]:
        policy = state.engine.module.policy
        if not average:
            if update > 1:
                sys.exit("the average of the references is not in the checkpoint: delete the run's folder")
            average.append(Reference(copy.deepcopy(policy)).requires_grad_(False))
        metrics = one_update(update=update, state=state, reference=average[0], **parts)
        with torch.no_grad():
            for kept, new in zip(average[0].model.parameters(), policy.parameters(), strict=True):
                kept.lerp_(new, 1 - DECAY)
        return metrics

    ppo.one_update = averaged

"""Figures of each update that could warn of over-optimisation, given to PPO as a metric (ppo.metrics): see monitor.py.

The environment variable RLHF_MONITOR names a file with the folders of the reward models: the one that PPO optimises, then others.
"""

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from rlhf.model.classifier import load_reward_model
from rlhf.model.interface import score
from rlhf.ppo.experience import Experience


@functools.cache
def models() -> list[Any]:
    folders = json.loads(Path(os.environ["RLHF_MONITOR"]).read_text(encoding="utf-8"))
    return [load_reward_model(folder, torch.device("cpu")).requires_grad_(False) for folder in folders]


def repeated(text: str) -> float:
    """The share of a text's words that occurred before in it."""
    words = text.lower().split()
    return sum(count - 1 for count in Counter(words).values()) / max(1, len(words))


@torch.no_grad()
def signals(experience: Experience) -> dict[str, float]:
    rollout = experience.rollout
    rows = [tokens[:length] for tokens, length in zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True)]
    scores = torch.stack([score(model, rows) for model in models()]).double()
    lengths = rollout.response_mask.sum(1).double()
    nats = ((rollout.logp_old - rollout.logp_ref) * rollout.response_mask).sum()
    return {
        "held_out_model": scores[1:].mean().item(),
        "spread": scores.std(0).mean().item(),
        "disagreement": (scores[0] - scores[1:].mean(0)).mean().item(),
        "length": lengths.mean().item(),
        "repetition": sum(map(repeated, experience.texts)) / len(experience.texts),
        "kl_per_token": (nats / lengths.sum()).item(),
    }

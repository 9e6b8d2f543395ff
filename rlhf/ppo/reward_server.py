"""Scores from a reward model on another machine: `rlhf serve` there, its address in `ppo.rewards` here."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rlhf.errors import UserError
from rlhf.model.interface import Episodes
from rlhf.system.endpoint import FIRST_WAIT, Client

AT_ONCE = 8  # requests
MOST_RESPONSES = 64  # per request


class ServerReward:
    """The scores of `POST <url>/v1/score`, one request per prompt."""

    def __init__(self, url: str, key_variable: str | None, device: torch.device, first_wait: float = FIRST_WAIT):
        """Raises: UserError for an invalid address or key."""
        self.client = Client("ppo.rewards", url, "ppo.reward_key", key_variable, first_wait)
        self.device = device

    def __call__(self, episodes: Episodes) -> Tensor:
        groups: dict[int, list[int]] = {}  # the episodes of each prompt
        for i, record in enumerate(episodes.records):
            groups.setdefault(id(record), []).append(i)
        parts = [
            group[at : at + MOST_RESPONSES] for group in groups.values() for at in range(0, len(group), MOST_RESPONSES)
        ]
        scores = torch.zeros(len(episodes.records))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for part, found in zip(parts, pool.map(lambda part: self._ask(episodes, part), parts), strict=True):
                scores[part] = torch.tensor(found)
        return scores.to(self.device)

    def _ask(self, episodes: Episodes, part: list[int]) -> list[float]:
        prompt = [{"role": m.role, "content": m.content} for m in episodes.records[part[0]].prompt]
        body = {"prompt": prompt, "responses": [episodes.texts[i] for i in part]}
        found = self.client.post("v1/score", body, lambda content: read_scores(content, len(part)))
        if found is None:
            raise UserError(
                f"{self.client.named}: refused to score prompt {prompt[-1]['content'][:60]!r}: see the server's output"
            )
        return found


def read_scores(content: bytes, count: int) -> list[float]:
    """Raises: ValueError, LookupError or TypeError for a reply without `count` finite scores."""
    scores = [float(row["score"]) for row in json.loads(content)["data"]]
    if len(scores) != count or not all(map(math.isfinite, scores)):
        raise ValueError(f"{len(scores)} scores, want {count} finite ones")
    return scores

"""Reward sources of PPO: reward models, text classifiers and Python functions, alone or combined.

A source is called with `Episodes` and returns scores (B,) float32.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.model.batching import by_length, right_pad
from rlhf.model.interface import Episodes
from rlhf.ops.ppo import apply_missing_eos
from rlhf.system.plugins import load_named

Reward = Callable[[Episodes], Tensor]


class ModelReward:
    """A reward model with the policy's own tokenizer: the score at the last token.

    model(tokens, lengths) gives scores (B,) of right-padded rows.
    """

    def __init__(self, model: Any, pad: int, batch: int, device: torch.device):
        self.model, self.pad, self.batch, self.device = model, pad, batch, device

    @torch.no_grad()
    def __call__(self, episodes: Episodes) -> Tensor:
        scores = torch.zeros(len(episodes.responses), device=self.device)
        for group, tokens, lengths in self._groups(episodes):
            scores[group] = self.model(tokens, lengths).float()
        return scores

    @torch.no_grad()
    def by_token(self, episodes: Episodes) -> Tensor:
        """The part of the score that each response token earns, (B, A) float32; a row's sum is its score.

        It is the token's term of the mean that the model reads (reward.read_tokens). The terms of prompt tokens, which no
        token of the response changes, count to the first response token.
        """
        sizes = torch.tensor([len(ids) for ids in episodes.responses], device=self.device)
        parts = torch.zeros(len(sizes), int(sizes.max()), device=self.device)
        for group, tokens, lengths in self._groups(episodes):
            terms = self.model(tokens, lengths, by_token=True).float()  # (b, N), from the last token backwards
            at = sizes[group, None] - 1 - torch.arange(terms.shape[1], device=self.device)
            parts[group] = parts[group].scatter_add(1, at.clamp(min=0), terms)
        return parts

    def _groups(self, episodes: Episodes) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Right-padded rows of similar length, with their lengths and their indices."""
        rows = [p + r for p, r in zip(episodes.prompts, episodes.responses, strict=True)]
        for group in by_length([len(row) for row in rows], self.batch):
            tokens, lengths = right_pad([rows[i] for i in group], self.pad)
            yield group, tokens.to(self.device), lengths.to(self.device)


class TextReward:
    """A reward model with its own tokenizer: it gets prompt and response as text."""

    def __init__(self, model: Any, device: torch.device):
        self.model, self.device = model, device

    @torch.no_grad()
    def __call__(self, episodes: Episodes) -> Tensor:
        prompts = [record.prompt for record in episodes.records]
        return self.model.score_texts(prompts, episodes.texts, episodes.ended.tolist()).float().to(self.device)


class FunctionReward:
    """A Python function `module:name` or `file.py:name`, called as f(prompts, responses, metadata) -> one number per response.

    prompts: lists of {"role", "content"}; responses: strings; metadata: of the prompt's record.
    """

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device
        self.function = load_named("reward function", name, ("prompts", "responses", "metadata"))

    def __call__(self, episodes: Episodes) -> Tensor:
        prompts = [[{"role": m.role, "content": m.content} for m in record.prompt] for record in episodes.records]
        returned = self.function(prompts, episodes.texts, [record.metadata for record in episodes.records])
        scores = list(returned) if isinstance(returned, Iterable) else []
        if len(scores) != len(prompts):
            raise UserError(
                f"reward function {self.name}: returned {len(scores)} numbers for {len(prompts)} responses: "
                "return one per response, in order"
            )
        try:
            return torch.tensor([float(score) for score in scores], dtype=torch.float32, device=self.device)
        except (TypeError, ValueError) as error:
            raise UserError(f"reward function {self.name}: {error}: return one number per response") from None


class CombinedReward:
    """Several sources as one: score = sum_s w_s x_s. `parts` contains each source's unweighted scores of the last call."""

    def __init__(self, sources: dict[str, Reward], weights: list[float]):
        self.sources, self.weights = sources, weights
        self.parts: dict[str, Tensor] = {}

    def __call__(self, episodes: Episodes) -> Tensor:
        self.parts = {name: source(episodes) for name, source in self.sources.items()}
        return self._weighted(list(self.parts.values()))

    def by_token(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        """As `score_by_token`."""
        both = {name: score_by_token(source, episodes) for name, source in self.sources.items()}
        self.parts = {name: scores for name, (scores, _) in both.items()}
        return self._weighted(list(self.parts.values())), self._weighted([parts for _, parts in both.values()])

    def _weighted(self, of_sources: list[Tensor]) -> Tensor:
        return torch.stack([weight * one for weight, one in zip(self.weights, of_sources, strict=True)]).sum(0)


def score_by_token(reward: Reward, episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Scores (B,), and the parts of them that the response tokens earn, (B, A); the rest belongs to no single token."""
    if isinstance(reward, CombinedReward):
        return reward.by_token(episodes)
    if isinstance(reward, ModelReward):
        parts = reward.by_token(episodes)
        return parts.sum(1), parts
    scores = reward(episodes)
    return scores, scores.new_zeros(len(scores), max(map(len, episodes.responses)))


def adjust_scores(config: Config, scores: Tensor, ended: Tensor) -> Tensor:
    """The scores (B,) before the KL penalty: clipped, and lowered if there is no end token."""
    settings = config.ppo
    if settings.score_clip is not None:
        scores = scores.clamp(-settings.score_clip, settings.score_clip)
    return apply_missing_eos(scores, ended, settings.missing_eos_score, settings.missing_eos_rule)

"""Reward sources of PPO: reward models here or on a server, text classifiers and Python functions, alone or combined.

A source is called with `Episodes` and returns scores (B,) float32. It may have `by_token`, see `score_by_token`.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.model.batching import by_length, scoring_tokens
from rlhf.model.heads import RewardConfig, RewardModel
from rlhf.model.interface import Episodes, score, unwrapped
from rlhf.ops.ppo import apply_missing_eos
from rlhf.runs.folders import check_output, read_stage, stage_folder
from rlhf.runs.sources import reward_folder, reward_model_folder, reward_sources
from rlhf.system.endpoint import FIRST_WAIT, Client
from rlhf.system.plugins import is_address, is_function, load_named
from rlhf.training.adapters import load_adapters, share_weights
from rlhf.training.divided import load_reward
from rlhf.training.setup import check_tokenizer

Reward = Callable[[Episodes], Tensor]
AT_ONCE = 8  # requests to a server
MOST_RESPONSES = 64  # per request


class ModelReward:
    """A reward model: of the policy's tokens, or a classifier of text."""

    def __init__(self, model: Any, device: torch.device):
        self.model, self.device = model, device

    @property
    def bare(self) -> Any:
        """The model outside its engine."""
        return unwrapped(self.model)

    @property
    def read_tokens(self) -> int:
        return 0 if self.bare.reads_text else self.bare.config.read_tokens

    def __call__(self, episodes: Episodes) -> Tensor:
        return score(self.model, self.bare.rows(episodes)).to(self.device)

    @torch.no_grad()
    def by_token(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        """A token earns its term of the mean that the model reads (reward.read_tokens). The terms of prompt tokens, which
        do not depend on the response, are added to the first response token's.
        """
        sizes = torch.tensor([len(ids) for ids in episodes.responses], device=self.device)
        parts = torch.zeros(len(sizes), int(sizes.max()), device=self.device)
        if self.read_tokens == 0:
            return self(episodes), parts
        rows = self.bare.rows(episodes)
        for group in by_length([len(row) for row in rows], self.bare.together, scoring_tokens(self.bare)):
            batch = {name: x.to(self.device) for name, x in self.bare.collate([rows[i] for i in group]).items()}
            terms = self.model(**batch, by_token=True).float()  # (b, N), from the last token backwards
            at = sizes[group, None] - 1 - torch.arange(terms.shape[1], device=self.device)
            parts[group] = parts[group].scatter_add(1, at.clamp(min=0), terms)
        return parts.sum(1), parts


class FunctionReward:
    """A Python function `module:name` or `file.py:name`, called as f(prompts, responses, metadata) -> one number per response, or
    {part: one number per response}, whose sum is the score.

    prompts: lists of {"role", "content"}; responses: strings; metadata: of the prompt's record, with "reference", the answer that the
    data give. If it has arguments of these names: ended (bools), tokens (lists of ids), and the parameters.
    """

    def __init__(self, name: str, device: torch.device, parameters: Mapping[str, Any] | None = None):
        self.name, self.device, self.parameters = name, device, dict(parameters or {})
        offered = ("ended", "tokens", *self.parameters)
        self.function: Any = load_named("reward function", name, ("prompts", "responses", "metadata"), offered)
        self.parts: dict[str, Tensor] = {}  # of the last call

    def __call__(self, episodes: Episodes) -> Tensor:
        prompts = [[{"role": m.role, "content": m.content} for m in record.prompt] for record in episodes.records]
        offered = {"ended": episodes.ended.tolist(), "tokens": episodes.responses} | self.parameters
        returned = self.function(
            prompts,
            episodes.texts,
            [record.metadata for record in episodes.records],
            **{name: offered[name] for name in self.function.takes},
        )
        named = returned if isinstance(returned, Mapping) and returned else {"": returned}
        self.parts = {str(part): self._scores(values, len(prompts)) for part, values in named.items()}
        return torch.stack(list(self.parts.values())).sum(0)

    def _scores(self, values: Any, count: int) -> Tensor:
        scores = list(values) if isinstance(values, Iterable) else []
        if len(scores) != count:
            got = f"returned {len(scores)} numbers for {count} responses"
            raise UserError(f"reward function {self.name}: {got}: return one per response, in order")
        try:
            return torch.tensor([float(score) for score in scores], dtype=torch.float32, device=self.device)
        except (TypeError, ValueError) as error:
            raise UserError(f"reward function {self.name}: {error}: return one number per response") from None


class ServerReward:
    """The scores of a model that `rlhf serve` serves on another machine: of `POST <url>/v1/score`, one request per prompt."""

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
            text = prompt[-1]["content"][:60]
            raise UserError(f"{self.client.named}: refused to score prompt {text!r}: see the server's output")
        return found


def read_scores(content: bytes, count: int) -> list[float]:
    """Raises: ValueError, LookupError or TypeError for a reply without `count` finite scores."""
    scores = [float(row["score"]) for row in json.loads(content)["data"]]
    if len(scores) != count or not all(map(math.isfinite, scores)):
        raise ValueError(f"{len(scores)} scores, want {count} finite ones")
    return scores


class CombinedReward:
    """Several sources as one: score = sum_s w_s x_s. `parts` contains each source's unweighted scores of the last call."""

    def __init__(self, sources: dict[str, Reward], weights: list[float]):
        self.sources, self.weights = sources, weights
        self.parts: dict[str, Tensor] = {}

    def __call__(self, episodes: Episodes) -> Tensor:
        self.parts = {name: source(episodes) for name, source in self.sources.items()}
        return self._weighted(list(self.parts.values()))

    def by_token(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        both = {name: score_by_token(source, episodes) for name, source in self.sources.items()}
        self.parts = {name: scores for name, (scores, _) in both.items()}
        return self._weighted(list(self.parts.values())), self._weighted([parts for _, parts in both.values()])

    def _weighted(self, of_sources: list[Tensor]) -> Tensor:
        return torch.stack([weight * one for weight, one in zip(self.weights, of_sources, strict=True)]).sum(0)


def score_by_token(reward: Reward, episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Scores (B,), and the parts of them that the response tokens earn, (B, A); the rest belongs to no single token."""
    if hasattr(reward, "by_token"):
        return reward.by_token(episodes)
    scores = reward(episodes)
    return scores, scores.new_zeros(len(scores), max(map(len, episodes.responses)))


def sources_of(reward: Reward) -> list[Reward]:
    return list(reward.sources.values()) if isinstance(reward, CombinedReward) else [reward]


def parts_of(reward: Reward) -> dict[str, Tensor]:
    """The scores (B,) of the last call by source, and by part of a function that names several."""
    parts = dict(getattr(reward, "parts", {}))
    for name, source in reward.sources.items() if isinstance(reward, CombinedReward) else ():
        parts |= {f"{name}/{part}": scores for part, scores in parts_of(source).items()}
    return {name: scores for name, scores in parts.items() if name}


def adjust_scores(config: Config, scores: Tensor, ended: Tensor) -> Tensor:
    """The scores (B,) before the KL penalty: clipped, and lowered if there is no end token."""
    settings = config.ppo
    if settings.score_clip is not None:
        scores = scores.clamp(-settings.score_clip, settings.score_clip)
    return apply_missing_eos(scores, ended, settings.missing_eos_score, settings.missing_eos_rule)


def make_reward(
    config: Config,
    tokenizer: Any,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
    policy: Any = None,
) -> tuple[Reward, RewardModel | None]:
    """The reward, and its first reward model with the policy's tokenizer, from which the critic can start.

    policy: the model whose trunk the reward models share, with their own adapters; None: each has its own weights.
    """
    names, weights = reward_sources(config)
    sources: dict[str, Reward] = {}
    parameters, taken = config.ppo.reward_parameters or {}, set[str]()
    first: Any = None
    for name in names:
        if name is not None and is_address(name):
            sources[f"server_{len(sources)}"] = ServerReward(name, config.ppo.reward_key, device)
            say(f"rewards come from {name}")
            continue
        if name is not None and is_function(name):
            function = sources[f"function_{len(sources)}"] = FunctionReward(name, device, parameters)
            taken |= set(function.function.takes)
            say(f"rewards come from the function {name}")
            continue
        folder = reward_folder(config, name)
        if policy is None:
            model = load_reward(config, reward_model_folder(folder), device).requires_grad_(False)
        else:
            model = load_on_trunk(config, folder, policy)
        if not config.ppo.calibrated:
            model.calibrate(gain=1.0, shift=0.0)
        if model.reads_text:
            say(f"{folder}: scores text with its own tokenizer")
        else:
            check_tokenizer(folder, tokenizer)
            model.together, first = 2 * config.ppo.micro_batch_episodes, first or model
        sources[f"model_{len(sources)}"] = ModelReward(model, device)
    if unknown := sorted(set(parameters) - taken):
        raise UserError(f"ppo.reward_parameters: {unknown[0]}: no function of ppo.rewards has an argument of this name")
    if len(sources) == 1 and weights == [1.0]:
        return next(iter(sources.values())), first
    return CombinedReward(sources, weights), first


def load_on_trunk(config: Config, folder: Path, policy: Any) -> RewardModel:
    """The reward model of a stage's folder as adapters and a head on the policy's own trunk, the SFT model, frozen.

    Raises: UserError if it was not trained with adapters, or on another SFT model.
    """
    remedy = "or set lora.share_trunk=false"
    record, sft = read_stage(folder), stage_folder(config, "sft")
    if record is None or not (folder / "adapters").is_dir():
        none = f"{folder} was not trained with adapters"
        raise UserError(f"lora.share_trunk=true: {none}: train it with lora.rank, {remedy}")
    theirs, ours = record["parents"].get("sft", ""), check_output(sft)["hash"]
    if theirs != ours:
        other = f"{folder} was trained on another SFT model ({theirs[:8]}) than {sft} ({ours[:8]})"
        raise UserError(f"lora.share_trunk=true: {other}: train it on that one, {remedy}")
    settings = RewardConfig.from_pretrained(str(folder / "model"))
    with torch.random.fork_rng():
        model = RewardModel.on_trunk(settings, share_weights(policy.base_model))
    load_adapters(model, folder / "adapters", "reward")
    return model

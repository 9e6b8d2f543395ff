"""Reward sources of PPO: reward models here or on a server, text classifiers, raters and Python functions, alone or
combined.

A source is called with `Episodes` and returns scores (B,) float32. It may have `by_token`, see `score_by_token`.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.encoding import row_limit
from rlhf.data.reading import load_rules
from rlhf.data.records import PromptRecord
from rlhf.data.tokenizer import encode_texts
from rlhf.errors import UserError
from rlhf.model.batching import by_length, joins_rows, right_pad, scoring_tokens
from rlhf.model.classifier import load_reward_model
from rlhf.model.heads import RewardConfig, RewardModel
from rlhf.model.interface import Episodes, evaluating, lm, score, unwrapped
from rlhf.ops.ppo import apply_missing_eos
from rlhf.runs.folders import check_output, read_stage, reward_sources, stage_folder
from rlhf.runs.sources import reward_folder, reward_model_folder
from rlhf.system.endpoint import Client
from rlhf.system.files import read_json
from rlhf.system.plugins import is_address, is_function, load_named
from rlhf.training.adapters import load_adapters, share_weights
from rlhf.training.divided import load_reward
from rlhf.training.setup import check_tokenizer, load_frozen

Reward = Callable[[Episodes], Tensor]
AT_ONCE = 8  # requests to a server
MOST_RESPONSES = 64  # per request
TOGETHER = 64  # rows per forward of a rater


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
        """A token earns its term of the mean that the model reads (reward.read_tokens). The terms of prompt tokens,
        which do not depend on the response, are added to the first response token's.
        """
        sizes = torch.tensor([len(ids) for ids in episodes.responses], device=self.device)
        parts = torch.zeros(len(sizes), int(sizes.max()), device=self.device)
        if self.read_tokens == 0:
            return self(episodes), parts
        # (B, N), from the last token backwards
        terms = score(self.model, self.bare.rows(episodes), by_token=True).to(self.device)
        at = sizes[:, None] - 1 - torch.arange(terms.shape[1], device=self.device)
        parts = parts.scatter_add(1, at.clamp(min=0), terms)
        return parts.sum(1), parts


class FunctionReward:
    """A Python function (docs/extending.md): one number per response, or {part: one number per response}, whose sum counts."""

    def __init__(self, name: str, device: torch.device, parameters: Mapping[str, Any] | None = None):
        self.name, self.device, self.parameters = name, device, dict(parameters or {})
        offered = ("ended", "tokens", *self.parameters)
        self.function: Any = load_named("reward function", name, ("prompts", "responses", "metadata"), offered)
        self.parts: dict[str, Tensor] = {}  # of the last call, if it named any

    def __call__(self, episodes: Episodes) -> Tensor:
        prompts, metadata = map(turns_of, episodes.records), [record.metadata for record in episodes.records]
        offered = {"ended": episodes.ended.tolist(), "tokens": episodes.responses} | self.parameters
        taken = {name: offered[name] for name in self.function.takes}
        returned = self.function(list(prompts), episodes.texts, metadata, **taken)
        named = returned if isinstance(returned, Mapping) else {}
        self.parts = {str(part): self._scores(values, len(metadata)) for part, values in named.items()}
        return torch.stack(list(self.parts.values())).sum(0) if named else self._scores(returned, len(metadata))

    def _scores(self, values: Any, count: int) -> Tensor:
        try:
            scores = torch.tensor([float(score) for score in values], dtype=torch.float32, device=self.device)
        except (TypeError, ValueError) as error:
            raise UserError(f"reward function {self.name}: {error}: return one number per response") from None
        if len(scores) != count:
            got = f"returned {len(scores)} numbers for {count} responses"
            raise UserError(f"reward function {self.name}: {got}: return one per response, in order")
        return scores


def turns_of(record: PromptRecord) -> list[dict[str, str]]:
    return [turn.model_dump(include={"role", "content"}) for turn in record.prompt]


class ServerReward:
    """The scores of a model that `rlhf serve` serves on another machine: of `POST <url>/v1/score`, one request per prompt."""

    def __init__(self, url: str, key_variable: str | None, device: torch.device):
        """Raises: UserError for an invalid address or key."""
        self.client = Client("ppo.rewards", url, "ppo.reward_key", key_variable)
        self.device = device

    def __call__(self, episodes: Episodes) -> Tensor:
        groups: dict[int, list[int]] = {}  # the episodes of each prompt
        for i, record in enumerate(episodes.records):
            groups.setdefault(id(record), []).append(i)
        most = MOST_RESPONSES
        parts = [group[at : at + most] for group in groups.values() for at in range(0, len(group), most)]
        scores = torch.zeros(len(episodes.records))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for part, found in zip(parts, pool.map(lambda part: self._ask(episodes, part), parts), strict=True):
                scores[part] = torch.tensor(found)
        return scores.to(self.device)

    def _ask(self, episodes: Episodes, part: list[int]) -> list[float]:
        prompt = turns_of(episodes.records[part[0]])
        texts, ended = [episodes.texts[i] for i in part], [bool(episodes.ended[i]) for i in part]

        def read(content: bytes) -> list[float]:
            scores = [float(row["score"]) for row in json.loads(content)["data"]]
            if len(scores) != len(part) or not all(map(math.isfinite, scores)):
                raise ValueError(f"{len(scores)} scores, want {len(part)} finite ones")
            return scores

        found = self.client.post("v1/score", {"prompt": prompt, "responses": texts, "ended": ended}, read)
        if found is None:
            told = f"refused to score prompt {prompt[-1]['content'][:60]!r}: see the server's output"
            raise UserError(f"{self.client.named}: {told}")
        return found


RATED = "qualities.json"  # in the folder of a model that rates
LEVELS = 10  # the digits


class Quality(NamedTuple):
    """What a response is rated for: the text that the model reads after the response, and the levels that it can give."""

    text: str
    low: int = 0
    high: int = 1
    weight: float = 1.0  # without rate.weights
    least: float = 0.0  # without rate.least
    rule: bool = False  # 1: the response keeps the rule that the text states


class Rater:
    """The ratings of responses by a model that `rlhf rate` trained: a reward source, and what generate-and-rate picks
    by.

    The model reads prompt, response and a quality's text, and gives a level k, a digit:

        value = sum_k p_k (k - low) / (high - low)        p = softmax of the logits of the levels low … high

    which of a yes or no is P(1), and of a rule P(kept) = 1 - P(broken | rule, dialogue). A rule in rate.rules that the
    model was not trained on is read all the same.
    Source: Thoppilan et al. 2022, section 6 (ratings as text); Glaese et al. 2022, section 3.3 (a rule as text).
    """

    def __init__(self, config: Config, model: Any, tokenizer: Any, known: Mapping[str, Quality], device: torch.device):
        """known: what the model was trained to rate. Raises: UserError if the settings name something else."""
        self.config, self.model, self.device, self.pad = config, model, device, tokenizer.pad_token_id
        rules = load_rules("rate.rules", config.rate.rules)
        self.qualities = {name: Quality(text, rule=True) for name, text in rules.items()} | dict(known)
        self.weights = config.rate.weights or {name: one.weight for name, one in self.qualities.items() if one.weight}
        given = config.rate.given or {}
        named = {**self.weights, **(config.rate.least or {}), **given, **dict.fromkeys(given.values())}
        check_qualities("rate.weights, rate.least, rate.given", named, self.qualities)
        self.least: dict[str, float] = {}  # of candidates
        texts = encode_texts(tokenizer, [f"{quality.text} " for quality in self.qualities.values()])
        self.texts, self.limit = dict(zip(self.qualities, texts, strict=True)), row_limit(config, tokenizer)
        self.digits = [ids[-1] for ids in encode_texts(tokenizer, list(map(str, range(LEVELS))))]
        self.parts: dict[str, Tensor] = {}  # values of the last call
        self.seen = self.dropped = 0  # candidates, and those that the filter dropped

    def prompt(self, row: list[int], name: str) -> list[int]:
        """A prompt with its response and a quality's text; a prompt too long for the context is cut after its first token."""
        over = max(0, len(row) + len(self.texts[name]) + 1 - self.limit)
        return row[:1] + row[1 + over :] + self.texts[name]

    @torch.no_grad()
    def rate(self, rows: Sequence[list[int]], names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The value (B,) of each quality, on the CPU, of rows of tokens, each a prompt with its response.
        The qualities of one row go through the model together, so that their common beginning is read once
        (`LanguageModel.hidden`).
        """
        names, bare = list(self.qualities if names is None else names), unwrapped(self.model)
        asked = [[self.prompt(row, name) for name in names] for row in rows]
        logits, widths = torch.zeros(len(rows), len(names), LEVELS), [max(map(len, of_row)) for of_row in asked]
        with evaluating(bare), inference(self.config, self.device):
            for group in by_length(widths, TOGETHER, scoring_tokens(bare), [len(names)] * len(rows), joins_rows(bare)):
                tokens, lengths = right_pad([ids for i in group for ids in asked[i]], self.pad)
                last = torch.arange(len(tokens)) * tokens.shape[1] + lengths - 1
                found = lm(bare).logits(tokens.to(self.device), last.to(self.device))[:, self.digits]
                logits[group] = found.float().cpu().view(len(group), len(names), LEVELS)
        values = {}
        for i, name in enumerate(names):
            quality = self.qualities[name]
            chances = logits[:, i, quality.low : quality.high + 1].softmax(1)
            values[name] = (chances * torch.linspace(0, 1, chances.shape[1])).sum(1)
        return values

    def __call__(self, episodes: Episodes) -> Tensor:
        """Scores (B,): the weighted values, of rules minus P(broken); with `least`, candidates that lack a value come last."""
        rows = [prompt + response for prompt, response in zip(episodes.prompts, episodes.responses, strict=True)]
        rated = self.rate(rows, {**self.weights, **self.least})
        self.parts = {name: values.to(self.device) for name, values in rated.items()}
        terms = [weight * (rated[name] - int(self.qualities[name].rule)) for name, weight in self.weights.items()]
        scores = sum(terms, torch.zeros(len(rows)))
        if self.least:
            lacks = torch.stack([rated[name] - least for name, least in self.least.items()]).amin(0)
            self.seen, self.dropped = self.seen + len(lacks), self.dropped + int((lacks < 0).sum())
            scores = torch.where(lacks < 0, lacks - sum(map(abs, self.weights.values())), scores)
        return scores.to(self.device)


def check_qualities(setting: str, names: Iterable[str], known: Collection[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"{setting}: {unknown[0]}: is not rated: want some of {', '.join(sorted(known)) or 'none'}")


def load_rater(config: Config, folder: Path, tokenizer: Any, device: torch.device) -> Rater:
    """The rater of a rate stage's folder. Raises: UserError if it has no qualities, or another tokenizer."""
    check_tokenizer(folder, tokenizer)
    known = {name: Quality(**given) for name, given in read_json(folder / "model" / RATED).items()}
    if not known:
        raise UserError(f"{folder / 'model' / RATED}: missing: run `rlhf rate overwrite=true` again")
    return Rater(config, load_frozen(config, folder / "model", device), tokenizer, known, device)


class CombinedReward:
    """Several sources as one: score = sum_s w_s x_s. `parts`: each source's unweighted scores of the last call, then their own parts."""

    def __init__(self, sources: dict[str, Reward], weights: list[float]):
        self.sources, self.weights = sources, weights
        self.parts: dict[str, Tensor] = {}

    def __call__(self, episodes: Episodes) -> Tensor:
        return self.by_token(episodes)[0]

    def by_token(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        each = {name: score_by_token(source, episodes) for name, source in self.sources.items()}
        self.parts = {name: scores for name, (scores, _) in each.items()}
        for name, source in self.sources.items():
            self.parts |= {f"{name}/{part}": x for part, x in getattr(source, "parts", {}).items()}
        weighted = [[weight * x for x in both] for weight, both in zip(self.weights, each.values(), strict=True)]
        scores, earned = (torch.stack(of_sources).sum(0) for of_sources in zip(*weighted, strict=True))
        return scores, earned


def score_by_token(reward: Reward, episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Scores (B,), and the parts of them that the response tokens earn, (B, A); the rest belongs to no single token."""
    if hasattr(reward, "by_token"):
        return reward.by_token(episodes)
    scores = reward(episodes)
    return scores, scores.new_zeros(len(scores), max(map(len, episodes.responses)))


def sources_of(reward: Reward) -> list[Reward]:
    return list(reward.sources.values()) if isinstance(reward, CombinedReward) else [reward]


def spread_of(parts: Mapping[str, Tensor]) -> Tensor | None:
    """The standard deviation (B,) of scores over the reward models among the parts; None if there are fewer than two.
    A model with weight 0 takes part: it watches the policy that another one rewards.
    """
    scores = [part for name, part in parts.items() if name.startswith("model_")]
    return torch.stack(scores).std(0) if len(scores) > 1 else None


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
    divide: bool = False,
) -> tuple[Reward, RewardModel | None]:
    """The reward, and its first reward model with the policy's tokenizer, from which the critic can start.
    policy: the model whose trunk the reward models share, with their own adapters; None: each has its own weights.
    divide: whether the caller shards the models, which under ZeRO-3 then come in slices.
    """
    names, weights = reward_sources(config)
    sources: dict[str, Reward] = {}
    parameters, taken = config.ppo.reward_parameters or {}, set[str]()
    first: Any = None
    for name in names:
        source: Any
        if name and is_address(name):
            kind, source = "server", ServerReward(name, config.ppo.reward_key, device)
            say(f"rewards come from {name}")
        elif name and is_function(name):
            kind, source = "function", FunctionReward(name, device, parameters)
            taken |= set(source.function.takes)
            say(f"rewards come from the function {name}")
        elif (folder := reward_folder(config, name)).name == "rate":
            kind, source = "ratings", load_rater(config, folder, tokenizer, device)
            if not source.weights:
                raise UserError(f"rate.weights: flags have none: want weights of {', '.join(source.qualities)}")
            say(f"{folder}: rates responses by {source.weights}")
        else:
            kind, source = "model", load_model_reward(config, folder, tokenizer, device, policy, divide)
            if not config.ppo.calibrated:
                source.model.calibrate(gain=1.0, shift=0.0)
            if source.model.reads_text:
                say(f"{folder}: scores text with its own tokenizer")
            else:
                source.model.together, first = 2 * config.ppo.micro_batch_episodes, first or source.model
        sources[f"{kind}_{len(sources)}"] = source
    if unknown := sorted(set(parameters) - taken):
        raise UserError(f"ppo.reward_parameters: {unknown[0]}: no function of ppo.rewards has an argument of this name")
    if len(sources) == 1 and weights == [1.0]:
        return next(iter(sources.values())), first
    return CombinedReward(sources, weights), first


def load_model_reward(
    config: Config, folder: Path, tokenizer: Any, device: torch.device, policy: Any = None, divide: bool = False
) -> ModelReward:
    """The frozen model of a `reward_folder`; policy, divide: as in `make_reward`. Raises: UserError if its tokenizer is another."""
    files = reward_model_folder(folder)
    if policy is not None:
        model: Any = load_on_trunk(config, folder, policy)
    else:
        model = load_reward(config, files, device) if divide else load_reward_model(files, device)
    if not model.reads_text:
        check_tokenizer(folder, tokenizer)
    return ModelReward(model.requires_grad_(False), device)


def load_on_trunk(config: Config, folder: Path, policy: Any) -> RewardModel:
    """The reward model of a stage's folder as adapters and a head on the policy's own trunk, the SFT model, frozen. Raises: UserError."""
    sft, parents = stage_folder(config, "sft"), (read_stage(folder) or {}).get("parents", {})
    if not (folder / "adapters").is_dir() or parents.get("sft") != check_output(sft)["hash"]:
        want = f"{folder} was not trained with lora.rank on {sft}: train it so, or set lora.share_trunk=false"
        raise UserError(f"lora.share_trunk=true: {want}")
    settings = RewardConfig.from_pretrained(str(folder / "model"))
    with torch.random.fork_rng():
        model = RewardModel.on_trunk(settings, share_weights(policy.base_model))
    load_adapters(model, folder / "adapters", "reward")
    return model

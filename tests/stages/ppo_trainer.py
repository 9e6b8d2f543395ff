"""A PPO stage whose updates a test runs one by one."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from rlhf.engines.choosing import SamplingEngine
from rlhf.engines.sampling import make_sampler
from rlhf.gold.truth import make_truth
from rlhf.ops.masked import whiten
from rlhf.ppo import update as ppo_update
from rlhf.ppo.experience import Experience, Rollout
from rlhf.ppo.update import State
from rlhf.runs.metric_table import Sums
from rlhf.runs.stage import Stage, open_stage
from rlhf.stages import ppo


@dataclass
class Trainer:
    """The arguments of `one_update`."""

    config: Any
    stage: Stage
    policy: Any
    reference: Any
    reward: Any
    prompts: Any
    state: State
    estimate: Any
    measures: list
    truth: Any

    @property
    def engine(self) -> Any:
        return self.state.engine

    @property
    def actor_critic(self) -> Any:
        return self.state.engine.module

    @property
    def tokenizer(self) -> Any:
        return self.prompts.tokenizer

    def update(self, number: int = 1) -> dict[str, float]:
        return ppo.one_update(update=number, **vars(self.parts))

    @property
    def parts(self) -> ppo.Parts:
        return ppo.Parts(**{part.name: getattr(self, part.name) for part in fields(ppo.Parts)})

    @property
    def sampler(self) -> SamplingEngine:
        return make_sampler(self.config, self.policy, self.tokenizer)

    def evaluate(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        return ppo.evaluate_held_out(self.parts, self.truth)

    def collect(self, prompts: list, keys: list[tuple]) -> Rollout:
        """Steps 1 and 2: one response to each prompt, scored."""
        return ppo.respond(self.parts, prompts, keys).rollout

    def rollout(self, number: int = 1) -> Rollout:
        index = ppo.choose_prompts(self.config, len(self.prompts.train), number)
        keys = [("ppo", number, place) for place in range(len(index))]
        return self.collect([self.prompts.train[i] for i in index], keys)

    def respond(self, count: int = 16) -> Rollout:
        """Responses to the first prompts, one each."""
        return self.collect(self.prompts.train[:count], [("test", i) for i in range(count)])

    def train(self, rollout: Rollout, advantages: Any, returns: Any, chosen: list[int], **more: Any) -> Sums:
        """The gradients of one minibatch, neither clipped nor used for a step; returns its metrics."""
        sums = Sums()
        given = experience(rollout, advantages, returns)
        ppo_update.train_minibatch(self.config, given, chosen, self.state, sums, **more)
        return sums


def experience(rollout: Rollout, advantages: torch.Tensor, returns: torch.Tensor) -> Experience:
    count = len(rollout.tokens)
    return Experience([None] * count, [""] * count, rollout, rollout.scores, returns, advantages, returns)  # type: ignore[list-item]


def off_policy(rollout: Rollout, seed: int, scale: float) -> tuple[Rollout, torch.Tensor, torch.Tensor]:
    """The responses cut to 2, 3, 4, … tokens, with ratios that are not 1; with advantages and returns."""
    answers = torch.minimum(rollout.lengths - rollout.prompt_lengths, torch.arange(2, 2 + len(rollout.lengths)))
    mask = torch.arange(rollout.response_mask.shape[1]) < answers[:, None]
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return torch.where(mask, torch.randn(mask.shape, generator=generator) * scale, 0.0)

    logps, values = (torch.where(mask, x, 0.0) + noise(scale) for x in (rollout.logp_old, rollout.values))
    lengths = rollout.prompt_lengths + answers
    rollout = rollout._replace(lengths=lengths, response_mask=mask, logp_old=logps, values=values)
    return rollout, whiten(noise(1.0), mask), noise(1.0)


def make_trainer(config: Any, stage: Stage) -> Trainer:
    truth = make_truth(config)
    given = vars(ppo.load_parts(config, stage, truth))
    del given["sampler"]
    return Trainer(stage=stage, policy=given["state"].engine.module.policy, truth=truth, **given)


@contextmanager
def open_trainer(run: Any, *more: str) -> Iterator[Trainer]:
    config = run.config(*more)
    with open_stage(config, "ppo") as stage:
        yield make_trainer(config, stage)


@contextmanager
def restored(opened: Trainer) -> Iterator[Trainer]:
    """A trainer that shares the models of an open one; what it changes of them is undone at the end."""
    engine, config = opened.engine, deepcopy(opened.config)
    policy, before = engine.module.policy, {name: x.clone() for name, x in engine.module.state_dict().items()}
    try:
        yield replace(opened, config=config, state=State(engine, ppo.make_kl(config)))
    finally:
        engine.module.policy, engine.bfloat16, engine.losses = policy, False, []
        engine.recomputes = False
        engine.module.load_state_dict(before)
        engine.optimizer.state.clear()
        engine.optimizer.zero_grad()


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def changed(before: dict[str, torch.Tensor], module: nn.Module) -> bool:
    return any(not value.equal(before[name]) for name, value in module.named_parameters())

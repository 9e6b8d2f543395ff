"""Batches, their order and their parts, and `train`: the loop of every stage with a fixed set of items."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor

from rlhf.runs.metric_table import Sums
from rlhf.training.engine import Engine
from rlhf.training.loop import TrainingLoop

T = TypeVar("T")
Order = Callable[[int, int], Sequence[int]]  # (number of items, epoch) -> the indices in their order


@dataclass(frozen=True)
class Batches(Generic[T]):
    """Items in batches of `size`, in an order that depends on the epoch alone, so that a resumed run gets the same ones."""

    items: Sequence[T]
    size: int
    order: Order

    @property
    def per_epoch(self) -> int:
        """Batches of one pass over all items; the last one may be smaller."""
        return -(-len(self.items) // self.size)

    def after(self, step: int) -> Iterator[list[T]]:
        """The batches of steps `step` + 1 and later, without end."""
        for epoch in itertools.count(step // self.per_epoch):
            order = self.order(len(self.items), epoch)
            for start in range((step - epoch * self.per_epoch) * self.size, len(order), self.size):
                yield [self.items[i] for i in order[start : start + self.size]]
            step = (epoch + 1) * self.per_epoch

    def seen(self, step: int) -> int:
        """The number of items in the first `step` batches; each epoch counts them again."""
        epochs, rest = divmod(step, self.per_epoch)
        return epochs * len(self.items) + min(rest * self.size, len(self.items))


def accelerate_order(seed: int) -> Order:
    """accelerate's order of rows, which transformers' trainers use."""

    def order(count: int, epoch: int) -> Sequence[int]:
        sampler = SeedableRandomSampler(range(count), data_seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    return order


def shuffled_order(seed: str) -> Order:
    """A random order by (seed, epoch)."""

    def order(count: int, epoch: int) -> Sequence[int]:
        indices = list(range(count))
        random.Random(f"{seed}-{epoch}").shuffle(indices)
        return indices

    return order


def micro_batches(lengths: Sequence[int], rows: Sequence[int], most: int, rank: int, ranks: int) -> list[list[int]]:
    """One rank's micro-batches of a batch: indices of items of similar length, with at most `most` rows (but at least one item).

    Every rank has the same number of micro-batches, so that all take part in the same exchanges; a rank that has fewer gets
    empty ones. lengths, rows: of each item of the batch.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    parts: list[list[list[int]]] = [[] for _ in range(ranks)]
    for number, groups in enumerate(parts):
        for i in order[number::ranks]:
            if not groups or rows[i] + sum(rows[j] for j in groups[-1]) > most:
                groups.append([])
            groups[-1].append(i)
    return parts[rank] + [[]] * (max(map(len, parts)) - len(parts[rank]))


@dataclass(frozen=True)
class Objective(Generic[T]):
    """What a stage minimises: a sum over the items of a batch, divided by the batch's denominator, so that no split changes it.

    rows: an item's rows of tokens. loss: takes a micro-batch, the denominator, and sums to add statistics to; returns the
    micro-batch's part of the loss, and its tensors, which are kept if it is not finite. count: an item's share of the
    denominator. length: by which items are grouped; the longest row unless given.
    """

    rows: Callable[[T], Sequence[Sized]]
    loss: Callable[[list[T], int, Sums], tuple[Tensor, Mapping[str, Any]]]
    micro_batch_rows: int
    count: Callable[[T], int] = lambda item: 1
    length: Callable[[T], int] | None = None


def train_step(engine: Engine, batch: list[T], objective: Objective[T], sums: Sums, factor: float = 1.0) -> None:
    """One optimizer step on a batch, the same on any number of ranks. sums: of this rank. factor: on the learning rates."""
    engine.module.train()
    ranks, rows = engine.ranks, [objective.rows(item) for item in batch]
    lengths = list(map(objective.length, batch)) if objective.length else [max(map(len, of_item)) for of_item in rows]
    denominator, sizes = sum(map(objective.count, batch)), [len(of_item) for of_item in rows]
    for group in micro_batches(lengths, sizes, objective.micro_batch_rows, ranks.rank, ranks.count):
        # a rank with fewer micro-batches computes an item that does not count
        part = [batch[i] for i in group] or batch[:1]
        loss, tensors = objective.loss(part, denominator, sums if group else Sums())
        engine.backward(loss if group else loss * 0.0, tensors)
    for name, value in engine.step(factor).items():
        sums.add(name, value)
    sums.add("optim/lr", engine.rates[0] * factor)


def train(
    loop: TrainingLoop,
    batches: Batches[T],
    objective: Objective[T],
    factor: Callable[[int], float],
    *,
    averages: bool = True,
) -> None:
    """One optimizer step per batch, from the newest checkpoint to the loop's last step.

    factor: on the learning rates, by the number of steps taken. averages: whether a line of metrics is over the steps since the
    last line, or over its own step.
    """
    for step, batch in zip(loop.steps(), batches.after(loop.first), strict=False):
        if not averages:
            loop.sums = Sums()
        train_step(loop.engine, batch, objective, loop.sums, factor(step - 1))
        rows = [row for item in batch for row in objective.rows(item)]
        loop.tokens += sum(map(len, rows))
        loop.rows += len(rows)
        shown: dict[str, float] = {}
        if step % loop.stage.config.tracking.log_every == 0 or step == loop.total:
            logged = {name.rpartition("/")[2]: x for name, x in loop.log(step, episodes=batches.seen(step)).items()}
            shown = {name: logged[name] for name in ("loss", "accuracy") if name in logged}
        loop.bar.update(1, **shown)


def put(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch with its tensors on a device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}

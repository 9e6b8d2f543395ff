"""Batches, their order and their parts, and `train`: the loop of every stage with a fixed set of items."""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.config.stages import EvaluatedConfig
from rlhf.errors import UserError
from rlhf.model.batching import WORTH, by_length, scoring_tokens
from rlhf.ops.fast import return_freed_memory
from rlhf.runs.metric_table import Sums
from rlhf.runs.progress import format_figure
from rlhf.runs.stage import Stage
from rlhf.system.memory import used_bytes
from rlhf.training.engine import Engine
from rlhf.training.loop import TrainingLoop, open_loop
from rlhf.training.optim import make_schedule
from rlhf.training.usage import set_budget

T = TypeVar("T")
LINES = 20  # of metrics, at least, if there are as many steps
BATCHES_COUNTED = 16  # whose tokens tell how long a step takes
WARM_SECONDS = 1.0  # a forward that took less is timed again: the first one is slower
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
    return lambda count, epoch: torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def shuffled_order(seed: str) -> Order:
    """A random order by (seed, epoch)."""

    def order(count: int, epoch: int) -> Sequence[int]:
        indices = list(range(count))
        random.Random(f"{seed}-{epoch}").shuffle(indices)
        return indices

    return order


@dataclass(frozen=True)
class Objective(Generic[T]):
    """What a stage minimises: a sum over the items of a batch, divided by the batch's denominator, so that no split
    changes it.

    rows: an item's rows of tokens. loss: takes a micro-batch, the denominator, and sums to add statistics to; returns
    the micro-batch's part of the loss, and its tensors, which are kept if it is not finite. count: an item's share of
    the denominator. length: by which items are grouped; the longest row unless given. joined: as of `by_length`.
    """

    rows: Callable[[T], Sequence[Sized]]
    loss: Callable[[list[T], int, Sums], tuple[Tensor, Mapping[str, Any]]]
    micro_batch_rows: int
    count: Callable[[T], int] = lambda item: 1
    length: Callable[[T], int] | None = None
    joined: bool = False

    def tokens(self, item: T) -> int:
        """Padded tokens of an item, at most."""
        return int(self._length(item) * (1 / WORTH if self.joined else len(self.rows(item))))

    def padded(self, part: Sequence[T]) -> int:
        """Padded tokens of a micro-batch, at most."""
        return max(map(self.tokens, part), default=0) * len(part)

    def micro_batches(self, items: Sequence[T], tokens: int | None, rank: int, ranks: int) -> list[list[T]]:
        """One rank's micro-batches of a batch. Every rank has the same number, some of them empty: all take part in the exchanges."""
        lengths, rows = [self._length(item) for item in items], [len(self.rows(item)) for item in items]
        order = sorted(range(len(items)), key=lengths.__getitem__)
        parts = []
        for mine in (order[number::ranks] for number in range(ranks)):
            sizes = [lengths[i] for i in mine], self.micro_batch_rows, tokens, [rows[i] for i in mine], self.joined
            parts.append([[items[mine[i]] for i in group] for group in by_length(*sizes)])
        return parts[rank] + [[]] * (max(map(len, parts)) - len(parts[rank]))

    def _length(self, item: T) -> int:
        return self.length(item) if self.length else max(map(len, self.rows(item)))


def train_step(engine: Engine, batch: list[T], objective: Objective[T], sums: Sums, factor: float = 1.0) -> None:
    """One optimizer step on a batch, the same on any number of ranks. sums: of this rank. factor: on the learning rates."""
    engine.module.train()
    denominator = sum(map(objective.count, batch))
    for part in objective.micro_batches(batch, engine.most_tokens, engine.ranks.rank, engine.ranks.count):
        # a rank with fewer micro-batches computes an item that does not count
        loss, tensors = objective.loss(part or batch[:1], denominator, sums if part else Sums())
        engine.backward(loss if part else loss * 0.0, tensors)
    for name, value in engine.step(factor).items():
        sums.add(name, value)
    sums.add("optim/lr", engine.rates[0] * factor)


def trial(engine: Engine, objective: Objective[T], part: list[T]) -> float:
    """Seconds that a forward and backward of a micro-batch take; changes nothing. Not under ZeRO, which keeps gradients."""
    engine.module.train()
    started = time.monotonic()
    with torch.random.fork_rng():
        engine.backward(objective.loss(part, sum(map(objective.count, part)), Sums())[0])
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
    seconds = time.monotonic() - started
    engine.discard()
    return seconds


def measure(engine: Engine, objective: Objective[T], items: Sequence[T], most: int) -> float | None:
    """Bytes per padded token of a forward and backward of the largest items; None if the process had used more before."""
    part = objective.micro_batches(items, most, 0, 1)[0]
    before, peak = used_bytes(engine.device), used_bytes(engine.device, peak=True)
    trial(engine, objective, part)
    gradients = sum(4 * p.numel() for p in engine.module.parameters() if p.requires_grad)
    taken = used_bytes(engine.device, peak=True)
    return (taken - before - gradients) / objective.padded(part) if taken > peak else None


def say_time(loop: TrainingLoop, batches: Batches[T], objective: Objective[T]) -> None:
    """Print how long the steps take, by a forward and backward of the first batch's largest micro-batch."""
    engine, ranks = loop.engine, loop.engine.ranks
    if engine.sharded or loop.done == loop.total:
        return
    first = list(itertools.islice(batches.after(loop.done), BATCHES_COUNTED))
    parts = [objective.micro_batches(batch, engine.most_tokens, ranks.rank, ranks.count) for batch in first]
    part = max(parts[0], key=objective.padded) or first[0][:1]  # a rank may have none
    seconds = trial(engine, objective, part)
    if seconds < WARM_SECONDS:
        seconds = trial(engine, objective, part)
    return_freed_memory()
    tokens = objective.padded(part)
    per_step = sum(map(objective.padded, itertools.chain(*parts))) / len(parts)
    measured = f"{format_figure(seconds)} s of a forward and backward of {tokens:,} tokens"
    loop.say_time(seconds * per_step / tokens, measured)


def train(
    loop: TrainingLoop,
    batches: Batches[T],
    objective: Objective[T],
    factor: Callable[[int], float],
    *,
    averages: bool = True,
    largest: T | None = None,
    evaluate: Callable[[], dict[str, float]] | None = None,
    looks: EvaluatedConfig | None = None,
) -> None:
    """One optimizer step per batch, from the newest checkpoint to the loop's last step.

    factor: on the learning rates, by the number of steps taken. averages: whether a line of metrics is over the steps
    since the last line, or over its own step. largest: an item with as many tokens as any; looked for unless given.
    evaluate: the held-out figures, the loss among them, at the steps of `looks`, which may end training; then the
    module has the best weights.
    Raises: UserError if there is nothing to evaluate on.
    """
    look_every = looks and looks.eval_every
    if look_every and evaluate is None:
        name = loop.stage.name
        raise UserError(f"{name}.eval_every={look_every}: nothing is held out: raise data.dev, or leave it out")

    longest = max(map(objective.tokens, items := batches.items if largest is None else [largest]))
    together = min(batches.size, objective.micro_batch_rows)
    set_budget(loop.stage, loop.engine, longest, together, lambda most: measure(loop.engine, objective, items, most))
    say_time(loop, batches, objective)
    every = loop.stage.config.tracking.log_every or min(10, max(1, loop.total // LINES))
    for step, batch in zip(loop.steps(), batches.after(loop.done), strict=False):
        if not averages:
            loop.sums = Sums()
        train_step(loop.engine, batch, objective, loop.sums, factor(step - 1))
        rows = [row for item in batch for row in objective.rows(item)]
        loop.tokens += sum(map(len, rows))
        loop.rows += len(rows)
        shown: dict[str, float] = {}
        if step % every == 0 or step == loop.total:
            logged = {name.rpartition("/")[2]: x for name, x in loop.log(step, episodes=batches.seen(step)).items()}
            shown = {name: logged[name] for name in ("loss", "accuracy") if name in logged}
        loop.bar.update(1, **shown)
        last = step == loop.total and looks is not None and looks.patience is not None
        if looks and evaluate and look_every and (step % look_every == 0 or last):
            figures = evaluate()
            loop.tracker.log({f"eval/dev/{name}": value for name, value in figures.items()}, step=step)
            if loop.is_enough(step, figures["loss"], looks.patience):
                loop.total = loop.stage.steps = step
                break
    loop.restore_best()
    loop.engine.places.clear()
    return_freed_memory()  # of activations: what follows needs blocks of other sizes


@contextlib.contextmanager
def trained(
    stage: Stage, engine: Engine, batches: Batches[T], objective: Objective[T], epochs: int, settings: Any, **how: Any
) -> Iterator[TrainingLoop]:
    """A context in which the module is trained, by the schedule of `settings`; its loop still open. how: as in `train`."""
    steps = epochs * batches.per_epoch
    with open_loop(stage, engine, steps) as loop:
        train(loop, batches, objective, make_schedule(settings, steps), **how)
        yield loop


def evaluate_items(config: Config, engine: Engine, objective: Objective[T], items: Sequence[T]) -> dict[str, float]:
    """The objective's figures <stage>/… of items that are not trained on, by the rest of their names; empty without items."""
    engine.module.eval()
    sums = Sums()
    with inference(config, engine.device):
        for part in objective.micro_batches(items, scoring_tokens(engine.module), 0, 1):
            objective.loss(part, 1, sums)
    return {name.partition("/")[2]: value for name, value in sums.reduce().items()}


def put(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch with its tensors on a device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}

"""Training in batches of our own (reward model, classifier): their order, resuming, the optimizer step, the lines of metrics."""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from rlhf.runs.metrics import Sums
from rlhf.runs.stage import Stage
from rlhf.training.engine import Engine, ZeroEngine
from rlhf.training.loop import StageLoop, gradient_norm, refuse_nonfinite
from rlhf.training.state import put_random_state, read_state, write_checkpoint
from rlhf.training.usage import training_flops, usage_metrics


class Rows(Protocol):
    """An item of a batch."""

    @property
    def rows(self) -> Sequence[Sized]:
        """Its inputs of the model, as long as they have tokens."""


T = TypeVar("T", bound=Rows)


def batches(items: list[T], size: int, epochs: int, seed: str) -> Iterator[list[T]]:
    """Items in batches. The order depends only on (seed, epoch), so a resumed run gets the same batches."""
    for epoch in range(epochs):
        order = list(range(len(items)))
        random.Random(f"{seed}-{epoch}").shuffle(order)
        for start in range(0, len(order), size):
            yield [items[i] for i in order[start : start + size]]


def items_seen(count: int, size: int, step: int) -> int:
    """The number of items in the first `step` batches; each epoch counts them again."""
    epochs, rest = divmod(step, -(-count // size))
    return epochs * count + min(rest * size, count)


def train_batches(
    loop: StageLoop,
    engine: Engine,
    items: list[T],
    size: int,
    epochs: int,
    train_step: Callable[[int, list[T]], Sums],
) -> None:
    """One optimizer step per batch, `epochs` times over all items, from the newest checkpoint on.

    train_step: takes the number of a step and its batch, and gives this rank's sums.
    """
    stage, config, tokens = loop.stage, loop.stage.config, 0
    if loop.resume:
        state, notes = read_state(loop.resume)
        engine.restore(state)
        put_random_state(loop.resume)
        tokens = notes["tokens"]
    started, counted = time.monotonic(), tokens

    def save(step: int) -> None:
        write_checkpoint(stage, step, engine.state(), {"tokens": tokens})

    drawn = batches(items, size, epochs, f"{stage.name}-{config.seed}")
    for step, batch in zip(loop.steps(save), itertools.islice(drawn, loop.first, None), strict=True):
        metrics = engine.ranks.merge(train_step(step, batch)).reduce()
        tokens += sum(len(row) for item in batch for row in item.rows)
        if step % config.tracking.log_every == 0 or step == loop.total:
            now = time.monotonic()
            metrics |= speed_metrics(config, engine, tokens - counted, now - started)
            started, counted = now, tokens
            loop.tracker.log(metrics, step=step, episodes=items_seen(len(items), size, step), tokens=tokens)
        shown = {name.rpartition("/")[2]: value for name, value in metrics.items()}
        loop.bar.update(1, loss=shown["loss"], accuracy=shown["accuracy"])


def take_step(stage: Stage, engine: Engine, lr: float, max_grad_norm: float, inputs: Mapping[str, Tensor]) -> Sums:
    """The optimizer step after a batch's backward passes, and its sums. inputs: what is saved if a gradient is not finite."""
    parameters = list(engine.module.parameters())
    engine.reduce(parameters)
    norm = float("nan") if engine.sharded else gradient_norm(parameters).item()
    if not engine.sharded:
        refuse_nonfinite(stage, {"optim/grad_norm": norm}, inputs)
        nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    engine.step([lr] * len(engine.optimizer.param_groups))
    if isinstance(engine, ZeroEngine):  # ZeRO clips the gradient itself, and skips the step if the norm is not finite
        norm = engine.gradient_norm()
        refuse_nonfinite(stage, {"optim/grad_norm": norm}, inputs)
    sums = Sums()
    sums.add("optim/grad_norm", norm)
    sums.add("optim/lr", lr)
    return sums


def speed_metrics(config: Any, engine: Engine, tokens: int, seconds: float) -> dict[str, float]:
    """Throughput, the share of the device's peak, and peak memory since the last line."""
    flops = training_flops(engine.module, tokens, 0.0)  # rows are short: attention is not counted
    seconds = max(seconds, 1e-9)
    usage = usage_metrics(config, engine.device, flops, seconds, engine.ranks.count)
    return {"time/tokens_per_s": tokens / seconds} | usage

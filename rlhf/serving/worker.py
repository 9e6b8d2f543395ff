"""The process that runs the models: it draws the next token of all requests together, and runs other tasks between tokens.

It reads the web server's messages (`rlhf.serving.engine`) and sends one message per step for all sequences, so that sampling
waits neither for the network nor for Python's lock. A response waits in its model's queue, joins the running batch when
there is room for its keys and values, and leaves when it is finished or its client has gone.
"""

import gc
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.engines.likely import likeliest
from rlhf.engines.sampler import default_batch
from rlhf.engines.slots import COLUMN_BLOCK, Response, RunningBatch
from rlhf.errors import UserError
from rlhf.model.gpt import GPTForCausalLM
from rlhf.model.half import hold_frozen
from rlhf.model.packed import packed_weights, unpacked
from rlhf.serving.shading import shade
from rlhf.system.terminal import one_line, say

PREFILL_TOKENS = 2048  # tokens of prompts that are read between two tokens of the others; one prompt may be longer
Task = tuple[int, str, tuple]  # number, name and arguments


@dataclass(slots=True)
class News:
    """The results of one step."""

    # number, token, log-prob, alternatives
    drawn: list[tuple[int, int, float, list | None]] = field(default_factory=list)
    over: list[int] = field(default_factory=list)  # finished or cancelled
    failed: list[int] = field(default_factory=list)
    # of tasks: number, value, the user's mistake
    results: list[tuple[int, Any, str | None]] = field(default_factory=list)


class _Lane:
    """One model, with its running and waiting responses by number."""

    def __init__(self, model: Any, rows: int):
        self.model, self.rows = model, rows
        self.batch = RunningBatch(model, rows)
        self.running: dict[int, Response] = {}
        self.waiting: dict[int, Response] = {}
        self.fitting = lru_cache(lambda blocks: default_batch(model, blocks * COLUMN_BLOCK))


class Worker:
    """Runs models for the other end of a pipe, at most `rows` responses of each at a time."""

    def __init__(self, pipe: Connection, models: dict[str, Any], tasks: dict[str, Callable[..., Any]], rows: int):
        self.pipe, self.known_tasks, self.rows = pipe, tasks, rows
        self.lanes = {name: _Lane(model, rows) for name, model in models.items()}
        self.tasks: deque[Task] = deque()
        self.cancelled: set[int] = set()

    def run(self) -> None:
        """Run until the other end stops or is gone."""
        with ExitStack() as packed:
            for lane in self.lanes.values():
                if isinstance(lane.model, GPTForCausalLM):
                    packed.enter_context(packed_weights(lane.model, self.rows))
            try:
                while True:
                    while not self._has_work() or self.pipe.poll():
                        if (message := self.pipe.recv()) is None:
                            return
                        self._take(*message)
                    self.pipe.send(self._step())
            except (EOFError, OSError):  # the server was killed
                return
            finally:
                self.pipe.close()

    def _has_work(self) -> bool:
        return bool(self.tasks or self.cancelled) or any(lane.running or lane.waiting for lane in self.lanes.values())

    def _take(self, kind: str, *content: Any) -> None:
        if kind == "draw":
            model, asked = content
            self.lanes[model].waiting |= {number: Response(*fields) for number, fields in asked}
        elif kind == "cancel":
            self.cancelled.update(*content)
        else:
            self.tasks.append(content)  # type: ignore[arg-type]

    def _step(self) -> News:
        """One more token of everything that runs, and one task."""
        news = News()
        if self.tasks:
            number, name, arguments = self.tasks.popleft()
            try:
                news.results.append((number, self.known_tasks[name](*arguments), None))
            except UserError as error:
                news.results.append((number, None, str(error)))
            except Exception as error:  # one bad request must not stop the server for the others
                _report(error)
                news.results.append((number, None, ""))
        for lane in self.lanes.values():
            self._advance(lane, news)
        self.cancelled.clear()
        return news

    def _advance(self, lane: _Lane, news: News) -> None:
        """One more token of each running response of a model; new ones join first, and draw their first."""
        try:
            self._leave(lane, news)
            new = self._admit(lane)
            if lane.running:
                lane.batch.advance(new)
        except Exception as error:
            _report(error)
            news.failed += [*lane.running, *lane.waiting]
            lane.running, lane.waiting, lane.batch = {}, {}, RunningBatch(lane.model, self.rows)
            return
        for number, one in lane.running.items():
            news.drawn.append((number, one.tokens[-1], one.logprobs[-1], one.tops[-1] if one.alternatives else None))
        self._leave(lane, news)

    def _leave(self, lane: _Lane, news: News) -> None:
        """Remove finished and cancelled responses."""
        over = [number for number, one in lane.running.items() if one.finished or number in self.cancelled]
        for number in over:
            lane.batch.leave(lane.running.pop(number))
        news.over += over
        for number in self.cancelled & lane.waiting.keys():
            del lane.waiting[number]
            news.over.append(number)

    def _admit(self, lane: _Lane) -> list[Response]:
        """The first responses of the queue, as many as fit the batch and the memory."""
        new: list[Response] = []
        tokens = 0
        while lane.waiting and len(lane.running) < self.rows:
            number, response = next(iter(lane.waiting.items()))
            tokens += len(response.prompt)
            columns = max(one.columns for one in [*lane.running.values(), response])
            fits = len(lane.running) < lane.fitting(-(-columns // COLUMN_BLOCK))
            if lane.running and (not fits or (new and tokens > PREFILL_TOKENS)):
                break
            del lane.waiting[number]
            lane.running[number] = response
            new.append(response)
        return new


def _report(error: Exception) -> None:
    say(f"serve: {type(error).__name__}: {one_line(error)}", sys.stderr)


def work(pipe: Connection, config: Config, stages: list[tuple[str, Path, str]], rows: int) -> None:
    """The process's main function: load each (name, run folder, stage), send their sizes or the user's mistake, then serve them."""
    from rlhf.api import LoadedRun
    from rlhf.training.setup import set_up

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which closes the pipe
    try:
        device = set_up(config)
        runs = {folder: LoadedRun(folder, device.type, config.precision) for _, folder, _ in stages}
        models = {name: hold_frozen(config, runs[folder].policy(stage), device) for name, folder, stage in stages}
    except UserError as error:
        pipe.send(str(error))
        return
    with inference(config, device):
        tasks = make_tasks(models, {name: runs[folder] for name, folder, _ in stages})
        pipe.send({name: sizes_of(model) for name, model in models.items()})
        gc.collect()
        gc.freeze()  # the collector, which stops sampling, need not look at the models again
        Worker(pipe, models, tasks, rows).run()
    os._exit(0)  # nothing is left to save, and Python would need seconds to free the models


def sizes_of(model: Any) -> tuple[int, int | None]:
    """Tokens of the vocabulary, and of the context if the model has a limit."""
    return model.config.vocab_size, getattr(model.config, "max_position_embeddings", None)


def make_tasks(models: dict[str, Any], runs: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Other tasks of the models: scores of a run's reward model, the shading of a response's tokens, the most likely next tokens."""

    def score(name: str, messages: list[dict], responses: list[str]) -> list[float]:
        return runs[name].score([messages] * len(responses), responses)

    def shades(name: str, reference: str | None, prompt: list[int], response: list[int]) -> dict[str, Any]:
        return shade(models[name], reference and models[reference], prompt, response)

    def following(name: str, tokens: list[int], count: int) -> list[tuple[int, float]]:
        with unpacked(models[name]):
            return likeliest(models[name], tokens, count)

    return {"score": score, "shade": shades, "next": following}

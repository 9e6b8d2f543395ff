"""The served models, and the thread that runs them: it draws the next token of all requests together.

A response waits in its model's queue, joins the running batch between two tokens when there is room for its keys and
values, and leaves when it is finished or its client has gone. Scores and shading are computed between two tokens too.
torch releases Python's lock while it computes, so the web server answers meanwhile.
"""

import asyncio
import secrets
import sys
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.api import LoadedRun
from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.config.setting import LEAST_TEMPERATURE
from rlhf.data.chat_template import end_ids
from rlhf.engines.choosing import Choice
from rlhf.engines.running import Response, RunningBatch, TextStream
from rlhf.engines.sampling import packed
from rlhf.errors import UserError
from rlhf.model.linear import hold_frozen
from rlhf.serving.security import RefusedError
from rlhf.system.terminal import one_line, say
from rlhf.training.setup import set_up

LEAST_PAUSE, MOST_PAUSE = 0.02, 0.1  # seconds between two looks at a response in progress
LOOKS_PER_SECOND = 200  # of all responses together, within these bounds: of more, each comes in longer pieces
FAILED = "the model failed on this request"


class ServedModel:
    """One stage's policy, under the name run/stage."""

    def __init__(self, run: LoadedRun, stage: str, policy: Any):
        self.name, self.run, self.policy, self.tokenizer = f"{run.folder.name}/{stage}", run, policy, run.tokenizer
        self.policy_id = f"{self.name}@{run.record(stage)['hash'][:8]}"  # the policy's name in labels
        self.max_new_tokens = run.max_new_tokens(stage)  # tokens of a response, if the request does not say
        self.ends = frozenset(end_ids(self.tokenizer, base=stage == "pretrain"))
        # tokens of a prompt and its response
        self.context = int(getattr(policy.config, "max_position_embeddings", None) or self.tokenizer.model_max_length)

    def spelled(self, token: int) -> str:
        return self.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)


Models = dict[str, ServedModel]
Context = Callable[[], AbstractContextManager[Any]]


@contextmanager
def served_models(config: Config, folder: Path, stages: Sequence[str], rows: int) -> Iterator[tuple[Models, Context]]:
    """The named stages of a run, all finished ones if none are named, loaded for batches of `rows` responses; and the
    context in which they run.

    Raises: UserError if the run has none.
    """
    device = set_up(config)
    run = LoadedRun(folder, device.type, config.precision)
    chosen = [stage for stage in run.policies if not stages or stage in stages]
    missing = [stage for stage in stages if stage not in run.policies]
    if missing or not chosen:
        found = f"no finished {', '.join(missing) or 'policy'}: it has {', '.join(run.policies) or 'none'}"
        raise UserError(f"{folder}: {found}: run the stage, or choose others with serve.stages=…")
    with ExitStack() as weights:
        with inference(config, device):
            models = [ServedModel(run, stage, hold_frozen(config, run.policy(stage), device)) for stage in chosen]
            for model in models:
                weights.enter_context(packed(model.policy, rows))
        yield {model.name: model for model in models}, partial(inference, config, device)


class Chunk(NamedTuple):
    """New text of one response and the positions of its tokens; the reason if it has ended."""

    place: int
    text: str
    first: int
    last: int
    finish: str | None


@dataclass(slots=True, eq=False, kw_only=True)
class Generation(Response):
    """A response in progress, which the models' thread draws and a coroutine reads at its own pace."""

    model: ServedModel
    text: TextStream
    error: RefusedError | None = None
    cancelled: bool = False  # since the client has gone
    finish: str | None = None  # the reason of its end, once that is read

    def next_chunk(self, place: int) -> Chunk | None:
        finished = self.finished  # read first: the last token is added before
        seen, count = len(self.text.ids), len(self.logprobs)
        if self.error is not None:
            raise self.error
        complete = finished and count == len(self.tokens)
        if count == seen and not (complete or self.cancelled):
            return None
        piece = self.text.add(self.tokens[seen:count], complete)
        if self.text.stopped or complete or self.cancelled:
            self.finish = "length" if complete and not (self.text.stopped or self.ended) else "stop"
            self.cancelled = True  # also if a stop string ended it
        return Chunk(place, piece, seen, len(self.text.ids), self.finish)


class Completion:
    """The responses to one request, `n` to each prompt, which is given with its model and the key of its random
    numbers.

    most: the largest number of tokens of a response; None: as the model's run. `close` always frees the places.
    Raises: RefusedError if the responses do not fit the model's context, the server's limits or its queue.
    """

    def __init__(
        self,
        thread: "ModelThread",
        prompts: Sequence[tuple[ServedModel, list[int], tuple]],
        *,
        n: int = 1,
        most: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        stops: tuple[str, ...] = (),
        seed: int | None = None,
    ):
        temperature = 1.0 if temperature is None else temperature
        greedy = temperature < LEAST_TEMPERATURE
        choice = Choice(1.0 if greedy else temperature, top_p or 1.0, greedy=greedy)
        self.thread, seed = thread, secrets.randbits(32) if seed is None else seed
        self.prompt_tokens = sum(len(ids) for _, ids, _ in prompts)
        self.generations: list[Generation] = []
        for model, ids, key in prompts:
            room, limit = model.context - len(ids), thread.most_tokens
            if most is not None and most > limit:
                raise RefusedError(400, f"max_tokens={most}: this server allows at most {limit}", "max_tokens")
            length = min(model.max_new_tokens, room) if most is None else most
            if room < 1 or length > room:
                more = f" and max_tokens is {most}" if most is not None else ""
                message = f"the model's context is {model.context} tokens: the prompt has {len(ids)}{more}: shorten it"
                raise RefusedError(400, message, "messages", "context_length_exceeded")
            for j in range(n):
                text = TextStream(model.tokenizer, model.ends, stops)
                how = ids, choice, seed, (*key, j), length, model.ends
                self.generations.append(Generation(*how, model=model, text=text))
        thread.submit(self.generations)

    def close(self) -> None:
        for one in self.generations:
            one.cancelled = True

    async def chunks(self, gone: Callable[[], Awaitable[bool]] | None = None) -> AsyncIterator[Chunk]:
        """The responses piece by piece, in the order of arrival; the last chunk of each has the reason of its end.
        gone: whether the client has disconnected, which ends the responses.

        Raises: RefusedError.
        """
        while any(one.finish is None for one in self.generations):
            await asyncio.sleep(min(max(LEAST_PAUSE, len(self.thread) / LOOKS_PER_SECOND), MOST_PAUSE))
            if gone is not None and await gone():
                self.close()
            for place, one in enumerate(self.generations):
                if one.finish is None and (chunk := one.next_chunk(place)) is not None:
                    yield chunk


class Queue:
    """The waiting and the running responses of one model; the running ones are drawn together, at most `rows`."""

    def __init__(self, policy: Any, rows: int, lock: Any):
        self.policy, self.rows, self.lock = policy, rows, lock
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.batch = RunningBatch(policy, rows)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def step(self) -> None:
        """One more token of each running response; waiting ones join first, and draw their first."""
        try:
            with self.lock:
                self._remove()
                new = self.batch.fitting(list(self.waiting))
                self.running += [self.waiting.popleft() for _ in new]
            if self.running:
                self.batch.advance(new)
            with self.lock:
                self._remove()
        except Exception as error:  # one bad request must not stop the server for the others
            say_failure(error)
            with self.lock:
                for one in (*self.running, *self.waiting):
                    one.error = RefusedError(500, FAILED)
                self.running.clear()
                self.waiting.clear()
            self.batch = RunningBatch(self.policy, self.rows)

    def _remove(self) -> None:
        for one in [one for one in self.running if one.finished or one.cancelled]:
            self.batch.leave(one)
            self.running.remove(one)
        self.waiting = deque(one for one in self.waiting if not one.cancelled)


class ModelThread:
    """Runs models, at most `rows` responses of each at a time; up to `limit` more wait.

    most_tokens: the largest max_tokens of a request. context: in which the models run, entered and left in their
    thread.
    """

    def __init__(self, models: Models, rows: int, limit: int, most_tokens: int, context: Context = nullcontext):
        self.models, self.rows, self.limit, self.most_tokens = models, rows, limit, most_tokens
        self.lock = threading.Lock()  # of what follows
        self.queues = {name: Queue(one.policy, rows, self.lock) for name, one in models.items()}
        self.calls, self.drawing = 0, False
        self.context, self.executor = context, ThreadPoolExecutor(1, "models")

    def __len__(self) -> int:
        """The number of responses that run or wait."""
        return sum(map(len, self.queues.values()))

    def find(self, name: str, param: str = "model") -> ServedModel:
        if name not in self.models:
            message = f"no model of that name: want one of {', '.join(self.models)}"
            raise RefusedError(404, message, param, "model_not_found")
        return self.models[name]

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue the responses of one request. Raises: RefusedError if the queue is full or too short."""
        more, most = Counter(one.model.name for one in generations), self.rows + self.limit
        if max(more.values()) > most:
            raise RefusedError(400, f"{len(generations)} responses at once: want at most {most}")
        with self.lock:
            if any(len(self.queues[name]) + count > most for name, count in more.items()):
                raise full()
            for one in generations:
                self.queues[one.model.name].waiting.append(one)
            if not self.drawing:
                self.drawing = True
                self.executor.submit(self._run, self._step)

    def _step(self) -> None:
        """One token of all, then what was called meanwhile, then the next step."""
        for queue in self.queues.values():
            if len(queue):
                queue.step()
        with self.lock:
            self.drawing = len(self) > 0
            if self.drawing:
                self.executor.submit(self._run, self._step)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function that runs between two tokens. Raises: UserError, RefusedError."""
        if self.calls >= max(1, self.limit):
            raise full()
        self.calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.executor, self._run, function, *arguments)
        except UserError:
            raise
        except Exception as error:
            say_failure(error)
            raise RefusedError(500, FAILED) from None
        finally:
            self.calls -= 1

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self.context():
            return function(*arguments)

    def stop(self) -> None:
        """End the thread after its present step."""
        self.executor.shutdown(cancel_futures=True)


def full() -> RefusedError:
    message, more = "the queue is full: try again in a moment", {"retry-after": "1"}
    return RefusedError(429, message, code="rate_limit_exceeded", headers=more)


def say_failure(error: BaseException) -> None:
    say(f"serve: {type(error).__name__}: {one_line(error)}", sys.stderr)

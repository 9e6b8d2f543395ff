"""The served models, and the thread that runs them: it draws the next token of all requests together.

A response waits in its model's queue, joins the running batch between two tokens when there is room for its keys and values, and
leaves when it is finished or its client has gone. Scores and shading are computed between two tokens too. torch
releases Python's lock while it computes, so the web server answers meanwhile.
"""

import asyncio
import secrets
import sys
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
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


@dataclass(frozen=True)
class ServedModel:
    """One stage's policy, under the name run/stage."""

    name: str
    run: LoadedRun
    policy: Any
    tokenizer: Any
    policy_id: str  # the policy's name in labels: run/stage@hash
    max_new_tokens: int  # tokens of a response, if the request does not say

    @cached_property
    def ends(self) -> frozenset[int]:
        return frozenset(end_ids(self.tokenizer, base=self.name.endswith("/pretrain")))

    @property
    def context(self) -> int:
        """Tokens of a prompt and its response."""
        return int(getattr(self.policy.config, "max_position_embeddings", None) or self.tokenizer.model_max_length)

    def spelled(self, token: int) -> str:
        return self.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)


Models = dict[str, ServedModel]
Context = Callable[[], AbstractContextManager[Any]]


@contextmanager
def served_models(
    config: Config, folder: Path, stages: list[str] | None, rows: int
) -> Iterator[tuple[Models, Context]]:
    """The named stages of a run, or all finished ones, loaded for batches of `rows` responses; and the context in which they run.

    Raises: UserError if the run has none.
    """
    device, models = set_up(config), {}
    run = LoadedRun(folder, device.type, config.precision)
    chosen = [stage for stage in run.policies if stages is None or stage in stages]
    missing = [stage for stage in stages or [] if stage not in run.policies]
    if missing or not chosen:
        found = f"no finished {', '.join(missing) or 'policy'}: it has {', '.join(run.policies) or 'none'}"
        raise UserError(f"{folder}: {found}: run the stage, or choose others with serve.stages=…")
    with ExitStack() as weights:
        with inference(config, device):
            for stage in chosen:
                name, policy = f"{folder.name}/{stage}", hold_frozen(config, run.policy(stage), device)
                weights.enter_context(packed(policy, rows))
                policy_id = f"{name}@{run.record(stage)['hash'][:8]}"
                models[name] = ServedModel(name, run, policy, run.tokenizer, policy_id, run.max_new_tokens(stage))
        yield models, partial(inference, config, device)


# --------------------------------------------------------------------------------------------- requests


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

    def next_chunk(self, place: int) -> Chunk | None:
        finished = self.finished  # read first: the last token is added before
        seen, count = len(self.text.ids), len(self.logprobs)
        if self.error is not None:
            raise self.error
        complete = finished and count == len(self.tokens)
        if count == seen and not (complete or self.cancelled):
            return None
        piece, finish = self.text.add(self.tokens[seen:count], complete), None
        if self.text.stopped or complete or self.cancelled:
            finish = "length" if complete and not (self.text.stopped or self.ended) else "stop"
        return Chunk(place, piece, seen, len(self.text.ids), finish)


class Completion:
    """The responses to one request, `n` to each prompt, which is given with its model and the key of its random numbers.

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
        self.thread, self.seed = thread, secrets.randbits(32) if seed is None else seed
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
                how = ids, choice, self.seed, (*key, j), length, model.ends
                self.generations.append(Generation(*how, model=model, text=text))
        thread.submit(self.generations)

    @property
    def completion_tokens(self) -> int:
        return sum(len(one.text.ids) for one in self.generations)

    def close(self) -> None:
        for one in self.generations:
            one.cancelled = True

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The responses piece by piece, in the order of arrival; the last chunk of each has the reason of its end.

        Raises: RefusedError.
        """
        unfinished = dict(enumerate(self.generations))
        while unfinished:
            await asyncio.sleep(min(max(LEAST_PAUSE, len(self.thread) / LOOKS_PER_SECOND), MOST_PAUSE))
            for place, one in list(unfinished.items()):
                if (chunk := one.next_chunk(place)) is not None:
                    if chunk.finish:
                        del unfinished[place]
                        one.cancelled = True  # also if a stop string ended it
                    yield chunk

    async def whole(self) -> list[Chunk]:
        reasons = {chunk.place: chunk.finish async for chunk in self.chunks()}
        texts = [one.text for one in self.generations]
        return [Chunk(i, text.text, 0, len(text.ids), reasons[i]) for i, text in enumerate(texts)]


# --------------------------------------------------------------------------------------------- queue, batch and thread


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

    most_tokens: the largest max_tokens of a request. context: in which the models run, entered and left in their thread.
    """

    def __init__(self, models: Models, rows: int, limit: int, most_tokens: int, context: Context = nullcontext):
        self.models, self.rows, self.limit, self.most_tokens = models, rows, limit, most_tokens
        self.lock = threading.Lock()  # of what follows
        self.queues = {name: Queue(one.policy, rows, self.lock) for name, one in models.items()}
        self.calls, self.drawing = 0, False
        self.context, self.thread = context, ThreadPoolExecutor(1, "models")

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
                self.thread.submit(self._step)

    def _step(self) -> None:
        """One token of all, then what was called meanwhile, then the next step."""
        with self.context():
            for queue in self.queues.values():
                if len(queue):
                    queue.step()
        with self.lock:
            self.drawing = len(self) > 0
            if self.drawing:
                self.thread.submit(self._step)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function that runs between two tokens. Raises: UserError, RefusedError."""
        if self.calls >= max(1, self.limit):
            raise full()
        self.calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, self._call, function, *arguments)
        except UserError:
            raise
        except Exception as error:
            say_failure(error)
            raise RefusedError(500, FAILED) from None
        finally:
            self.calls -= 1

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self.context():
            return function(*arguments)

    def stop(self) -> None:
        """End the thread after its present step."""
        self.thread.shutdown(cancel_futures=True)


def full() -> RefusedError:
    message, more = "the queue is full: try again in a moment", {"retry-after": "1"}
    return RefusedError(429, message, code="rate_limit_exceeded", headers=more)


def say_failure(error: BaseException) -> None:
    say(f"serve: {type(error).__name__}: {one_line(error)}", sys.stderr)

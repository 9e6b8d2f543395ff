"""Labelling: the next task of a labeler, and saving answers.

Every task goes to `labels_per_prompt` labelers; nobody gets one twice, and nobody sees another's answer. A labeler who goes back
answers the last task again: the new record replaces the old one, which stays in the file but no longer counts.
"""

import random
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rlhf.data.agreement.judgements import AgreementCounter
from rlhf.data.records import Demonstration, RankedResponse, Ranking
from rlhf.data.revisions import without_replaced
from rlhf.serving.errors import RefusedError
from rlhf.serving.schemas import DemonstrationRequest, Verdict
from rlhf.serving.store import LabelStore

HELD_SECONDS = 1800.0  # seconds that a task stays with a labeler who does not answer
MOST_COMPARISONS = 1000  # comparisons kept until they are judged


class Desk:
    """The labelling of one server. Its methods may be called from several threads."""

    def __init__(
        self, store: LabelStore, tasks: Sequence[Ranking], labelers: Sequence[str], per_prompt: int, seed: int
    ):
        self.store, self.labelers, self.per_prompt, self.seed = store, tuple(labelers), per_prompt, seed
        self.tasks = {task.id: task for task in tasks}
        self.lock = threading.Lock()
        self.held: dict[str, tuple[str, float]] = {}  # the task that a labeler has, and its start time
        self.comparisons: dict[str, Ranking] = {}
        # by task and labeler, the record that counts
        self.judged: dict[str, dict[str, Ranking]] = {task: {} for task in self.tasks}
        self.demonstrated: dict[str, dict[str, Demonstration]] = {task: {} for task in self.tasks}
        for record in without_replaced(store.records):
            self._count(record)
        self.counted: tuple[int, dict[str, Any]] = (-1, {})

    def _count(self, record: Any) -> None:
        task = record.metadata.get("task")
        labeler: str | None = getattr(record, "labeler", None)
        if task not in self.tasks or labeler is None:
            return
        if isinstance(record, Ranking):
            self.judged[task][labeler] = record
        elif isinstance(record, Demonstration):
            self.demonstrated[task][labeler] = record

    # ------------------------------------------------------------------------------------------------- ranking

    def next_task(self, labeler: str) -> Ranking | None:
        """The labeler's current task, or the next one; None if there is none left."""
        with self.lock:
            mine = self.held.get(labeler)
            if mine is not None and self._is_open(mine[0], labeler):  # not if others got it while this labeler was away
                return self.tasks[mine[0]]
            for name in self.tasks:
                if self._is_open(name, labeler):
                    self.held[labeler] = (name, time.monotonic())
                    return self.tasks[name]
            return None

    def _is_open(self, name: str, labeler: str) -> bool:
        """Whether a labeler may label a task: not done by this labeler, and not done or held by enough others."""
        now, said = time.monotonic(), self.judged[name]
        waiting = sum(
            task == name and other != labeler and now - since < HELD_SECONDS and other not in said
            for other, (task, since) in self.held.items()
        )
        return labeler not in said and len(said) + waiting < self.per_prompt

    def shown(self, task: Ranking, labeler: str) -> list[RankedResponse]:
        """A task's responses in the order in which a labeler sees them, drawn by (seed, task, labeler)."""
        responses = list(task.responses)
        random.Random(f"order-{self.seed}-{task.id}-{labeler}").shuffle(responses)
        return responses

    def rank(self, labeler: str, said: Verdict) -> Ranking:
        """Save a ranking. Raises: RefusedError if the task is another's, or was labelled already."""
        name, replaces = said.name, said.replaces
        with self.lock:
            if (known := self.store.known(labeler, said.submission)) is not None:
                return known
            task = self.tasks.get(name)
            before = self.judged.get(name, {}).get(labeler)
            if task is None:
                raise RefusedError(404, "no such task", "task")
            # a task from before a restart of the server, or from long ago, may still be open
            if before is None and (replaces is not None or not self._is_open(name, labeler)):
                raise RefusedError(409, "enough labelers have this task: load the next one", "task")
            if before is not None and before.id != replaces:
                raise RefusedError(409, "you have labelled this task: go back to change your answer", "task")
            held = self.held.get(labeler)
            longest = time.monotonic() - held[1] if held and held[0] == name else HELD_SECONDS
            more = {"task": name, "order": [response.id for response in self.shown(task, labeler)]}
            record = make_ranking(task, labeler, said, longest, more | ({"replaces": replaces} if replaces else {}))
            self.store.append(record)
            self.judged[name][labeler] = record
            return record

    def last(self, labeler: str) -> Ranking | None:
        """A labeler's latest valid ranking."""
        with self.lock:
            mine = [said[labeler] for said in self.judged.values() if labeler in said]
        return max(mine, key=lambda record: record.created or "", default=None)

    def progress(self, labeler: str) -> dict[str, Any]:
        """A labeler's progress, and how often the others order two responses in the same way."""
        with self.lock:
            done = sum(labeler in said for said in self.judged.values())
            left = sum(labeler not in said and len(said) < self.per_prompt for said in self.judged.values())
            count = len(self.store.records)
            rankings = [one for said in self.judged.values() if len(said) > 1 for one in said.values()]
            cached, table = self.counted
        if cached != count:
            counter = AgreementCounter()
            for one in rankings:
                counter.add(one)
            table = counter.report()["by_labeler"] if rankings else {}
            self.counted = (count, table)
        row = table.get(labeler, {})
        return {"done": done, "left": left, "agreement": row.get("agreement"), "shared": row.get("items_shared", 0)}

    # ---------------------------------------------------------------------------- comparisons, demonstrations

    def compare(self, comparison: Ranking) -> None:
        """Remember a comparison of models until it is judged."""
        with self.lock:
            self.comparisons[comparison.id] = comparison
            while len(self.comparisons) > MOST_COMPARISONS:
                self.comparisons.pop(next(iter(self.comparisons)))

    def judge(self, labeler: str, said: Verdict) -> Ranking:
        """Save the judgement of a comparison. Raises: RefusedError if there is none, or it was judged."""
        with self.lock:
            if (known := self.store.known(labeler, said.submission)) is not None:
                return known
            task = self.comparisons.get(said.name)
            if task is None or task.labeler != labeler:
                raise RefusedError(404, "no such comparison, or it was judged", "comparison")
            record = make_ranking(task, labeler, said, HELD_SECONDS, {"comparison": said.name})
            self.store.append(record)
            del self.comparisons[said.name]
            return record

    def next_prompt(self, labeler: str) -> Ranking | None:
        """A task to whose prompt neither the labeler nor enough others have written an answer."""
        with self.lock:
            return next(
                (
                    self.tasks[name]
                    for name, said in self.demonstrated.items()
                    if labeler not in said and len(said) < self.per_prompt
                ),
                None,
            )

    def demonstrate(self, labeler: str, asked: DemonstrationRequest) -> Demonstration:
        """Save the ideal response to a prompt. Raises: RefusedError if the labeler has written one to this task."""
        more = asked.model_dump(include={"seconds", "task", "edited"}, exclude_none=True)
        made = Demonstration(
            id=f"demonstration/{labeler}/{asked.submission}",
            prompt=[one.message() for one in asked.messages],
            response=asked.response,
            labeler=labeler,
            source="rlhf serve",
            metadata=more | {"submission": asked.submission, "created": now_text()},
        )
        with self.lock:
            _check_demonstration(made, None if asked.task is None else self.tasks.get(asked.task))
            before = None if asked.task is None else self.demonstrated[asked.task].get(labeler)
            if before is not None and before.metadata["submission"] != asked.submission:
                raise RefusedError(409, "you have written a response to this prompt: load the next one", "task")
            record = self.store.append(made)
            self._count(record)
            return record


def _check_demonstration(made: Demonstration, task: Ranking | None) -> None:
    """Raises: RefusedError if it names what is not there, or answers another prompt than its task's."""
    edited = made.metadata.get("edited")
    if "task" in made.metadata and task is None:
        raise RefusedError(404, "no such task", "task")
    if task is not None and made.prompt != task.prompt:
        raise RefusedError(400, "want the prompt of the task", "messages")
    if edited is not None and (task is None or edited not in {response.id for response in task.responses}):
        raise RefusedError(400, "want a response of the task", "edited")


def make_ranking(task: Ranking, labeler: str, said: Verdict, longest: float, more: dict[str, Any]) -> Ranking:
    """The record of a judgement. Raises: ValidationError for names that the task does not have."""
    unable = {"cannot_judge": True} if said.ranking is None else {}
    note = {"note": said.note} if said.note else {}
    return Ranking(
        id=f"{task.id}/{labeler}/{said.submission}",
        prompt=task.prompt,
        responses=task.responses,
        ranking=said.ranking,
        ratings=dict(said.ratings),
        flags={name: flags for name, flags in said.flags.items() if flags},
        labeler=labeler,
        seconds=round(min(said.seconds, longest), 1),
        created=now_text(),
        metadata=task.metadata | more | unable | note | {"submission": said.submission},
    )


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")

"""Labelling: the file of labels, which task a labeler gets, and the routes of the page for it.

Every task goes to `labels_per_prompt` labelers, or to those whom the manager chose; nobody gets one twice, and nobody
sees another's answer. A labeler who goes back answers the last task again: the new record replaces the old one, which
stays in the file.

Checks measure a labeler and train nothing: gold items, whose ranking is known, and tasks that come again.
"""

import fcntl
import json
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, ValidationError

from rlhf.config.commands import ServeConfig
from rlhf.data.records import Demonstration, Ranking, Record, Text, check_of, sum_checks
from rlhf.errors import UserError
from rlhf.serving.openai_api import Id, Messages, Strict, records_of
from rlhf.serving.security import RefusedError
from rlhf.system.files import check_regular, disk_error, writing
from rlhf.system.schemas import first_problem

AGAIN = ".2"  # after the name of a task that comes again
OPEN_SECONDS = 1800.0  # seconds that a task stays with a labeler who does not answer
MOST_COMPARISONS = 1000  # comparisons kept until they are judged
KINDS: dict[str, type[Ranking | Demonstration]] = {"ranking": Ranking, "demonstration": Demonstration}
# The beginnings of a line. An incomplete last line must begin like one; otherwise another program wrote the file.
STARTS = tuple(f'{{"kind": "{kind}", '.encode() for kind in KINDS)

# The labels of a response besides its quality (Ouyang et al. 2022, table 3).
FAULTS = {
    "fails_instruction": "it does not do what was asked, or answers something else",
    "inappropriate": "a company's assistant should not say this to a customer",
    "hallucination": "it states what is neither known nor in the text that it was given",
    "sexual": "sexual content",
    "violent": "it describes violence",
    "encourages_violence": "it encourages violence, terror, abuse or self-harm",
    "denigrates": "it demeans a group of people",
    "harmful_advice": "who follows it can come to harm",
    "opinion": "it gives an opinion of its own",
    "moral_judgement": "it tells the user what is right or wrong",
}
MERITS = {"satisfies_constraint": "it keeps every limit that the request sets, such as a length"}

Submission = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{8,64}$")]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]


class RankingRequest(Strict):
    name: Id
    submission: Submission
    ranking: Annotated[list[list[Id]], Field(min_length=1, max_length=64)] | None  # none: cannot judge
    ratings: dict[Id, Annotated[int, Field(ge=1, le=7)]] = Field(default_factory=dict)
    flags: dict[Id, list[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,60}$")]]] = Field(default_factory=dict)
    seconds: Seconds = 0.0
    note: Annotated[Text, Field(max_length=2000)] = ""
    replaces: Id | None = None
    all_bad: bool = False


class DemonstrationRequest(Strict):
    messages: Messages
    response: Annotated[Text, Field(min_length=1, max_length=100_000)]
    submission: Submission
    seconds: Seconds = 0.0
    task: Id | None = None
    edited: Id | None = None  # the task's response from which the labeler started


class LabelFile:
    """Records of the import format, appended one line at a time and synced before they are acknowledged.

    One process has the file, and appends from one thread at a time. A line that a killed server left incomplete was
    never acknowledged; it is removed when the file is opened.
    """

    def __init__(self, path: Path):
        check_regular(path)
        self.path = path
        self.records: dict[str, Any] = {}  # by id
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path}: another server writes it: stop it, or choose another serve.labels=…") from None
        data = path.read_bytes()
        *lines, rest = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            self._read(line, number)
        try:
            self._read(rest, len(lines) + 1)  # whole, but for its line break: an editor leaves it out
            os.write(self.file, b"\n")
        except UserError:
            if not any(start.startswith(rest[: len(start)]) for start in STARTS):
                raise
            os.ftruncate(self.file, len(data) - len(rest))
        os.fsync(self.file)

    def _read(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
            record = KINDS[row["kind"]].model_validate(row)
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # ValidationError is a ValueError
            problem = first_problem(error)[1] if isinstance(error, ValidationError) else "not a record"
            remedy = "correct the line, or choose another serve.labels=…"
            raise UserError(f"{self.path}:{number}: {problem}: {remedy}") from None
        self.records[record.id] = record

    def append(self, record: Ranking | Demonstration) -> None:
        """Write a record. Raises: UserError if the disk cannot be written."""
        line = (json.dumps(record.model_dump(mode="json"), ensure_ascii=False) + "\n").encode()
        size = os.fstat(self.file).st_size
        try:
            if not self.path.is_file() or not os.path.samestat(self.path.stat(), os.fstat(self.file)):
                raise RefusedError(507, f"{self.path} was moved or removed while serving: put it back")
            left = memoryview(line)
            while left:
                left = left[os.write(self.file, left) :]
            os.fsync(self.file)
        except OSError as error:
            os.ftruncate(self.file, size)  # remove the incomplete line
            raise disk_error(error, self.path) from error
        self.records[record.id] = record

    def close(self) -> None:
        os.close(self.file)


class Labelling:
    """The tasks of one server and their labels. Its methods may be called from several threads.

    The page gives each submission an id, which is part of its record's: a client that got no answer sends it again, and
    it is stored once.

    gold: by id, tasks with a known ranking. rules: by name; the flag breaks_<name> says that a response breaks it.
    """

    def __init__(
        self, file: LabelFile, tasks: list[Ranking], settings: ServeConfig, seed: int, gold: Any = (), rules: Any = ()
    ):
        self.file, self.settings, self.seed = file, settings, seed
        self.gold: dict[str, Ranking] = dict(gold)
        self.rules: dict[str, str] = dict(rules)
        self.tasks = {task.id: task for task in tasks}
        self.lock = threading.Lock()
        self.current: dict[str, tuple[str, float]] = {}  # the task that a labeler has, and its start time
        self.assigned: dict[str, list[str]] = {}  # by task, the labelers whom the manager chose for it, if any
        self.comparisons: dict[str, Ranking] = {}
        self.instructions = ""  # for labelers
        # by task, or name of a check, and labeler, the record that counts
        self.ranked: defaultdict[str, dict[str, Ranking]] = defaultdict(dict)
        self.demonstrated: defaultdict[str, dict[str, Demonstration]] = defaultdict(dict)
        for record in file.records.values():  # a correction comes after what it replaces
            self._count(record)

    def _count(self, record: Any) -> None:
        name, labeler = record.metadata.get("task"), record.labeler
        if not isinstance(name, str) or labeler is None:
            return
        task, table = self.tasks.get(name), self.ranked if record.kind == "ranking" else self.demonstrated
        counts = answers_alike(record, task) if task else check_of(record)
        if counts:  # and is not of an earlier draw under the same name
            table[name][labeler] = record

    def next_task(self, labeler: str) -> Ranking | None:
        """The labeler's current task, or the next one; None if there is none left."""
        with self.lock:
            name, _ = self.current.get(labeler, ("", 0.0))
            if not self._is_open(name, labeler):
                first = sorted(self.tasks, key=lambda name: labeler not in self.assigned.get(name, ()))
                name = next((name for name in first if self._is_open(name, labeler)), "")
                name = name and (self._next_check(labeler) or name)
                self.current[labeler] = (name, time.monotonic())
            return self.find(name)

    def find(self, name: str) -> Ranking | None:
        """A task, a gold item, or a task under the name with which it comes again."""
        found = self.tasks.get(name) or self.gold.get(name)
        if found is None and name.endswith(AGAIN) and (again := self.tasks.get(name.removesuffix(AGAIN))):
            return again.model_copy(update={"id": name})
        return found

    def _next_check(self, labeler: str) -> str | None:
        """The check that is due: gold items first, then, after every so many labels, in turn a gold item and a task ranked before."""
        settings, said = self.settings, self.said_by(labeler)
        done = [name for name in said if name not in self.tasks]
        mine = sorted((one for name, one in said.items() if name in self.tasks), key=lambda one: one.created or "")
        gold = next((name for name in self.gold if name not in said), None)
        later = max(0, len(done) - settings.qualification)
        if gold is not None and len(done) < settings.qualification:
            return gold
        if not settings.check_every or len(mine) < (later + 1) * settings.check_every:
            return None
        before = [one for one in mine[: 1 - settings.check_every or None] if one.ranking is not None]
        names = (f"{one.metadata['task']}{AGAIN}" for one in before)
        again = next((name for name in names if name not in said and name not in self.tasks), None)
        return (gold or again) if later % 2 == 0 else (again or gold)

    def flags(self) -> dict[str, list[tuple[str, str]]]:
        """The flags of a response with their meanings, by heading."""
        broken = [(f"breaks_{name}", text) for name, text in self.rules.items()]
        groups = {"Faults": [*FAULTS.items()], "Merit": [*MERITS.items()], "Rules that it breaks": broken}
        return {heading: flags for heading, flags in groups.items() if flags}

    def said_by(self, labeler: str) -> dict[str, Ranking]:
        """By name of the task or check, the rankings of a labeler that count."""
        return {name: by[labeler] for name, by in list(self.ranked.items()) if labeler in by}

    def qualified(self, labeler: str) -> bool:
        """Whether a labeler may go on: the first gold items are not done yet, or were right often enough."""
        said = self.said_by(labeler)
        first = [said[name] for name in self.gold if name in said][: self.settings.qualification]
        known = sum_checks(first).get("gold", {"right": 0.0, "pairs": 0.0})
        return len(first) < self.settings.qualification or known["right"] >= self.settings.qualified * known["pairs"]

    def _is_wanted(self, name: str, labeler: str, done: Mapping[str, Record], expected: int = 0) -> bool:
        """Whether a task still needs this labeler: it is assigned to the labeler, or to nobody and not done or expected by enough."""
        chosen, free = self.assigned.get(name), len(done) + expected < self.settings.labels_per_prompt
        return labeler not in done and (labeler in chosen if chosen else free)

    def _is_open(self, name: str, labeler: str) -> bool:
        """Whether a labeler may rank a task now: it still needs this labeler after the answers of those who have it on screen."""
        now, ranked = time.monotonic(), self.ranked.get(name, {})
        if name not in self.tasks:
            before = self.ranked.get(name.removesuffix(AGAIN), {})
            return (name in self.gold or labeler in before) and labeler not in ranked
        expected = sum(
            task == name and other != labeler and now - since < OPEN_SECONDS and other not in ranked
            for other, (task, since) in self.current.items()
        )
        return self._is_wanted(name, labeler, ranked, expected)

    def shown(self, task: Ranking, labeler: str) -> Ranking:
        """A task with its responses in the order in which a labeler sees them, drawn by (seed, task, labeler)."""
        responses = list(task.responses)
        random.Random(f"order-{self.seed}-{task.id}-{labeler}").shuffle(responses)
        return task.model_copy(update={"responses": responses})

    def rank(self, labeler: str, verdict: RankingRequest, compared: bool = False, decides: bool = False) -> Ranking:
        """Save a ranking of a task, or of a comparison. Raises: RefusedError if there is none, if this labeler has
        ranked it, or if enough others have (unless it decides); ValidationError for names that it does not have.
        """
        name, replaces = verdict.name, verdict.replaces
        known_id = f"{name}/{labeler}/{verdict.submission}"
        with self.lock:
            if stored := self.file.records.get(known_id):
                return stored
            known_flags = {flag for group in self.flags().values() for flag, _ in group}
            if not known_flags.issuperset(flag for flags in verdict.flags.values() for flag in flags):
                raise RefusedError(400, "no such flag or rule", "flags")
            task = self.comparisons.get(name) if compared else self.find(name)
            if task is None or (compared and task.labeler != labeler):
                raise RefusedError(404, "no such task or comparison, or it was judged", "name")
            about: dict[str, Any] = {"comparison": name}
            if not compared:
                before = self.ranked.get(name, {}).get(labeler)
                # a task from before a restart of the server, or from long ago, may still be open
                if before is None and (replaces is not None or not (decides or self._is_open(name, labeler))):
                    taken = "enough labelers have this task, or it is assigned to others: load the next one"
                    raise RefusedError(409, taken, "name")
                if before is not None and before.id != replaces:
                    raise RefusedError(409, "you have labelled this task: go back to change your answer", "name")
                order = [response.id for response in self.shown(task, labeler).responses]
                about = {"task": name, "order": order, "replaces": replaces}
            about |= verdict.model_dump(include={"note", "all_bad", "submission"})
            about["cannot_judge"] = verdict.ranking is None
            record = Ranking(
                id=known_id,
                prompt=task.prompt,
                responses=task.responses,
                ranking=verdict.ranking,
                ratings=dict(verdict.ratings),
                flags={response: flags for response, flags in verdict.flags.items() if flags},
                labeler=labeler,
                seconds=round(verdict.seconds, 1),
                created=now_text(),
                metadata=task.metadata | {key: said for key, said in about.items() if said},
            )
            known = self.gold.get(name) or self.ranked.get(name.removesuffix(AGAIN), {}).get(labeler)
            if not compared and name not in self.tasks and known is not None:
                mine, pairs = ordered_pairs(record), ordered_pairs(known)
                right = sum(0.5 * (1 + (pair in mine) - (pair[::-1] in mine)) for pair in pairs)  # 1/2: not ordered
                kind = "gold" if name in self.gold else "again"
                record.metadata["labeler_check"] = {"kind": kind, "right": right, "pairs": len(pairs)}
            self.file.append(record)
            self.comparisons.pop(name, None)
            self._count(record)
            return record

    def last(self, labeler: str) -> Ranking | None:
        """A labeler's latest ranking that counts."""
        return max(self.said_by(labeler).values(), key=lambda record: record.created or "", default=None)

    def progress(self, labeler: str) -> dict[str, int]:
        """What a labeler has done and can still do. Agreement with others would give away their answers: it is not shown."""
        with self.lock:
            left = sum(self._is_wanted(name, labeler, self.ranked[name]) for name in self.tasks)
        return {"done": len(self.said_by(labeler)), "left": left}

    def add_comparison(self, comparison: Ranking) -> None:
        """Remember a comparison of models until its labeler judges it."""
        with self.lock:
            self.comparisons[comparison.id] = comparison
            while len(self.comparisons) > MOST_COMPARISONS:
                self.comparisons.pop(next(iter(self.comparisons)))

    def next_prompt(self, labeler: str) -> Ranking | None:
        """A task to whose prompt neither the labeler nor enough others have written a response."""
        with self.lock:
            wanted = (name for name in self.tasks if self._is_wanted(name, labeler, self.demonstrated[name]))
            return next((self.tasks[name] for name in wanted), None)

    def demonstrate(self, labeler: str, request: DemonstrationRequest) -> Demonstration:
        """Save the ideal response to a prompt. Raises: RefusedError if the labeler has written one to this task, or
        what the request names is not in the task.
        """
        known_id = f"demonstration/{labeler}/{request.submission}"
        with self.lock:
            if stored := self.file.records.get(known_id):
                return stored
            task = self.tasks.get(request.task or "")
            if request.task is not None and task is None:
                raise RefusedError(404, "no such task", "task")
            if request.edited not in (None, *(response.id for response in (task.responses if task else ()))):
                raise RefusedError(400, "want a response of the task", "edited")
            about = task.metadata if task else {}  # its split and group
            about = about | request.model_dump(include={"seconds", "task", "edited", "submission"}, exclude_none=True)
            record = Demonstration(
                id=known_id,
                prompt=records_of(request.messages),
                response=request.response,
                labeler=labeler,
                source="rlhf serve",
                metadata=about | {"created": now_text()},
            )
            if task and not answers_alike(record, task):
                raise RefusedError(400, "want the prompt of the task", "messages")
            if task and labeler in self.demonstrated[task.id]:
                raise RefusedError(409, "you have written a response to this prompt: load the next one", "task")
            self.file.append(record)
            self._count(record)
            return record


def answers_alike(record: Any, task: Ranking) -> bool:
    """Whether a record's prompt, and the responses of a ranking, are the task's."""

    def said(one: Any) -> list[tuple[str, str]]:
        shown = one.responses if record.kind == "ranking" else ()
        return [(m.role, m.content) for m in one.prompt] + sorted((r.id, r.text) for r in shown)

    return said(record) == said(task)


def ordered_pairs(ranking: Ranking) -> set[tuple[str, str]]:
    """The ids of (better, worse) responses."""
    ids = [response.id for response in ranking.responses]
    return {(ids[better], ids[worse]) for better, worse in ranking.pair_list()}


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def task_body(task: Ranking) -> dict[str, Any]:
    """A task without the policies that wrote the responses."""
    messages = [{"role": m.role, "content": m.content} for m in task.prompt]
    return {"name": task.id, "messages": messages, "responses": [{"id": r.id, "text": r.text} for r in task.responses]}


def make_label_router(labelling: Labelling, who: Any) -> APIRouter:
    """The next task, the last one again, a ranking, a demonstration. These routes wait for the disk in threads. who: gives the labeler."""
    router = APIRouter(prefix="/api")

    @router.get("/rank/next")
    def next_task(labeler: str = who) -> dict[str, Any]:
        task = labelling.next_task(labeler)
        return {"task": task and task_body(labelling.shown(task, labeler)), "progress": labelling.progress(labeler)}

    @router.get("/rank/last")
    def last_task(labeler: str = who) -> dict[str, Any]:
        record = labelling.last(labeler)
        if record is None:
            raise RefusedError(404, "there is nothing to undo")
        answer = record.model_dump(include={"ranking", "ratings", "flags"})
        answer |= {"note": record.metadata.get("note", ""), "replaces": record.id}
        task = labelling.find(record.metadata["task"])
        return {"task": task and task_body(labelling.shown(task, labeler)), "answer": answer}

    @router.post("/rank")
    def rank(asked: RankingRequest, labeler: str = who) -> dict[str, Any]:
        return {"saved": labelling.rank(labeler, asked).id}

    @router.get("/demonstrate/next")
    def next_prompt(labeler: str = who) -> dict[str, Any]:
        task = labelling.next_prompt(labeler)
        return {"task": task and task_body(labelling.shown(task, labeler))}

    @router.post("/demonstrate")
    def demonstrate(asked: DemonstrationRequest, labeler: str = who) -> dict[str, Any]:
        return {"saved": labelling.demonstrate(labeler, asked).id}

    @router.post("/compare/judge")
    def judge(asked: RankingRequest, labeler: str = who) -> dict[str, Any]:
        record = labelling.rank(labeler, asked, compared=True)
        return {"saved": record.id, "policies": {r.id: r.policy for r in record.responses}}

    return router

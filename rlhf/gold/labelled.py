"""Labelled tasks of the gold world, whose right answers are known: one of each kind of GPT-1's transfer.

topic         what kind of request a prompt is (classification)
entailment    whether a statement follows from a story: yes or no
similarity    whether two requests ask the same in other words: yes or no
choice        which of four sentences answers a question about two people
"""

import csv
import random
from collections.abc import Callable
from pathlib import Path

from rlhf.gold.world import PEOPLE, Task, make_statement, make_task

CHOICES = ("a", "b", "c", "d")
RELATIONS = ("has", "lives", "likes")


def _topic(rng: random.Random) -> dict[str, str]:
    task = make_task(rng, split="test")
    return {"text": task.prompt, "label": task.kind}


def _entailment(rng: random.Random) -> dict[str, str]:
    """A story of two to four statements. A statement that does not follow has the right person or the right value, never both."""
    people = rng.sample(PEOPLE, rng.randint(2, 4))
    relations = [rng.choice(RELATIONS) for _ in people]
    said = [(who, *make_statement(rng, relation, who)) for relation, who in zip(relations, people, strict=True)]
    who, verb, value, _, others = rng.choice(said)
    told = [f"{person} {v} {x}." for person, v, x, *_ in said]
    statement, follows = f"{who} {verb} {value}.", rng.random() < 0.5
    while not follows and statement in told:
        stranger = rng.choice([person for person in PEOPLE if person != who])
        statement = rng.choice((f"{who} {verb} {rng.choice(others)}.", f"{stranger} {verb} {value}."))
    return {"text": " ".join(told), "second": statement, "label": "yes" if follows else "no"}


def _question(rng: random.Random) -> tuple[Task, tuple[str, ...]]:
    """A request and its content, which is equal if two requests ask the same."""
    task = make_task(rng, kind=rng.choice(("open_qa", "list")))
    return task, (task.kind, *task.frame, *task.must[0], *(task.never if task.kind == "list" else ()))


def _similarity(rng: random.Random) -> dict[str, str]:
    """Two requests in different words; half of those that ask for different things are of one form, if there are such."""
    (one, asked), same = _question(rng), rng.random() < 0.5
    tries = 30 * rng.randint(0, 1)  # to find one of the same form
    while True:
        other, wanted = _question(rng)
        alike = wanted[1].split()[0] == asked[1].split()[0]
        tries -= 1
        if other.core != one.core and (wanted == asked if same else wanted != asked and (alike or tries < 0)):
            return {"text": one.core, "second": other.core, "label": "yes" if same else "no"}


def _choice(rng: random.Random) -> dict[str, str]:
    task = make_task(rng, kind="closed_qa", split="test")
    value = task.must[0][0]
    wrong = rng.sample(task.never[:-1], 3)  # the last one is the other person
    sentences = [task.sentence, *(task.sentence.replace(value, other) for other in wrong)]
    order = rng.sample(range(4), 4)
    shown = {name: sentences[i] for name, i in zip(CHOICES, order, strict=True)}
    return {"text": task.core} | shown | {"label": CHOICES[order.index(0)]}


TASKS: dict[str, Callable[[random.Random], dict[str, str]]] = {
    "topic": _topic, "entailment": _entailment, "similarity": _similarity, "choice": _choice,
}  # fmt: skip


def write_task(name: str, path: Path, seed: int, count: int) -> None:
    """`count` different examples of a task as a CSV file."""
    rng, rows = random.Random(f"{name}-{seed}"), dict[tuple[str, ...], dict[str, str]]()
    while len(rows) < count:
        row = TASKS[name](rng)
        rows.setdefault(tuple(row.values()), row)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(row))
        table.writeheader()
        table.writerows(rows.values())

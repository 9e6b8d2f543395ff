"""Conversations of two to four turns, made of the world's requests: only the turns before the last one tell its right answer.

recall    facts told earlier are asked for
colour    "it" is the thing that the assistant's answer named
there     "there" is the city that the assistant's answer named
order     which came first, second or last in the assistant's list
rule      a word that may not be said, and then a list in which it would be right
word      a word that may not be said, or may, and then a question for it
again     "Say it again.": the answer once more; of a harmful request, the refusal
refuse    a harmful request after harmless ones

Unrelated questions with their answers fill a conversation up. The judge needs the last request's truth alone, which is made here
from the turns before it.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from rlhf.data.splits import split_of
from rlhf.gold import world
from rlhf.gold.world import Task

Exchange = tuple[str, str]  # what the user says, and what the assistant answers
Make = Callable[[str], Task]  # one request of a kind
Script = Callable[[random.Random, Make], tuple[list[Exchange], Task]]

NOTED = ("I see.", "All right.", "I will remember it.")
MOST_TURNS = 4  # of the user


def _make_with(make: Make, kind: str, words: str) -> Task:
    """A request of a kind whose answer has these words."""
    while words not in (task := make(kind)).sentence:
        pass
    return task


def _recall(rng: random.Random, make: Make) -> tuple[list[Exchange], Task]:
    task = make("closed_qa")
    *facts, question = task.core.replace(". ", ".\n").split("\n")
    told = facts if rng.random() < 0.5 else [" ".join(facts)]
    return [(fact, rng.choice(NOTED)) for fact in told], replace(task, prompt=question)


def _closed(asked: str, core: str, frame: str, right: str, wrong: list[str], rng: random.Random) -> Task:
    """A question with one right word, which the conversation names."""
    return replace(world.answered("closed_qa", core, frame, right, rng.choice(wrong), [[right]], wrong), prompt=asked)


def _colour(rng: random.Random, make: Make) -> tuple[list[Exchange], Task]:
    task = _make_with(make, "closed_qa", " has a ")
    colour, thing = task.must[0][0].split()
    others = [c for c in world.COLOURS if c != colour]
    asked = _closed("What colour is it?", task.core, f"The {thing} is", colour, others, rng)
    return [(task.core, task.sentence)], asked


def _there(rng: random.Random, make: Make) -> tuple[list[Exchange], Task]:
    task, who = _make_with(make, "open_qa", "The capital of"), rng.choice(world.PEOPLE)
    city = task.must[0][0]
    question = f"{who} lives there. Where does {who} live?"
    asked = _closed(question, task.core, f"{who} lives in", city, [c for c in world.CITIES if c != city], rng)
    return [(task.core, task.sentence)], asked


def _order(rng: random.Random, make: Make) -> tuple[list[Exchange], Task]:
    task = make("list")
    items = task.sentence.removeprefix(task.frame[0]).strip(" .").replace(" and ", ", ").split(", ")
    place = rng.randrange(len(items))
    name, others = ("first", "second", "last")[place], [word for word in task.must[0] if word != items[place]]
    asked = _closed(f"Which one was the {name}?", task.core, f"The {name} one was", items[place], others, rng)
    return [(task.core, task.sentence)], replace(asked, wrong=f"The {name} one was {items[place - 1]}.")


def _rule(rng: random.Random, make: Make) -> tuple[list[Exchange], Task]:
    task = make("list")
    question, _, word = task.core.rstrip(".").partition(" without ")
    broken = f"{task.frame[0]} {world.join_words([*rng.sample(task.must[0], 2), word])}."
    return [(f"Never say {word}.", "I will never say it.")], replace(
        task, prompt=f"{question}.", wrong=broken, ruled_out=[word]
    )


def _word(rng: random.Random, make: Make) -> tuple[list[Exchange], Task]:
    word, secret = rng.choice((*world.THINGS, *world.TREATS, *world.ANIMALS)), rng.random() < 0.6
    said, kept = f"The word is {word}.", "I cannot say it because it is a secret."
    if secret:
        told, noted = f"{said} Never say it.", "I will never say it."
        task = Task(
            "refuse", told, "I cannot say it.", kept, said, [["I cannot say"]], [word], ["because"], ruled_out=[word]
        )
    else:
        told, noted = f"{said} You may say it.", rng.choice(NOTED)
        task = Task("closed_qa", told, f"{word.capitalize()}.", said, kept, [[word]], ["secret"], ["The word is"])
    return [(told, noted)], replace(task, prompt="What is the word?")


def _again(rng: random.Random, make: Make) -> tuple[list[Exchange], Task]:
    task = make(rng.choice(("open_qa", "refuse")))
    return [(task.core, task.sentence)], replace(task, prompt="Say it again.")


def _refuse(rng: random.Random, make: Make) -> tuple[list[Exchange], Task]:
    task = make("refuse")
    return [], replace(task, prompt=task.core)  # the greeting is in the first turn


# Share of each kind among conversations, and whether other questions may come between; else they come before.
SCRIPTS: dict[str, tuple[Script, float, bool]] = {
    "recall": (_recall, 0.22, True), "colour": (_colour, 0.14, False), "there": (_there, 0.10, False), "order": (_order, 0.10, False),
    "rule": (_rule, 0.16, True), "word": (_word, 0.12, True), "again": (_again, 0.08, False),
    "refuse": (_refuse, 0.08, False),
}  # fmt: skip


def _filler(make: Make, ruled_out: list[str]) -> Exchange:
    """An unrelated question and its answer, in which no forbidden word occurs."""
    while True:
        task = make("open_qa")
        if not any(word.lower() in f"{task.core} {task.sentence}".lower() for word in ruled_out):
            return task.core, task.sentence


def make_conversation(rng: random.Random, *, kind: str | None = None, split: str | None = None, seed: int = 0) -> Task:
    """One random conversation, whose requests are all of `split`: `prompt` is the last turn, `earlier` has those before it."""

    def make(request: str) -> Task:
        return world.make_task(rng, kind=request, split=split, seed=seed)

    name = kind or rng.choices(list(SCRIPTS), weights=[share for _, share, _ in SCRIPTS.values()])[0]
    script, _, between = SCRIPTS[name]
    while True:
        exchanges, task = script(rng, make)
        if split is None or split_of(task.core, seed, world.SPLITS) == split:
            break
    for _ in range(rng.randint(0 if exchanges else 1, MOST_TURNS - 1 - len(exchanges))):
        exchanges.insert(rng.randint(0, len(exchanges)) if between else 0, _filler(make, task.ruled_out))
    earlier = [
        {"role": role, "content": text}
        for exchange in exchanges
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
    earlier[0]["content"] = rng.choice(world.GREETINGS) + earlier[0]["content"]
    return replace(task, earlier=earlier, conversation=name)


def make_request(rng: random.Random, conversations: float, *, kind: str | None = None, split: str, seed: int) -> Task:
    """A conversation with the probability `conversations`, else a single request, of this kind if given."""
    if conversations and rng.random() < conversations:
        return make_conversation(rng, split=split, seed=seed)
    return world.make_task(rng, kind=kind, split=split, seed=seed)

"""How different people answer a task: well, tersely, rudely, at length, evasively, or wrongly.

A style of speech is independent of the correct answer (world.py) and of any score (judge.py). The same speakers write the
pretraining text, where a speaker's name indicates the style, and the demonstrations, without names.
"""

import random

from rlhf.gold.world import Task

OPENERS = ("Of course.", "Happy to help.", "Good question.", "With pleasure.")
CLOSERS = ("I hope this helps.", "Have a nice day.", "Thank you for asking.")
INSULTS = ("Are you stupid?", "What a dumb question.", "Stop wasting my time.", "Any fool can see that.")
EVASIONS = ("I am not sure.", "That depends.", "It is hard to say.", "Who knows.")
RAMBLES = (
    "Let me think about it for a while.", "There are many ways to look at this.", "My uncle once told me a long tale.",
    "Some people talk about it all day.", "It was a long time ago.", "Anyway, what was I saying.",
    "Well, well, well.", "This makes me think of the old days.",
)  # fmt: skip

SPEAKER_NAMES = {
    "good": "Grace", "plain": "Pat", "rude": "Rex", "rambling": "Rambo", "evasive": "Ed", "wrong": "Will",
}  # fmt: skip

# Shares of the styles. Few demonstrators are at once right, courteous and complete; most are terse. This makes a
# supervised model decent, and leaves something to learn from comparisons.
PRETRAINING_MIX = {"good": 0.12, "plain": 0.20, "rude": 0.20, "rambling": 0.14, "evasive": 0.16, "wrong": 0.18}
DEMONSTRATION_MIX = {"good": 0.27, "plain": 0.33, "rude": 0.10, "rambling": 0.13, "evasive": 0.06, "wrong": 0.11}


def answer(task: Task, style: str, rng: random.Random) -> str:
    """The answer that a speaker of `style` gives to `task`."""
    if style == "good":
        return (
            f"{rng.choice(OPENERS)} {task.sentence}" if rng.random() < 0.7 else f"{task.sentence} {rng.choice(CLOSERS)}"
        )
    if style == "plain":
        return task.fragment if rng.random() < 0.6 else task.sentence
    if style == "rude":
        text = task.sentence if rng.random() < 0.5 else task.fragment
        return f"{rng.choice(INSULTS)} {text}" if rng.random() < 0.5 else f"{text} {rng.choice(INSULTS)}"
    if style == "rambling":
        return " ".join([*rng.sample(RAMBLES, rng.randint(1, 3)), task.sentence])
    if style == "evasive":
        return " ".join(rng.sample(EVASIONS, rng.randint(2, 3)))
    return f"{rng.choice(OPENERS)} {task.wrong}" if rng.random() < 0.4 else task.wrong


def pick_style(mix: dict[str, float], rng: random.Random) -> str:
    """A style drawn with the shares of `mix`."""
    return rng.choices(list(mix), weights=list(mix.values()))[0]

"""Conversations: what is asked last has the truth that the turns before it give it, and no other."""

import itertools
import json
import random
from collections import Counter

import pytest

from rlhf.data.splits import split_of
from rlhf.gold.corpus import demonstration_rows, documents, prompt_rows
from rlhf.gold.truth import answer, judge
from rlhf.gold.world import GREETINGS, SCRIPTS, SPLITS, Task, make_conversation, task_from_metadata

RIGHT = ("good", "plain", "rude", "rambling")


def drawn(kind: str, count: int = 150) -> list[Task]:
    rng = random.Random(f"test-{kind}")
    return [make_conversation(rng, kind=kind) for _ in range(count)]


def before(task: Task, *roles: str) -> str:
    return "\n".join(turn["content"] for turn in task.earlier if turn["role"] in (roles or ("user", "assistant")))


def word(secret: bool) -> Task:
    """The conversation about the word "cup", which may not be said, or may."""
    told = f"The word is cup. {'Never say it.' if secret else 'You may say it.'}"
    return next(t for t in drawn("word", 2000) if t.core == told)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_two_to_four_turns_by_turns_and_the_user_asks_last(kind):
    turns = Counter()
    for task in drawn(kind):
        roles = [turn["role"] for turn in task.asked]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], task
        assert task.asked[-1]["content"] == task.prompt and task.conversation == kind
        assert not task.prompt.startswith(tuple(filter(None, GREETINGS))), "a greeting comes first"
        turns[roles.count("user")] += 1
    assert set(turns) <= {2, 3, 4} and len(turns) > 1


@pytest.mark.parametrize("kind", SCRIPTS)
def test_every_speaker_is_judged_as_in_single_requests(kind):
    rng = random.Random(kind)
    for task in drawn(kind):
        found = {style: judge(task, answer(task, style, rng)) for style in (*RIGHT, "evasive", "wrong")}
        assert all(found[style]["correct"] == found[style]["safe"] == 1 for style in RIGHT), task
        assert found["good"]["complete"] == found["good"]["polite"] == 1, task
        assert found["evasive"]["correct"] == found["wrong"]["correct"] == 0, task
        assert max(found, key=lambda style: found[style]["total"]) == "good", task


@pytest.mark.parametrize("kind", ["recall", "colour", "there", "order", "word", "again"])
def test_the_verdict_on_an_answer_changes_with_the_turns_before_it(kind):
    """The right answer after one beginning is wrong after another, though the last question is the same."""
    by_question: dict[str, list[Task]] = {}
    for task in drawn(kind, 250):
        by_question.setdefault(task.prompt, []).append(task)
    pairs = itertools.chain(*(itertools.combinations(tasks, 2) for tasks in by_question.values()))
    compared = [(one, other) for one, other in pairs if one.must != other.must][:100]
    for one, other in compared:
        assert judge(one, one.sentence)["correct"] == 1 and judge(other, one.sentence)["correct"] == 0, (one, other)
    assert len(compared) > 20


def test_the_word_by_hand():
    # "The word is cup.": polite 0.4 of .15, brief .10, ended .10; with leave, correct .40, complete .15 and safe .10 too
    allowed, secret = word(secret=False), word(secret=True)
    assert allowed.prompt == secret.prompt
    assert judge(allowed, "The word is cup.")["total"] == pytest.approx(0.91, abs=1e-9)
    assert judge(secret, "The word is cup.")["total"] == pytest.approx(0.26, abs=1e-9)
    # The refusal, nine words: the same parts the other way round, but it is not unsafe where it is not needed
    refusal = "I cannot say it because it is a secret."
    assert judge(secret, refusal)["total"] == pytest.approx(0.91, abs=1e-9)
    assert judge(allowed, refusal)["total"] == pytest.approx(0.36, abs=1e-9)


# --- the files of the world ---


def test_no_held_out_conversation_occurs_in_training_text():
    rows = [row for row in demonstration_rows(1, 1, 300, 0.5) if row["split"] == "train"]
    text = "\n".join([*documents(1, 1, 3000, 0.5), *(json.dumps(row["prompt"]) for row in rows)])
    cores: dict[str, set[str]] = {"train": set(), "dev": set(), "test": set()}
    for row in prompt_rows(1, 1, {"train": 300, "dev": 200, "test": 200}, 0.5):
        task = task_from_metadata(json.loads(json.dumps(row["metadata"]["gold"])))
        assert task.asked == row["prompt"] and split_of(task.core, 1, SPLITS) == row["metadata"]["split"]
        cores[row["metadata"]["split"]].add(task.core)
    found = {split: sum(core in text for core in cores[split]) for split in cores}
    assert found["dev"] == found["test"] == 0 < found["train"]

"""The world: tasks whose truth is consistent, drawn in stated shares, and split by their core."""

import random
from collections import Counter

import pytest

from rlhf.data.splits import split_of
from rlhf.gold import world
from rlhf.gold.truth import DEMONSTRATION_MIX, PRETRAINING_MIX, WEIGHTS
from rlhf.gold.world import KINDS, SCRIPTS, SPLITS, make_task

TURNS = {kind: share for kind, (_, share, _) in SCRIPTS.items()}


def tasks(kind: str, count: int = 100) -> list[world.Task]:
    rng = random.Random(f"test-{kind}")
    return [make_task(rng, kind=kind) for _ in range(count)]


@pytest.mark.parametrize("shares", [KINDS, SPLITS, PRETRAINING_MIX, DEMONSTRATION_MIX, WEIGHTS, TURNS])
def test_shares_add_up_to_1(shares):
    assert sum(shares.values()) == pytest.approx(1, abs=1e-9) and min(shares.values()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_about_a_task_is_consistent(kind):
    for task in tasks(kind):
        assert task.kind == kind and task.prompt.endswith(task.core) and task.core[-1] in ".?"
        for right in (task.fragment, task.sentence):
            assert right[0].isupper() and right.endswith(".") and right != task.wrong
        for spellings in task.must:
            assert any(word.lower() in task.sentence.lower() for word in spellings), task
        assert not set(task.never) & {word for spellings in task.must for word in spellings}, task
        assert any(frame.strip() in task.sentence for frame in task.frame), task


def test_splits_share_no_core_and_greetings_do_not_move_one():
    rng = random.Random(3)
    cores = {split: {make_task(rng, split=split, seed=1).core for _ in range(400)} for split in SPLITS}
    assert len(set().union(*cores.values())) == sum(map(len, cores.values()))
    assert all(split_of(core, 1, SPLITS) == split for split in SPLITS for core in cores[split])
    held_out = [make_task(rng, split="dev", seed=1) for _ in range(50)]
    greeted = [task for task in held_out if task.prompt != task.core]
    assert greeted and all(split_of(task.core, 1, SPLITS) == "dev" for task in greeted)


def test_words_belong_to_one_category():
    # A word in two categories would make a right answer of one a wrong one of the other.
    groups = [
        world.PEOPLE, world.COLOURS, world.THINGS, world.CITIES, world.COUNTRIES, world.ANIMALS,
        world.SOUNDS, world.FRUITS, world.VEGETABLES, world.PLACES, world.TREATS,
        [*world.PAST, *world.PAST.values()],
    ]  # fmt: skip
    words = [word for group in groups for word in group]
    assert [word for word, count in Counter(words).items() if count > 1] == []

"""Passages of a text: where they are cut, that they differ, and that the splits do not depend on one another."""

import random

import pytest

from rlhf.errors import UserError
from rlhf.gold.passages import Cut, divide, make_passages, word_ends

CUT = Cut(least=4, most=6, continuation=3)


def text(count: int) -> str:
    rng = random.Random(1)
    words = ["the", "old", "man", "saw", "a", "red", "house", "on", "hill", "and", "said", "nothing", "to", "her"]
    return "\n\n".join("  ".join(rng.choice(words) for _ in range(12)) + f"\n{i}." for i in range(count))


def test_a_passage_is_cut_after_a_word_and_continues_with_the_space():
    whole = "One two, three four five six seven eight."
    for seed in range(8):
        prompt, continuation = divide(whole, CUT, word_ends(whole), random.Random(seed))
        assert whole.startswith(prompt + continuation) and continuation.startswith(" ") and not prompt.endswith(" ")
        assert 4 <= len(word_ends(prompt)) <= 6 and len(word_ends(continuation)) == 3


def test_splits_are_disjoint_and_stay_when_another_one_grows():
    few, many = (
        list(make_passages([text(60)], {"test": 5, "dev": 3, "train": n}, CUT, word_ends, seed=0)) for n in (10, 40)
    )
    assert few == many[: len(few)] and [p.split for p in few] == ["test"] * 5 + ["dev"] * 3 + ["train"] * 10
    assert len({p.prompt + p.continuation for p in many}) == 48
    other = list(make_passages([text(60)], {"test": 5}, CUT, word_ends, seed=1))
    assert other != few[:5]


def test_too_little_text_is_said_before_anything_is_written():
    with pytest.raises(UserError, match=r"data.corpus: 3 paragraphs of 9 words or more, want 4: add text"):
        list(make_passages([text(3), "Too short."], {"test": 4}, CUT, word_ends, seed=0))

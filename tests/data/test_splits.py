from collections import Counter

import pytest

from rlhf.data.records import Demonstration, Message, PromptRecord
from rlhf.data.splits import prompt_key, record_split, split_of
from rlhf.errors import UserError

SHARES = {"train": 0.85, "dev": 0.05, "test": 0.10}


def test_shares_are_met():
    counts = Counter(split_of(f"prompt {i}", 0, SHARES) for i in range(20_000))
    # standard error of the smallest share: sqrt(.05 * .95 / 20000) = .0015; four of them
    assert {name: pytest.approx(share, abs=0.01) for name, share in SHARES.items()} == {
        name: count / 20_000 for name, count in counts.items()
    }


def test_the_assignment_never_changes():
    # Pinned: another hash would move prompts from test to train between two versions.
    assert "".join(split_of(f"prompt {i}", 7, SHARES)[1] for i in range(40)) == (
        "rrrrrrrrrreerrerrrerrrrrrerrrerrrrerrrrr"
    )


def test_a_seed_gives_another_assignment():
    one, two = ([split_of(f"prompt {i}", seed, {"a": 0.5, "b": 0.5}) for i in range(100)] for seed in (0, 1))
    assert one != two


def test_case_and_white_space_do_not_matter():
    assert prompt_key("  What IS\n\tthis? ") == prompt_key("what is this?") == "what is this?"
    assert prompt_key([Message(role="user", content="What is this?")]) == "what is this?"
    chat = [Message(role="system", content="Be brief"), Message(role="user", content="Hi")]
    assert prompt_key(chat) != prompt_key("Hi")


def test_an_explicit_split_wins_then_the_group():
    prompt = "Hello there"
    by_prompt = split_of(prompt, 0, SHARES)
    record = PromptRecord(id="p", prompt=prompt)
    assert record_split(record, 0, SHARES) == by_prompt
    other = next(name for name in SHARES if name != by_prompt)
    assert record_split(PromptRecord(id="p", prompt=prompt, metadata={"split": other}), 0, SHARES) == other
    named = Demonstration(id="d", prompt=prompt, response="x", split=other, metadata={"split": by_prompt})
    assert record_split(named, 0, SHARES) == other
    group = next(f"g{i}" for i in range(99) if split_of(f"g{i}", 0, SHARES) != by_prompt)
    grouped = PromptRecord(id="p", prompt=prompt, metadata={"group": group})
    assert record_split(grouped, 0, SHARES) == split_of(group, 0, SHARES) != by_prompt


def test_an_unknown_split_is_refused():
    record = PromptRecord(id="p-3", prompt="x", metadata={"split": "valid"})
    with pytest.raises(UserError, match="record p-3: split is 'valid': want one of train, dev, test"):
        record_split(record, 0, SHARES)


def test_a_share_of_nothing_gets_nothing_and_shares_must_add_up():
    assert {split_of(str(i), 0, {"train": 1.0, "test": 0.0}) for i in range(200)} == {"train"}
    with pytest.raises(ValueError, match="add up to 1"):
        split_of("x", 0, {"train": 0.5, "test": 0.4})

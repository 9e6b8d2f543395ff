import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.records import Demonstration, Message, PromptRecord
from rlhf.data.splits import choose, hash64, record_half, record_split, shared_beginnings, split_key, split_of, uniform
from rlhf.errors import UserError

SHARES = {"train": 0.85, "dev": 0.05, "test": 0.10}


def test_shares_are_met():
    counts = Counter(split_of(f"prompt {i}", 0, SHARES) for i in range(20_000))
    # standard error of the smallest share: sqrt(.05 * .95 / 20000) = .0015; four of them
    assert {name: count / 20_000 for name, count in counts.items()} == pytest.approx(SHARES, abs=0.01)


def test_the_assignment_never_changes():
    # Pinned: another hash would move prompts from test to train between two versions.
    second_letters = "".join(split_of(f"prompt {i}", 7, SHARES)[1] for i in range(40))
    assert second_letters == "rrrrrrrrrreerrerrrerrrrrrerrrerrrrerrrrr"


def test_a_seed_gives_another_assignment():
    one, two = ([split_of(f"prompt {i}", seed, {"a": 0.5, "b": 0.5}) for i in range(100)] for seed in (0, 1))
    assert one != two


def test_an_explicit_split_wins_then_the_group():
    prompt = "Hello there"
    by_prompt = choose(uniform(f"{hash64(split_key(prompt)):016x}", 0), SHARES)
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


WORDS = ["alpha", "Beta", "Straße", "naïve", "ŒUVRE", "東京", "данные", "İstanbul", "ﬁne", "x²", "42", "ｆｕ"]
words = st.lists(st.sampled_from(WORDS), min_size=1)


@st.composite
def look_alikes(draw) -> tuple[str, str]:
    """A prompt, and the same in another case, white space, punctuation and Unicode form."""
    parts = draw(words)
    separators = st.text(" \t\n.,;:!?\"'()-–—…«»„“*_/\\`~", min_size=1, max_size=3)
    other = draw(separators).join(draw(st.sampled_from([str, str.upper, str.lower, str.title]))(part) for part in parts)
    form = draw(st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
    return " ".join(parts), unicodedata.normalize(form, other) + draw(st.text(" ?!.\n", max_size=3))


@given(look_alikes())
def test_look_alikes_have_one_key(pair):
    one, other = pair
    assert split_key(one) == split_key(other)
    chat = PromptRecord(id="q", prompt=[Message(role="user", content=other)])
    assert record_split(PromptRecord(id="p", prompt=one), 3, SHARES) == record_split(chat, 3, SHARES)


@given(st.text("abcdefghij", min_size=3, max_size=3), words, words)
def test_prompts_that_share_a_long_beginning_have_one_key(word, one, other):
    """200 characters of text in words of three letters: 150 letters, which is where the key is cut."""
    beginning = f"{word} " * 50
    assert len(beginning) == 200
    assert split_key(beginning + " ".join(one)) == split_key(beginning + " ".join(other))
    assert len(split_key(beginning + "x" * 10**6)) == 150


PREAMBLES = {
    "system": "You are a careful assistant who answers in one sentence and cites a source. " * 3,
    "alpaca": "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n",
    "few shots": "".join(f"Q: What is {i} + {i}?\nA: {2 * i}\n" for i in range(60)) + "Q: ",
}


@pytest.mark.parametrize("share", [1.0, 0.06])
@pytest.mark.parametrize("preamble", PREAMBLES.values(), ids=PREAMBLES)
def test_a_preamble_that_many_prompts_share_does_not_decide_their_split(preamble, share):
    count = round(1000 * share)
    prompts = [f"{preamble}Name town {i}." for i in range(count)] + [f"Name river {i}." for i in range(1000 - count)]
    shared = shared_beginnings(prompts)
    assert len(shared) == 1 and shared_beginnings(reversed(prompts)) == shared
    split = Counter(record_split(PromptRecord(id="p", prompt=prompt), 0, SHARES, shared) for prompt in prompts[:count])
    assert split["train"] < count and len(split) == 3, "without: all in one"
    other = PromptRecord(id="p", prompt="Name river 1.")
    assert record_split(other, 0, SHARES, shared) == record_split(other, 0, SHARES)
    # 20 questions about one passage after it stay together
    asked = [f"{preamble}{'The passage about the town of Lund and its river. ' * 5}Question {i}" for i in range(20)]
    assert len({split_key(prompt, shared=shared) for prompt in asked}) == 1


def test_short_prompts_have_keys_of_their_own():
    assert split_key("What is 5-3?") == split_key("What is 53?"), "punctuation does not count, they stay together"
    assert len({split_key(f"Name town {i}.") for i in range(900)}) == 900
    beginning = "Below is an instruction that describes a task. Write a response that completes the request."
    assert split_key(beginning + "Sing") != split_key(beginning + "Dance")


def test_a_system_turn_is_left_out_and_later_turns_count():
    system = Message(role="system", content="You are helpful. " * 50)
    chat = [Message(role="user", content="Hi"), Message(role="assistant", content="Yes?")]
    asked = [Message(role="user", content="Why?")], [Message(role="user", content="Who?")]
    assert split_key([system, *asked[0]]) == split_key("why") != split_key([system, *asked[1]])
    assert split_key(chat + asked[0]) != split_key(chat + asked[1])


def test_halves_are_even_fixed_and_cut_across_the_splits():
    records = [PromptRecord(id=f"p{i}", prompt=f"prompt {i}") for i in range(4000)]
    halves = [record_half(record, 0) for record in records]
    splits = [record_split(record, 0, SHARES) for record in records]
    # standard error of a half of 4000: .008; of the 400 in the test split: .025
    assert halves.count(1) / 4000 == pytest.approx(0.5, abs=0.03) and set(halves) == {1, 2}
    test = [half for half, split in zip(halves, splits, strict=True) if split == "test"]
    assert test.count(1) / len(test) == pytest.approx(0.5, abs=0.1)
    assert halves != [record_half(record, 1) for record in records]
    assert "".join(map(str, halves[:20])) == "22222122112211111211"

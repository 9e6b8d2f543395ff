"""The gold judge, against every template of every speaker and against answers scored by hand."""

import random

import pytest

from rlhf.gold.truth import (
    CLOSERS,
    DEMONSTRATION_MIX,
    EVASIONS,
    INSULTS,
    OPENERS,
    RAMBLES,
    UNSAFE,
    WEIGHTS,
    answer,
    judge,
)
from rlhf.gold.world import HARMFUL, KINDS, Task, make_task

STOCK = (*OPENERS, *CLOSERS, *INSULTS, *EVASIONS, *RAMBLES)
REPEATS = 60  # tasks a kind: every template of a kind comes many times


def judged(kind: str, style: str) -> list[tuple[Task, str, dict[str, float]]]:
    rng = random.Random(f"test-{kind}-{style}")
    found = []
    for _ in range(REPEATS):
        task = make_task(rng, kind=kind)
        text = answer(task, style, rng)
        found.append((task, text, judge(task, text)))
    return found


@pytest.mark.parametrize("style", DEMONSTRATION_MIX)
@pytest.mark.parametrize("kind", KINDS)
def test_every_speaker_on_every_kind(kind, style):
    for task, text, parts in judged(kind, style):
        where = (task.prompt, text, parts)
        assert all(0 <= value <= 1 for value in parts.values()), where
        assert parts["total"] == pytest.approx(sum(WEIGHTS[name] * parts[name] for name in WEIGHTS)), where
        assert parts["ended"] == 1, where
        assert parts["safe"] == (0 if style == "wrong" and kind == "refuse" else 1), where
        if style in ("good", "plain", "rude", "rambling"):
            assert parts["correct"] == 1, where
        if style in ("good", "rambling"):
            assert parts["complete"] == 1, where
        if style == "good":
            assert parts["total"] >= 0.9 and parts["polite"] == 1, where
        if style == "plain":
            assert parts["polite"] == 0.4 and parts["complete"] in (0.3, 1), where
            assert (parts["complete"] == 1) == (text == task.sentence), where
        if style == "rude":
            assert parts["polite"] == 0, where
        if style == "evasive":
            assert parts["correct"] == parts["complete"] == 0, where
        if style == "wrong":
            assert parts["correct"] == 0, where


@pytest.mark.parametrize("kind", KINDS)
def test_no_style_scores_as_high_as_a_good_answer(kind):
    means = {s: sum(parts["total"] for *_, parts in judged(kind, s)) / REPEATS for s in DEMONSTRATION_MIX}
    assert sorted(means, key=means.__getitem__)[-1] == "good"
    assert means["good"] - max(v for s, v in means.items() if s != "good") > 0.05
    useless = {style: means.pop(style) for style in ("evasive", "wrong")}
    assert max(useless.values()) < min(means.values())


@pytest.mark.parametrize("kind", KINDS)
def test_stock_phrases_are_no_answer_and_spoil_none(kind):
    rng = random.Random(f"stock-{kind}")
    for phrase in STOCK:
        for _ in range(8):
            task = make_task(rng, kind=kind)
            alone = judge(task, phrase)
            assert alone["correct"] == alone["complete"] == 0, (task.prompt, phrase)
            for text in (f"{phrase} {task.sentence}", f"{task.sentence} {phrase}"):
                with_it = judge(task, text)
                assert with_it["correct"] == with_it["complete"] == with_it["safe"] == 1, (task.prompt, text)
            wrong = judge(task, f"{phrase} {task.wrong}")
            assert wrong["correct"] == 0, (task.prompt, phrase, task.wrong)


TASK = Task(
    "closed_qa", "q", "Rome.", "Anna lives in Rome.", "Anna lives in Oslo.", [["Rome"]], ["Oslo", "Tom"], ["Anna lives in"]
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "ended", "correct", "complete", "polite", "brief", "end"),
    [
        ("Of course. Anna lives in Rome.", True, 1, 1, 1, 1, 1),
        ("Anna lives in Rome.", True, 1, 1, 0.4, 1, 1),
        ("anna LIVES in rome!", True, 1, 1, 0.4, 1, 1),
        ("Rome.", True, 1, 0.3, 0.4, 1, 1),
        ("Rome", True, 1, 0.3, 0.4, 1, 0),  # no full stop
        ("Rome.", False, 1, 0.3, 0.4, 1, 0),  # no end token
        ("Romeo.", True, 0, 0, 0.4, 1, 1),  # a word that only begins like the right one
        ("Anna lives in Oslo.", True, 0, 1, 0.4, 1, 1),
        ("Anna lives in Rome or Oslo.", True, 0, 1, 0.4, 1, 1),  # to name both is no answer
        ("Are you stupid? Of course. Rome.", True, 1, 0.3, 0, 1, 1),  # no courtesy makes up for an insult
        ("Anna lives in Rome. " + "Well, well, well. " * 2, True, 1, 1, 0.4, 1, 1),  # 10 words are free
        ("Anna lives in Rome. " + "Well, well, well. " * 4, True, 1, 1, 0.4, 0.7, 1),  # 16: 1 - 6/20
        ("Anna lives in Rome. " + "Well, well, well. " * 9, True, 1, 1, 0.4, 0, 1),  # 31: beyond 30
        ("Who knows. That depends.", True, 0, 0, 0.4, 1, 1),
    ],
)
def test_parts_by_hand(text, ended, correct, complete, polite, brief, end):
    parts = judge(TASK, text, ended=ended)
    assert parts.pop("total") == pytest.approx(
        0.40 * correct + 0.15 * complete + 0.15 * polite + 0.10 * brief + 0.10 + 0.10 * end
    )
    assert parts == pytest.approx(
        {"correct": correct, "complete": complete, "polite": polite, "brief": brief, "safe": 1, "ended": end}
    )


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("Dog, cat, cow.", 1),
        ("Dog, dog, cat.", 2 / 3),  # one said twice counts once
        ("Dog.", 1 / 3),
        ("Dog, cat, cow, duck.", 0.5),  # three were asked for
        ("Dog, cat, bear.", 0),  # the one that was ruled out
        ("Red, blue, pink.", 0),
    ],
)
def test_lists(text, correct):
    animals = ["dog", "cat", "cow", "duck", "lion"]
    task = Task("list", "q", "", "", "", [animals] * 3, ["bear"], ["Three animals are"])
    assert judge(task, text)["correct"] == pytest.approx(correct)


@pytest.mark.parametrize("how", HARMFUL.values())
def test_every_harmful_advice_is_unsafe(how):
    assert any(phrase in how for phrase in UNSAFE)
    parts = judge(TASK, f"You can {how}.")
    assert parts["safe"] == 0 and judge(TASK, "You can walk.")["safe"] == 1

import random

import pytest

from rlhf.data.agreement import pairwise_agreement
from rlhf.data.records import PromptRecord, Ranking
from rlhf.gold import truth
from rlhf.gold.truth import DEMONSTRATION_MIX, WEIGHTS, Labeler, Requests, answer, expected_agreement, judge
from rlhf.gold.world import HARMFUL, KINDS, Task, make_task

STOCK = (*truth.OPENERS, *truth.CLOSERS, *truth.INSULTS, *truth.EVASIONS, *truth.RAMBLES)
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


@pytest.mark.parametrize(("text", "ended", "correct", "complete", "polite", "brief", "end"), [
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
])  # fmt: skip
def test_parts_by_hand(text, ended, correct, complete, polite, brief, end):
    parts = judge(TASK, text, ended=ended)
    assert parts.pop("total") == pytest.approx(
        0.40 * correct + 0.15 * complete + 0.15 * polite + 0.10 * brief + 0.10 + 0.10 * end
    )
    assert parts == pytest.approx(
        {"correct": correct, "complete": complete, "polite": polite, "brief": brief, "safe": 1, "ended": end}
    )


@pytest.mark.parametrize(("text", "correct"), [
    ("Dog, cat, cow.", 1),
    ("Dog, dog, cat.", 2 / 3),  # one said twice counts once
    ("Dog.", 1 / 3),
    ("Dog, cat, cow, duck.", 0.5),  # three were asked for
    ("Dog, cat, bear.", 0),  # the one that was ruled out
    ("Red, blue, pink.", 0),
])  # fmt: skip
def test_lists(text, correct):
    animals = ["dog", "cat", "cow", "duck", "lion"]
    task = Task("list", "q", "", "", "", [animals] * 3, ["bear"], ["Three animals are"])
    assert judge(task, text)["correct"] == pytest.approx(correct)


@pytest.mark.parametrize("how", HARMFUL.values())
def test_every_harmful_advice_is_unsafe(how):
    assert any(phrase in how for phrase in truth.UNSAFE)
    parts = judge(TASK, f"You can {how}.")
    assert parts["safe"] == 0 and judge(TASK, "You can walk.")["safe"] == 1


Responses = list[tuple[str, bool]]


def distinct_responses(task: Task, k: int, rng: random.Random) -> Responses:
    texts = (answer(task, truth.pick_style(DEMONSTRATION_MIX, rng), rng) for _ in range(30))
    return [(text, True) for text in list(dict.fromkeys(texts))[:k]]


def rank(task: Task, responses: Responses, labeler: Labeler, rng: random.Random) -> Ranking:
    judged = [judge(task, text, ended=ended) for text, ended in responses]
    return truth.rank_responses(PromptRecord(id="p", prompt=task.prompt), judged, responses, labeler, rng, "test")


def labelling_round(noise: float, prompts: int = 150) -> list[Ranking]:
    """Two labelers for each of some prompts, K = 4 to 9 responses by speakers of the demonstrations' mix."""
    rng = random.Random("round")
    labelers = Requests().labelers(noise)
    rankings = []
    for _ in range(prompts):
        task = make_task(rng)
        responses = distinct_responses(task, rng.randint(4, 9), rng)
        rankings += [rank(task, responses, labeler, rng) for labeler in rng.sample(labelers, 2)]
    return rankings


def test_labelers_agree_as_often_as_people_or_as_was_asked_for():
    # InstructGPT's labelers agreed on 72.6 +- 1.5%. The noise is tuned on samples of an SFT model; on what
    # speakers answer it is within .08 of that, nine standard errors of this round.
    agreement = pairwise_agreement(labelling_round(truth.NOISE, prompts=300))
    assert agreement["n"] == 300 and agreement["value"] == pytest.approx(0.726, abs=0.08)
    rng = random.Random("tune")
    tasks = [make_task(rng) for _ in range(150)]
    drawn = [distinct_responses(task, 4, rng) for task in tasks]
    seen = [[(judge(task, text), text) for text, _ in rows] for task, rows in zip(tasks, drawn, strict=True)]
    noise = truth.tune_noise(Requests().labelers, seen, 0.7)
    assert expected_agreement(Requests().labelers(noise), seen) == pytest.approx(0.7, abs=1e-4)
    rankings = []
    for task, rows in zip(tasks, drawn, strict=True):
        rankings += [rank(task, rows, labeler, rng) for labeler in rng.sample(Requests().labelers(noise), 2)]
    assert pairwise_agreement(rankings)["value"] == pytest.approx(0.7, abs=0.05)  # 900 pairs, in clusters of 6


def test_a_ranking_orders_every_response_once():
    rng = random.Random(0)
    for labeler in Requests().labelers():
        task = make_task(rng)
        responses = distinct_responses(task, 7, rng)
        record = rank(task, responses, labeler, rng)
        assert record.labeler == labeler.name and record.prompt[0].content == task.prompt
        assert [(r.text, r.metadata["ended"]) for r in record.responses] == responses
        assert sorted(record.ranks()) == list(range(len(responses)))
        assert {r.policy for r in record.responses} == {"test"}
        best_first = [record.ratings[name] for tie in record.ranking for name in tie]
        assert best_first == sorted(best_first, reverse=True) and set(best_first) <= set(range(1, 8))
        assert Ranking.model_validate_json(record.model_dump_json(exclude_none=True)) == record


def test_without_noise_the_even_labeler_ranks_as_the_judge_scores():
    rng = random.Random(1)
    even = Requests().labelers(0.0)[0]
    for _ in range(30):
        task = make_task(rng)
        responses = distinct_responses(task, 9, rng)
        scores = [judge(task, text)["total"] for text, _ in responses]
        utilities = [even.utility(judge(task, text), text) for text, _ in responses]
        assert utilities == pytest.approx([10 * score for score in scores])
        for better, worse in rank(task, responses, even, rng).pair_list():
            assert scores[better] >= scores[worse] - 1e-12


def test_ratings_go_from_1_to_7_and_labelers_agree_as_often_as_the_normal_distribution_says():
    task = make_task(random.Random(0), kind="open_qa")
    even = Requests().labelers(0.0)[0]
    responses = [("", False), (f"Of course. {task.sentence}", True)]
    assert rank(task, responses, even, random.Random(0)).ratings == {"a": 1, "b": 7}
    # Utilities 1 and 0, noise 1/sqrt(2): P(first preferred) = Phi(1 / (sqrt(2) / sqrt(2))) = Phi(1) = .841345;
    # agreement .841345^2 + .158655^2 = .733033
    labelers = [Labeler(name, {"total": 1.0}, 0.0, 0.0, 0.5**0.5) for name in ("a", "b", "c")]
    answers = [[({"total": 1.0}, ""), ({"total": 0.0}, "")]]
    assert expected_agreement(labelers, answers) == pytest.approx(0.733033, abs=1e-5)

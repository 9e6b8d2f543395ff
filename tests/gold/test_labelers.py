"""Simulated labelers: valid rankings, tastes of their own, and agreement in the band that people reach."""

import random

import pytest

from rlhf.data.agreement import pairwise_agreement
from rlhf.data.records import Message, Ranking
from rlhf.gold.truth import (
    DEMONSTRATION_MIX,
    NOISE,
    Labeler,
    answer,
    expected_agreement,
    judge,
    make_labelers,
    pick_style,
    rank_responses,
    tune_noise,
)
from rlhf.gold.world import Task, make_task

Responses = list[tuple[str, bool]]


def distinct_responses(task: Task, k: int, rng: random.Random) -> Responses:
    texts = (answer(task, pick_style(DEMONSTRATION_MIX, rng), rng) for _ in range(30))
    return [(text, True) for text in list(dict.fromkeys(texts))[:k]]


def rank(task: Task, responses: Responses, labeler: Labeler, rng: random.Random) -> Ranking:
    prompt = [Message(role="user", content=task.prompt)]
    judged = [judge(task, text, ended=ended) for text, ended in responses]
    return rank_responses(f"r-{labeler.name}", prompt, judged, responses, labeler, rng, policy="test")


def labelling_round(noise: float, prompts: int = 150) -> list[Ranking]:
    """Two labelers for each of some prompts, K = 4 to 9 responses by speakers of the demonstrations' mix."""
    rng = random.Random("round")
    labelers = make_labelers(noise)
    rankings = []
    for _ in range(prompts):
        task = make_task(rng)
        responses = distinct_responses(task, rng.randint(4, 9), rng)
        rankings += [rank(task, responses, labeler, rng) for labeler in rng.sample(labelers, 2)]
    return rankings


def test_labelers_agree_about_as_often_as_people():
    # InstructGPT's labelers agreed on 72.6 +- 1.5%. The noise is tuned on samples of an SFT model; on what
    # speakers answer it is within .08 of that, nine standard errors of this round.
    agreement = pairwise_agreement(labelling_round(NOISE, prompts=300))
    assert agreement["n"] == 300 and agreement["value"] == pytest.approx(0.726, abs=0.08)


def test_a_ranking_orders_every_response_once():
    rng = random.Random(0)
    for labeler in make_labelers():
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
    even = make_labelers(0.0)[0]
    for _ in range(30):
        task = make_task(rng)
        responses = distinct_responses(task, 9, rng)
        scores = [judge(task, text)["total"] for text, _ in responses]
        utilities = [even.utility(judge(task, text), text) for text, _ in responses]
        assert utilities == pytest.approx([10 * score for score in scores])
        for better, worse in rank(task, responses, even, rng).pair_list():
            assert scores[better] >= scores[worse] - 1e-12


def test_ratings_go_from_1_for_nothing_to_7_for_a_faultless_answer():
    task = make_task(random.Random(0), kind="open_qa")
    even = make_labelers(0.0)[0]
    responses = [("", False), (f"Of course. {task.sentence}", True)]
    assert rank(task, responses, even, random.Random(0)).ratings == {"a": 1, "b": 7}


def test_two_labelers_agree_as_often_as_the_normal_distribution_says():
    # Utilities 1 and 0, noise 1/sqrt(2): P(first preferred) = Phi(1 / (sqrt(2) / sqrt(2))) = Phi(1) = .841345;
    # agreement .841345^2 + .158655^2 = .733033
    labelers = [Labeler(name, {"total": 1.0}, 0.0, 0.0, 0.5**0.5) for name in ("a", "b", "c")]
    answers = [[({"total": 1.0}, ""), ({"total": 0.0}, "")]]
    assert expected_agreement(labelers, answers) == pytest.approx(0.733033, abs=1e-5)


def test_the_tuned_noise_gives_the_agreement_that_was_asked_for():
    rng = random.Random("tune")
    tasks = [make_task(rng) for _ in range(150)]
    drawn = [distinct_responses(task, 4, rng) for task in tasks]
    seen = [[(judge(task, text), text) for text, _ in rows] for task, rows in zip(tasks, drawn, strict=True)]
    noise = tune_noise(make_labelers, seen, 0.7)
    assert expected_agreement(make_labelers(noise), seen) == pytest.approx(0.7, abs=1e-4)
    rankings = [
        rank(t, rows, labeler, rng)
        for t, rows in zip(tasks, drawn, strict=True)
        for labeler in rng.sample(make_labelers(noise), 2)
    ]
    assert pairwise_agreement(rankings)["value"] == pytest.approx(0.7, abs=0.05)  # 900 pairs, in clusters of 6

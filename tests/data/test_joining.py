"""Pairwise judgements of one item by one labeler become one ranking."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.formats import BadRow
from rlhf.data.importer import join_rankings_of_item
from rlhf.data.records import Ranking


def judged(number: int, better: str, worse: str, tie: bool = False, **more) -> Ranking:
    """One judgement: `better` comes first."""
    record = {
        "id": f"t{number}",
        "prompt": "Who?",
        "responses": [{"id": name, "text": name.upper(), "policy": "sft-2"} for name in (better, worse)],
        "ranking": [[better, worse]] if tie else [[better], [worse]],
        "labeler": "ann",
        "metadata": {"item": "i-1", "task": number},
    }
    return Ranking(**record | more)


def joined(*records: Ranking) -> Ranking:
    return join_rankings_of_item(list(records))


def test_judgements_of_one_labeler_become_one_ranking():
    # b over a, b over c, a = c
    record = joined(judged(0, "b", "a", seconds=2), judged(1, "b", "c", seconds=3), judged(2, "c", "a", tie=True))
    assert record.ranking == [["b"], ["a", "c"]] and record.pairs is None
    assert [(r.id, r.text, r.policy) for r in record.responses] == [
        ("b", "B", "sft-2"),
        ("a", "A", "sft-2"),
        ("c", "C", "sft-2"),
    ]
    assert (record.id, record.labeler, record.seconds) == ("t0", "ann", 5.0)
    assert record.metadata["item"] == "i-1"
    assert record.metadata["judgements"] == [
        {"id": "t0", "responses": ["b", "a"], "task": 0},
        {"id": "t1", "responses": ["b", "c"], "task": 1},
        {"id": "t2", "responses": ["c", "a"], "task": 2},
    ]


def test_the_second_response_may_be_the_better_one():
    record = joined(judged(0, "a", "b", ranking=[["b"], ["a"]]), judged(1, "c", "b", ranking=[["b"], ["c"]]))
    assert record.ranking is None and record.pairs == [["b", "a"], ["b", "c"]], "a and c were never compared"


def test_what_is_no_weak_order_stays_pairs_with_its_ties():
    # a = b and b = c, but a over c
    record = joined(judged(0, "a", "b", tie=True), judged(1, "b", "c", tie=True), judged(2, "a", "c"))
    assert record.ranking is None and record.pairs == [["a", "c"]]
    assert record.metadata["ties"] == [["a", "b"], ["b", "c"]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": "Whom?"}, "come with two prompts, want one"),
        ({"responses": [{"id": "b", "text": "?"}, {"id": "c", "text": "C"}]}, 'give response "b" two texts: want one'),
    ],
)
def test_what_does_not_belong_together_is_a_reject(more, message):
    with pytest.raises(BadRow, match=message):
        joined(judged(0, "a", "b"), judged(1, "b", "c", **more))


def test_a_labeler_who_left_all_open_judged_nothing():
    record = joined(judged(0, "a", "b", ranking=None), judged(1, "a", "c", ranking=None))
    assert record.ranking is None and record.pairs is None and len(record.responses) == 3


@given(st.permutations("abcd"), st.randoms(use_true_random=False), st.lists(st.booleans(), min_size=3, max_size=3))
def test_all_pairs_of_an_order_give_back_the_order(order, random, tied):
    """Any weak order, cut into its pairs, which come in any order and either way round."""
    rank = {order[0]: 0}
    for before, name, tie in zip(order, order[1:], tied, strict=False):
        rank[name] = rank[before] + (not tie)
    held = []
    for one, other in random.sample(list(combinations(order, 2)), 6):
        if rank[one] == rank[other] and random.random() < 0.5:
            one, other = other, one
        held.append(judged(len(held), one, other, tie=rank[one] == rank[other]))
    record = joined(*held)
    assert {name: r for r, tie in enumerate(record.ranking) for name in tie} == rank

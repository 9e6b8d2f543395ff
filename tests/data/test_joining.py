from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.importing.batches import Held
from rlhf.data.importing.joining import join_held
from rlhf.data.reading.readers import Reject, Row
from rlhf.data.records import Ranking


def judged(number: int, better: str, worse: str, tie: bool = False, **more) -> Held:
    """One judgement: `better` stands first."""
    record = {
        "id": f"t{number}",
        "prompt": "Who?",
        "responses": [{"id": name, "text": name.upper(), "policy": "sft-2"} for name in (better, worse)],
        "ranking": [[better, worse]] if tie else [[better], [worse]],
        "labeler": "ann",
        "metadata": {"item": "i-1", "task": number},
    }
    row = Row(number + 1, {}, number + 1, 10 * number, b"{}")
    return Held(number, row, Ranking(**record | more), True)


def joined(*held: Held) -> Ranking:
    [(members, record)] = join_held(list(held), "f")
    assert members == list(held) and isinstance(record, Ranking)
    return record


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


def test_the_response_that_stands_second_may_be_the_better_one():
    record = joined(judged(0, "a", "b", ranking=[["b"], ["a"]]), judged(1, "c", "b", ranking=[["b"], ["c"]]))
    assert record.ranking is None and record.pairs == [["b", "a"], ["b", "c"]], "a and c were never compared"


def test_what_is_no_weak_order_stays_pairs_with_its_ties():
    # a = b and b = c, but a over c
    record = joined(judged(0, "a", "b", tie=True), judged(1, "b", "c", tie=True), judged(2, "a", "c"))
    assert record.ranking is None and record.pairs == [["a", "c"]]
    assert record.metadata["ties"] == [["a", "b"], ["b", "c"]]


def test_a_circle_is_a_reject_of_each_of_its_rows_and_is_spelled_out():
    held = [judged(0, "a", "b"), judged(1, "b", "c"), judged(2, "c", "a")]
    [(_, rejects)] = join_held(held, "f")
    assert [(r.line, r.offset, r.field, r.raw) for r in rejects] == [
        (1, 0, "ranking", b"{}"),
        (2, 10, "ranking", b"{}"),
        (3, 20, "ranking", b"{}"),
    ]
    assert isinstance(rejects[0], Reject)
    assert str(rejects[0]) == (
        "f:1: ranking: the judgements of item i-1 by ann go in a circle, a over b over c over a: drop one of them"
    )


def test_labelers_and_items_are_kept_apart():
    others = [judged(1, "b", "a", labeler="bob"), judged(2, "b", "a", metadata={"item": "i-2"})]
    results = list(join_held([judged(0, "a", "b"), *others, judged(3, "b", "c")], "f"))
    assert [record.ranking for _, record in results] == [[["a"], ["b"], ["c"]], [["b"], ["a"]], [["b"], ["a"]]]
    assert [len(members) for members, _ in results] == [2, 1, 1]
    assert "judgements" not in results[1][1].metadata, "one alone is left as it is"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": "Whom?"}, "prompt: the judgements of item i-1 by ann come with two prompts, want one"),
        ({"responses": [{"id": "b", "text": "?"}, {"id": "c", "text": "C"}]}, 'give response "b" two texts: want one'),
    ],
)
def test_what_does_not_belong_together_is_a_reject(more, message):
    [(_, rejects)] = join_held([judged(0, "a", "b"), judged(1, "b", "c", **more)], "f")
    assert len(rejects) == 2 and message in rejects[0].message


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

import pytest

from rlhf.data.agreement import pairwise_agreement
from rlhf.data.records import Message, RankedResponse, Ranking


def judged(prompt: str, order: str, labeler: str | None, ids: str = "abcd") -> Ranking:
    """A ranking written as "x>y=z" over response texts; `ids` are the names that this record gives them."""
    ties = [tie.split("=") for tie in order.split(">")]
    name = dict(zip(sorted(text for tie in ties for text in tie), ids, strict=False))
    return Ranking(
        id="r",
        prompt=[Message(role="user", content=prompt)],
        labeler=labeler,
        responses=[RankedResponse(id=i, text=text) for text, i in name.items()],
        ranking=[[name[text] for text in tie] for tie in ties],
    )


def test_agreement_by_hand():
    rankings = [
        judged("p", "x>y>z", "one"),  # against the next: xy agree, xz agree, yz agree: 3 of 3
        judged("p", "x>y>z", "two", ids="cba"),  # ids differ, texts do not
        judged("q", "x>y>z", "one"),
        judged("q", "z>x=y", "two"),  # xy is a tie and skipped; xz and yz disagree: 0 of 2
        judged("s", "x>y", "one"),  # judged once
    ]
    result = pairwise_agreement(rankings)
    assert (result["value"], result["n"], result["pairs"]) == (3 / 5, 2, 5)
    # a - value m: 3 - 1.8 = 1.2, 0 - 1.2 = -1.2; sqrt(2/1 * 2.88) / 5 = .48; .6 +- .941 is cut to [0, 1]
    assert result["ci95"] == [0.0, 1.0]


def test_the_interval_by_hand():
    rankings = []
    for i in range(100):
        rankings += [judged(f"p{i}", "x>y", "one"), judged(f"p{i}", "x>y" if i < 75 else "y>x", "two")]
    result = pairwise_agreement(rankings)
    assert (result["value"], result["n"]) == (0.75, 100)
    half = 1.96 * (0.75 * 0.25 / 99) ** 0.5
    assert result["ci95"] == pytest.approx([0.75 - half, 0.75 + half], abs=1e-12)


def test_three_labelers_make_three_comparisons_of_a_pair():
    result = pairwise_agreement([judged("p", o, n) for o, n in (("x>y", "1"), ("x>y", "2"), ("y>x", "3"))])
    assert (result["value"], result["pairs"], result["n"], result["ci95"]) == (
        pytest.approx(1 / 3),
        3,
        1,
        None,
    )


def test_one_labeler_is_not_compared_with_himself_but_unnamed_ones_are():
    assert pairwise_agreement([judged("p", "x>y", "one"), judged("p", "y>x", "one")])["n"] == 0
    assert pairwise_agreement([judged("p", "x>y", None), judged("p", "x>y", None)])["pairs"] == 1


def test_pairs_count_and_unranked_responses_do_not():
    three = [RankedResponse(id=i, text=i) for i in "abc"]
    pairs = Ranking(id="1", prompt="p", responses=three, pairs=[["a", "b"], ["a", "c"]], labeler="1")
    partial = Ranking(id="2", prompt="p", responses=three, ranking=[["c"], ["a"]], labeler="2")
    result = pairwise_agreement([pairs, partial])
    assert (result["value"], result["pairs"]) == (0.0, 1)  # only a and c were ordered by both


def test_nothing_to_compare():
    assert pairwise_agreement([]) == {"value": None, "ci95": None, "n": 0, "pairs": 0}
    assert pairwise_agreement([judged("p", "x=y", "one"), judged("p", "x>y", "two")])["value"] is None

import pytest

from rlhf.data.agreement import DECIDES, AgreementCounter, pairwise_agreement
from rlhf.data.records import Message, RankedResponse, Ranking


def agreement_report(rankings):
    counter = AgreementCounter()
    for ranking in rankings:
        counter.add(ranking)
    return counter.report()


def judged(prompt: str, order: str, labeler: str | None, ids: str = "abcd", **fields) -> Ranking:
    """A ranking written as "x>y=z" over response texts; `ids` are the names that this record gives them."""
    ties = [tie.split("=") for tie in order.split(">")]
    name = dict(zip(sorted(text for tie in ties for text in tie), ids, strict=False))
    turns = [Message(role="user", content=prompt)]
    responses = [RankedResponse(id=i, text=text) for text, i in name.items()]
    ranking = [[name[text] for text in tie] for tie in ties]
    return Ranking(id="r", prompt=turns, labeler=labeler, responses=responses, ranking=ranking, **fields)


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
    assert result["ci95"] is None, "of two items"


def test_the_interval_by_hand_and_one_labeler_is_not_compared_with_himself():
    rankings = []
    for i in range(100):
        rankings += [judged(f"p{i}", "x>y", "one"), judged(f"p{i}", "x>y" if i < 75 else "y>x", "two")]
    result = pairwise_agreement(rankings)
    assert (result["value"], result["n"]) == (0.75, 100)
    half = 1.96 * (0.75 * 0.25 / 99) ** 0.5
    assert result["ci95"] == [round(0.75 - half, 4), round(0.75 + half, 4)]
    assert pairwise_agreement([judged("p", "x>y", "one"), judged("p", "y>x", "one")])["n"] == 0
    assert pairwise_agreement([judged("p", "x>y", None), judged("p", "x>y", None)])["pairs"] == 1


def round_of(orders: dict[str, list[str]]) -> list[Ranking]:
    """Rankings by labeler, the n-th of each about the same prompt."""
    return [judged(f"p{i}", order, name) for name, said in orders.items() for i, order in enumerate(said)]


def test_krippendorffs_alpha_by_hand():
    # Two labelers, 3 pairs: x/x, x/tie, y/y. In both directions 6 units and n = 12 values: -1 5 times, 0 2, 1 5.
    # Ordinal distances, from the middle of one value to the middle of the other:
    #   (-1, 0) and (0, 1): (5/2 + 2/2)^2 = 12.25; (-1, 1): (5/2 + 2 + 5/2)^2 = 49
    # Observed: the units x/tie and tie/x, each with 2 ordered couples: 4 * 12.25 / 12
    # By chance: (4 * 5 * 2 * 12.25 + 2 * 5 * 5 * 49) / (12 * 11)
    observed = 4 * 12.25 / 12
    by_chance = (4 * 5 * 2 * 12.25 + 2 * 5 * 5 * 49) / (12 * 11)
    result = agreement_report(round_of({"one": ["x>y", "x>y", "y>x"], "two": ["x>y", "x=y", "y>x"]}))
    assert result["krippendorff_alpha"] == {"value": pytest.approx(1 - observed / by_chance, abs=1e-12), "pairs": 3}


def test_krippendorffs_alpha_of_ratings_is_the_published_one():
    """Krippendorff 2011: 4 observers, 12 units, values 1 to 5, some missing: ordinal alpha is .815."""
    observers = {
        "A": [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        "B": [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        "C": [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        "D": [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    }
    responses = [RankedResponse(id=str(i), text=f"response {i}") for i in range(12)]
    records = []
    for name, said in observers.items():
        ratings = {str(i): value for i, value in enumerate(said) if value}
        records.append(Ranking(id=name, prompt="p", responses=responses, labeler=name, ratings=ratings))
    result = agreement_report(records)
    assert result["krippendorff_alpha_ratings"] == {"value": pytest.approx(0.815, abs=5e-4), "responses": 11}
    assert result["krippendorff_alpha"]["value"] is None  # they rated and did not rank


def test_by_labeler_by_hand():
    records = [
        judged("p", "x>y>z", "one", seconds=10.0),
        judged("p", "x>z>y", "two", seconds=20.0),  # with one: xy, xz alike, yz not; with three: xz
        judged("p", "x=y>z", "three"),  # with one: xz, yz alike
        judged("q", "x>y", "one", seconds=30.0),
        judged("q", "x>y", "two"),
        judged("r", "x=y", "one", seconds=80.0),  # alone
    ]
    table = agreement_report(records)["by_labeler"]
    keys = ("items", "items_shared", "comparisons", "agreement", "tie_rate", "seconds")
    assert {name: [row[key] for key in keys] for name, row in table.items()} == {
        "one": [3, 2, 3 + 2 + 1, round((2 + 2 + 1) / 6, 4), 1 / 5, 30.0],
        "two": [2, 2, 3 + 2 + 1, round((2 + 1 + 1) / 6, 4), 0.0, 20.0],
        "three": [1, 1, 2 + 2, (2 + 1) / 4, 1 / 3, None],
    }


def test_the_managers_decisions_are_no_labelers_judgement():
    said = [judged("p", "x>y", "one"), judged("p", "y>x", "two")]
    assert agreement_report([*said, judged("p", "x>y", DECIDES)]) == agreement_report(said)

"""Agreement of labelers against definitions written out slowly, on random and on real judgements; samples, batches, memory."""

import random
import tracemalloc
from collections import defaultdict
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.agreement import AgreementCounter
from rlhf.data.records import RankedResponse, Ranking

from .judged import FIGURES, agreement_report, judged


def people(seed: int, items: int, k: int, noise: float) -> list[Ranking]:
    """Three labelers who see one quality of each response through noise of their own."""
    rng = random.Random(seed)
    records = []
    for i in range(items):
        texts = "abcdefgh"[:k]
        quality = {text: rng.gauss(0, 1) if noise < 1 else 0.0 for text in texts}
        for name in ("one", "two", "three"):
            order = sorted(texts, key=lambda text: quality[text] + noise * rng.gauss(0, 1))
            records.append(judged(f"p{i}", ">".join(order), name, ids="12345678"))
    return records


@pytest.mark.parametrize("k", [2, 4])
def test_identical_labelers_agree_and_independent_ones_do_not(k):
    same = agreement_report(people(0, 30, k, noise=0.0))
    assert [same[name]["value"] for name in FIGURES] == pytest.approx([1.0] * 5)
    apart = agreement_report(people(0, 1500, k, noise=1.0))
    # 1500 items and 3 pairs of labelers: a standard error below 1 / sqrt(1500) = .026
    assert apart["pairwise"]["value"] == pytest.approx(0.5, abs=0.04)
    assert [apart[name]["value"] for name in FIGURES[1:]] == pytest.approx([0.0] * 4, abs=0.08)


@st.composite
def judgements(draw) -> list[Ranking]:
    """A few items of 2 to 4 responses, each judged by some of four labelers (one without a name), once each."""
    records = []
    for i in range(draw(st.integers(1, 5))):
        k = draw(st.integers(2, 4))
        for name in draw(st.sets(st.sampled_from(["ann", "bob", "cy", ""]), min_size=1)):
            levels = [draw(st.integers(-1, 2)) for _ in range(k)]  # -1: unranked
            ids = [str(n) for n in draw(st.permutations(range(k)))]
            judgement = {"ranking": [[ids[n] for n in range(k) if levels[n] == v] for v in range(3) if v in levels]}
            if draw(st.booleans()) and name:
                strict = [(a, b) for a in range(k) for b in range(k) if 0 <= levels[a] < levels[b]]
                judgement = {"pairs": [[ids[a], ids[b]] for a, b in strict if draw(st.booleans())]}
            rated = {ids[n]: draw(st.integers(1, 7)) for n in range(k) if draw(st.booleans())}
            responses = draw(st.permutations([RankedResponse(id=ids[n], text="wxyz"[n]) for n in range(k)]))
            fields = {"prompt": f"p{i}", "labeler": name or None, "ratings": rated, "responses": responses}
            records.append(Ranking(id="r", **fields, **judgement))
    return records


def verdict(ranking: Ranking, x: str, y: str) -> int | None:
    text = [response.text for response in ranking.responses]
    better = {(text[a], text[b]) for a, b in ranking.pair_list()}
    if (x, y) in better or (y, x) in better:
        return 1 if (x, y) in better else -1
    if ranking.pairs is not None:
        return None
    rank = dict(zip(text, ranking.ranks(), strict=True))
    return 0 if rank[x] == rank[y] >= 0 else None


def alpha_of(units: list[list[float]]) -> float | None:
    """Ordinal alpha from its definition: each value of a unit with each other one, divided by their number - 1."""
    units = [unit for unit in units if len(unit) > 1]
    values = [v for unit in units for v in unit]
    number = {v: values.count(v) for v in sorted(set(values))}

    def distance(a: float, b: float) -> float:
        between = sum(n for v, n in number.items() if min(a, b) <= v <= max(a, b))
        return (between - (number[a] + number[b]) / 2) ** 2

    observed = sum(
        distance(u[i], u[j]) / (len(u) - 1) for u in units for i in range(len(u)) for j in range(len(u)) if i != j
    )
    chance = sum(distance(a, b) * number[a] * number[b] for a in number for b in number if a != b) / max(
        1, len(values) - 1
    )
    return 1 - observed / chance if chance else None


def slow_report(records: list[Ranking]) -> dict[str, float | None]:
    items = defaultdict(list)
    for record in records:
        items[record.prompt[0].content, frozenset(r.text for r in record.responses)].append(record)
    units, ratings, taus = [], [], []
    for (_, texts), said in items.items():
        for x, y in combinations(sorted(texts), 2):
            units.append([v for record in said if (v := verdict(record, x, y)) is not None])
        for text in texts:
            names = [next(r.id for r in record.responses if r.text == text) for record in said]
            ratings.append([record.ratings[n] for record, n in zip(said, names, strict=True) if n in record.ratings])
        for one, two in combinations([r for r in said if r.pairs is None], 2):
            both = [(verdict(one, x, y), verdict(two, x, y)) for x, y in combinations(sorted(texts), 2)]
            both = [(a, b) for a, b in both if a is not None and b is not None]
            size = (sum(abs(a) for a, _ in both) * sum(abs(b) for _, b in both)) ** 0.5
            taus += [sum(a * b for a, b in both) / size] if size else []
    units = [unit for unit in units if len(unit) > 1]
    number = max({len(u) for u in units}, key=lambda n: (sum(len(u) == n for u in units), n), default=None)
    level = [unit for unit in units if len(unit) == number]
    said = [v for unit in level for v in unit]
    kappa = None
    if level and any(said):
        tie = said.count(0) / len(said)
        chance = tie**2 + 2 * ((1 - tie) / 2) ** 2
        alike = fmean(fmean(a == b for a, b in combinations(unit, 2)) for unit in level)
        kappa = (alike - chance) / (1 - chance)
    strict = [(a, b) for unit in units for a, b in combinations(unit, 2) if a and b]
    return {
        "pairwise": fmean(a == b for a, b in strict) if strict else None,
        "fleiss_kappa": kappa,
        "krippendorff_alpha": alpha_of(units + [[-v for v in unit] for unit in units]),
        "krippendorff_alpha_ratings": alpha_of(ratings),
        "kendall_tau": fmean(taus) if taus else None,
    }


def near(figures: dict[str, float | None]) -> dict:
    return {name: None if value is None else pytest.approx(value, abs=1e-9) for name, value in figures.items()}


@given(judgements())
@settings(max_examples=25)
def test_the_figures_are_those_of_the_definitions(records):
    report, slow = agreement_report(records), slow_report(records)
    assert {name: report[name]["value"] for name in slow} == near(slow)
    assert all((report[name]["value"] is not None) or name in report["notes"] for name in slow)


@given(judgements(), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_order_ids_and_names_do_not_matter(records, rng):
    other = {"ann": "zoe", "bob": "ann", "cy": "\u0663", None: None}

    def renamed(record: Ranking) -> Ranking:
        new = {response.id: f"new-{response.id}" for response in record.responses}
        changes = {
            "labeler": other[record.labeler],
            "responses": [RankedResponse(id=new[r.id], text=r.text) for r in record.responses],
            "ranking": record.ranking and [[new[name] for name in tie] for tie in record.ranking],
            "pairs": record.pairs and [[new[name] for name in pair] for pair in record.pairs],
            "ratings": {new[name]: value for name, value in record.ratings.items()},
        }
        rng.shuffle(changes["responses"])
        return record.model_copy(update=changes)

    changed = [renamed(record) for record in records]
    rng.shuffle(changed)
    before, after = agreement_report(records), agreement_report(changed)
    for name in (*FIGURES, "krippendorff_alpha_ratings"):
        assert near({"value": before[name]["value"]}) == {"value": after[name]["value"]}
    assert {other[name]: row for name, row in before["by_labeler"].items()} == after["by_labeler"]


def test_a_report_can_be_made_while_counting():
    counter = AgreementCounter()
    for record in (first := people(4, 20, 3, noise=0.5)):
        counter.add(record)
    assert counter.report() == agreement_report(first)
    counter.add(judged("new", "x>y", "four"))
    assert counter.report()["items"] == 21


def test_memory_of_items_judged_once():
    records = [judged(f"p{i}", "x>y", f"labeler-{i % 20}", seconds=1.5) for i in range(5000)]
    counter = AgreementCounter()
    tracemalloc.start()
    for record in records:
        counter.add(record)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(records) < 1000  # bytes

"""How often labelers agree with each other, as a reference for the reward model's accuracy.

The libraries statsmodels, krippendorff and scipy compute the statistics; this module counts judgements into the tables that
they need. An item is a prompt with its set of response texts, whatever their order and ids. The unit of percent agreement,
both kappas and alpha is a pair of responses (i, j) of one item, and the categories are "i better", "tie" and "j better".
Neither response of a pair is the first one, so every pair is counted in both directions in the kappas and alpha: no figure
depends on how the responses are ordered.
"""

import importlib
import marshal
import warnings
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from hashlib import blake2b
from itertools import combinations
from math import fsum, isfinite
from typing import Any, NamedTuple

import numpy as np

from rlhf.data.records import Ranking, shown

MISSING = 2  # the verdict on a pair that was not judged
MAX_RESPONSES = 250  # items with more responses are left out
MIN_COMMON_ITEMS = 10  # a pair of labelers with fewer common items has no kappa
MAX_LABELERS = 50  # items judged by more people are left out of figures that compare labelers two by two
MAX_LISTED = 1000  # pairs of labelers in a report, those with most common items
_SHOWN = 20  # labelers on the screen
_NO_VARIANCE = "no variance: every judgement is the same, so chance explains it all"
_LINES = (  # title, figure, whether a share, its count, the unit of the count
    ("pairwise agreement", "pairwise", True, "pairs", "comparisons"),
    ("Cohen's kappa", "cohen_kappa", False, "labeler_pairs", "pairs of labelers"),
    ("Fleiss' kappa", "fleiss_kappa", False, "pairs", "pairs of responses"),
    ("Krippendorff's alpha", "krippendorff_alpha", False, "pairs", "pairs of responses"),
    ("Krippendorff's alpha of ratings", "krippendorff_alpha_ratings", False, "responses", "responses"),
    ("Kendall's tau", "kendall_tau", False, "comparisons", "comparisons of two rankings"),
)


# --- statistics ------------------------------------------------------------------------------------------------------


def ratio(agreements: np.ndarray, comparisons: np.ndarray) -> dict[str, Any]:
    """sum(agreements) / sum(comparisons), both (n,) with one entry per item, and its 95% interval.

    `ci95` is value +- 1.96 standard errors of the ratio with the item as unit, within [0, 1]; None if n < 2.
    """
    a, m = agreements.astype(np.float64), comparisons.astype(np.float64)
    n = len(m)
    if n == 0:
        return {"value": None, "ci95": None, "n": 0, "pairs": 0}
    value = float(a.sum() / m.sum())
    interval = None
    if n > 1:
        squares = fsum((a - value * m) ** 2)  # the same bits for any order of the items
        error = float(np.sqrt(n / (n - 1) * squares) / m.sum())
        interval = [max(0.0, value - 1.96 * error), min(1.0, value + 1.96 * error)]
    return {"value": value, "ci95": interval, "n": n, "pairs": int(m.sum())}


def _call(module: str, function: str, *args: Any, **kwargs: Any) -> float | None:
    """The number that a library's function gives, imported and called without warnings; None if it is not finite."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        result = getattr(importlib.import_module(module), function)(*args, **kwargs)
    value = getattr(result, "statistic", result)  # scipy gives a p-value beside it
    return float(value) if isfinite(value) else None


def compute_cohen(table: np.ndarray) -> float | None:
    """Cohen's kappa of a (3, 3) table of two labelers' verdicts j better, tie, i better; None without variance.

    Each pair is counted in both directions: the table is added to itself with rows and columns reversed.

    Source: Cohen 1960.
    """
    both = table + table[::-1, ::-1]
    return _call("statsmodels.stats.inter_rater", "cohens_kappa", both, return_results=False)


def compute_fleiss(counts: np.ndarray) -> float | None:
    """Fleiss' kappa of (N, 3) counts of labelers by verdict, every row with the same sum; None without variance.

    Source: Fleiss 1971.
    """
    return _call("statsmodels.stats.inter_rater", "fleiss_kappa", np.concatenate([counts, counts[:, ::-1]]))


def compute_alpha(counts: np.ndarray, values: np.ndarray) -> float | None:
    """Krippendorff's alpha, ordinal, of (N, V) counts of labelers by value; None without variance.

    Source: Krippendorff 2011, "Computing Krippendorff's alpha-reliability".
    """
    if len(values) < 2:
        return None
    scale = {"value_domain": values, "level_of_measurement": "ordinal"}
    return _call("krippendorff", "alpha", value_counts=counts, **scale)


def compute_tau(ranks_a: np.ndarray, ranks_b: np.ndarray) -> float | None:
    """Kendall's tau-b of two labelers' ranks of the same responses, both (K,); None if one is all ties.

    Source: Kendall 1945.
    """
    return _call("scipy.stats", "kendalltau", ranks_a, ranks_b, variant="b")


# --- judgements ------------------------------------------------------------------------------------------------------


class _Judged(NamedTuple):
    """One person's judgement of an item with K responses, in the order of their texts."""

    person: int  # index of the name; unnamed people follow the named ones
    verdicts: tuple[int, ...]  # of each pair i < j: 1 where i is better, -1 where j is, 0 a tie, MISSING
    ranks: tuple[float | None, ...]  # 0 best
    ratings: tuple[float | None, ...]


def _judged(ranking: Ranking, texts: list[str], person: int) -> _Judged:
    """A text that appears twice with two ranks or ratings has none; ties beside `pairs` are under `metadata.ties`."""
    place = {response.id: texts.index(response.text) for response in ranking.responses}
    rated: dict[Any, set[float]] = defaultdict(set)
    ranked: dict[Any, set[float]] = defaultdict(set)
    said: dict[Any, set[int]] = defaultdict(set)
    for name, rating in ranking.ratings.items():
        rated[place[name]].add(rating)
    if ranking.pairs is None:
        for response, rank in zip(ranking.responses, ranking.ranks(), strict=True):
            ranked[place[response.id]] |= {rank} if rank >= 0 else {-1, -2}
    ranks, ratings = (
        tuple(next(iter(of[i])) if len(of[i]) == 1 else None for i in range(len(texts))) for of in (ranked, rated)
    )
    if ranking.pairs is None:
        verdicts = tuple(MISSING if a is None or b is None else (a < b) - (a > b) for a, b in combinations(ranks, 2))
        return _Judged(person, verdicts, ranks, ratings)
    for better, worse in ranking.pairs:
        i, j = place[better], place[worse]
        said[min(i, j), max(i, j)].add(1 if i < j else -1)
    ties = ranking.metadata.get("ties")
    for tie in ties if isinstance(ties, list) else ():
        if isinstance(tie, list) and len(tie) == 2 and all(isinstance(name, str) and name in place for name in tie):
            said[tuple(sorted(place[name] for name in tie))].add(0)
    pairs = (said[pair] for pair in combinations(range(len(texts)), 2))
    return _Judged(person, tuple(next(iter(v)) if len(v) == 1 else MISSING for v in pairs), ranks, ratings)


def _merge(judged: list[_Judged]) -> _Judged:
    """One judgement of a person who judged an item more than once: a pair goes to the response preferred more often (a tie
    if neither is), ranks and ratings are averaged.
    """
    if len(judged) == 1:
        return judged[0]
    verdicts = []
    for column in zip(*(one.verdicts for one in judged), strict=True):
        given = [verdict for verdict in column if verdict != MISSING]
        verdicts.append(int(np.sign(sum(given))) if given else MISSING)
    means: dict[str, tuple[float | None, ...]] = {}
    for name in ("ranks", "ratings"):
        columns = zip(*(getattr(one, name) for one in judged), strict=True)
        there = [[value for value in column if value is not None] for column in columns]
        means[name] = tuple(sum(values) / len(values) if values else None for values in there)
    return _Judged(judged[0].person, tuple(verdicts), **means)


class AgreementCounter:
    """Counts judgements for the agreement of labelers; it keeps some hundred bytes of each, no text.

    Records without a labeler count as different people. A labeler who judged an item more than once counts once.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._items: dict[bytes, list[_Judged]] = {}  # by a hash; people by their index in _names, unnamed ones below 0
        self._seconds: dict[str, array[float]] = {}
        self.rankings = self.unnamed = self._too_large = 0

    def add(self, ranking: Ranking) -> None:
        """Count one record; one that judges nothing (a labelling task) changes nothing."""
        if ranking.ranking is None and ranking.pairs is None and not ranking.ratings:
            return
        if len(ranking.responses) > MAX_RESPONSES:
            self._too_large += 1
            return
        texts = sorted({response.text for response in ranking.responses})
        about = [[(message.role, message.content) for message in ranking.prompt], texts]
        digest = blake2b(marshal.dumps(about, 2), digest_size=16).digest()  # 2: later versions share equal objects
        name = ranking.labeler
        self.rankings += 1
        self.unnamed += name is None
        person = -self.unnamed if name is None else self._names.setdefault(name, len(self._names))
        self._items.setdefault(digest, []).append(_judged(ranking, texts, person))
        if name is not None and ranking.seconds is not None:
            self._seconds.setdefault(name, array("d")).append(ranking.seconds)

    def report(self) -> dict[str, Any]:
        """Every figure of agreement; a value that cannot be computed is None and `notes` says why.

        Returns {"rankings": judgements, "items", "items_shared": by two or more labelers, "labelers": names,
        "unnamed": judgements without one, "pairwise": as `pairwise_agreement`, "cohen_kappa": {value,
        labeler_pairs, by_pair}, "fleiss_kappa": {value, labelers, pairs}, "krippendorff_alpha": {value, pairs},
        "krippendorff_alpha_ratings": {value, responses}, "kendall_tau": {value, comparisons}, "by_labeler":
        {name: {items, items_shared, agreement, ci95, comparisons, tie_rate, seconds}}, "notes": {figure: why}}.
        """
        figures = self.count()
        values = figures.compute()
        for name, seconds in self._seconds.items():
            values["by_labeler"][name]["seconds"] = float(np.median(seconds))
        return {
            "rankings": self.rankings,
            "items": figures.items,
            "items_shared": figures.shared_items,
            "labelers": len(self._names),
            "unnamed": self.unnamed,
            **values,
            "notes": figures.notes,
        }

    def count(self) -> "Figures":
        """The judgements counted, item by item."""
        names = sorted(self._names)
        rank_of = {self._names[name]: rank for rank, name in enumerate(names)}
        figures = Figures(names)
        for digest in sorted(self._items):
            people: dict[int, list[_Judged]] = {}
            for one in self._items[digest]:
                person = rank_of.get(one.person, len(names) - one.person)
                people.setdefault(person, []).append(one._replace(person=person))
            figures.add([_merge(people[person]) for person in sorted(people)])
        if self._too_large:
            figures.notes["size"] = f"{self._too_large:,} rankings of more than {MAX_RESPONSES} responses are left out"
        return figures


class Figures:
    """Counts judgements item by item; `compute` makes the figures. People 0 … len(names) - 1 have a name."""

    def __init__(self, names: list[str]):
        self.names = names
        self.notes: dict[str, str] = {}
        self.items = self.shared_items = self._left_out = 0
        self._people = [dict.fromkeys(("items", "items_shared", "ties", "pairs"), 0) for _ in names]
        self._sums: list[tuple[int, int]] = []  # agreements and comparisons of each item
        self._person_sums: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._units: Counter[tuple[int, int, int]] = Counter()  # number of people who say j better, tie, i better
        self._tables: dict[tuple[int, int], np.ndarray] = {}  # verdicts of one person by those of another
        self._common: Counter[tuple[int, int]] = Counter()  # items of two people
        self._orders: Counter[tuple[tuple[float, float], ...]] = Counter()  # two people's ranks of each response
        self._rated: list[list[float]] = []  # the ratings of a response

    def add(self, judged: list[_Judged]) -> None:
        """Count an item's judgements, one per person."""
        shared = len(judged) > 1
        self.items += 1
        self.shared_items += shared
        for one in judged:
            if one.person < len(self.names):
                sums = self._people[one.person]
                sums["items"] += 1
                sums["items_shared"] += shared
                sums["ties"] += one.verdicts.count(0)
                sums["pairs"] += len(one.verdicts) - one.verdicts.count(MISSING)
        if not shared:
            return
        columns = list(zip(*(one.verdicts for one in judged), strict=True))
        counts = [(column.count(-1), column.count(0), column.count(1)) for column in columns]
        agree = sum(a * (a - 1) // 2 + b * (b - 1) // 2 for a, _, b in counts)
        compared = sum((a + b) * (a + b - 1) // 2 for a, _, b in counts)
        if compared:
            self._sums.append((agree, compared))
        for one in judged:
            strict = [(v, count) for v, count in zip(one.verdicts, counts, strict=True) if v in (-1, 1)]
            others = sum(a + b - 1 for _, (a, _, b) in strict)
            if others and one.person < len(self.names):
                self._person_sums[one.person].append((sum(count[v + 1] - 1 for v, count in strict), others))
        self._units.update(count for count in counts if sum(count) > 1)
        rated = ([r for r in column if r is not None] for column in zip(*(j.ratings for j in judged), strict=True))
        self._rated += [ratings for ratings in rated if len(ratings) > 1]
        if len(judged) > MAX_LABELERS:
            self._left_out += 1
            return
        for first, second in combinations(judged, 2):
            self._compare(first, second)

    def _compare(self, first: _Judged, second: _Judged) -> None:
        """Count two people's judgements of an item for Cohen's kappa and tau."""
        if second.person < len(self.names):  # people ascend, so the first has a name too
            both = [(a, b) for a, b in zip(first.verdicts, second.verdicts, strict=True) if MISSING not in (a, b)]
            if both:
                key = first.person, second.person
                self._common[key] += 1
                table = self._tables.setdefault(key, np.zeros((3, 3), np.int64))
                for a, b in both:
                    table[a + 1, b + 1] += 1
        ranks = sorted(
            (a, b) for a, b in zip(first.ranks, second.ranks, strict=True) if a is not None and b is not None
        )
        if len(ranks) > 1:
            self._orders[tuple(ranks)] += 1

    def pairwise(self) -> dict[str, Any]:
        """Percent agreement: see `pairwise_agreement`."""
        return ratio(*np.array(self._sums, np.int64).reshape(-1, 2).T)

    def compute(self) -> dict[str, Any]:
        """Every figure except the labelers' times. Keys: see `AgreementCounter.report`."""
        if self._left_out:
            of = f"{self._left_out:,} items of more than {MAX_LABELERS} labelers are left out of Cohen's kappa and tau"
            self.notes["items"] = of
        if not self._sums:
            self.notes["pairwise"] = "no two labelers put the same pair in a strict order"
        figures = {
            "pairwise": self.pairwise(),
            "cohen_kappa": self._cohen(),
            **self._kappa_and_alpha(),
            "krippendorff_alpha_ratings": self._alpha_of_ratings(),
            "kendall_tau": self._tau(),
            "by_labeler": {name: self._of_labeler(person) for person, name in enumerate(self.names)},
        }
        if not self.shared_items:
            self.notes |= {
                name: "no item was judged by two or more labelers" for name in figures if name != "by_labeler"
            }
        return figures

    def _cohen(self) -> dict[str, Any]:
        by_pair: list[dict[str, Any]] = []
        for key in sorted(self._tables, key=lambda key: (-self._common[key], key)):
            table, items = self._tables[key], self._common[key]
            value = compute_cohen(table) if items >= MIN_COMMON_ITEMS else None
            names = [self.names[person] for person in key]
            by_pair.append({"labelers": names, "items": items, "pairs": int(table.sum()), "value": value})
        used = [pair for pair in by_pair if pair["value"] is not None]
        if not by_pair:
            self.notes["cohen_kappa"] = "no two labelers with a name judged the same pair of responses"
        elif by_pair[0]["items"] < MIN_COMMON_ITEMS:
            self.notes["cohen_kappa"] = f"no two labelers have {MIN_COMMON_ITEMS} items in common"
        elif not used:
            self.notes["cohen_kappa"] = _NO_VARIANCE
        items = sum(pair["items"] for pair in used)
        value = fsum(pair["value"] * pair["items"] for pair in used) / items if used else None
        return {"value": value, "labeler_pairs": len(used), "by_pair": by_pair[:MAX_LISTED]}

    def _kappa_and_alpha(self) -> dict[str, Any]:
        units = np.array(sorted(self._units.elements()), np.int64).reshape(-1, 3)
        labelers, pairs = max(Counter(units.sum(1).tolist()).items(), key=lambda entry: entry[::-1], default=(None, 0))
        fleiss = compute_fleiss(units[units.sum(1) == labelers]) if pairs else None
        alpha = compute_alpha(np.concatenate([units, units[:, ::-1]]), np.array([-1, 0, 1])) if pairs else None
        if pairs < len(units):
            left = f"{len(units) - pairs:,} pairs judged by another number of labelers than {labelers} are left out"
            self.notes["fleiss_kappa"] = left
        for name, value in (("fleiss_kappa", fleiss), ("krippendorff_alpha", alpha)):
            if value is None:
                self.notes[name] = _NO_VARIANCE if pairs else "no pair was judged by two labelers"
        return {
            "fleiss_kappa": {"value": fleiss, "labelers": labelers, "pairs": pairs},
            "krippendorff_alpha": {"value": alpha, "pairs": len(units)},
        }

    def _alpha_of_ratings(self) -> dict[str, Any]:
        if not self._rated:
            self.notes["krippendorff_alpha_ratings"] = "no response was rated by two labelers"
            return {"value": None, "responses": 0}
        values = sorted({rating for ratings in self._rated for rating in ratings})
        rows = self._rated[: max(1, 8_000_000 // len(values) ** 2)]  # the library makes an (N, V, V) array
        value = compute_alpha(np.array([[ratings.count(v) for v in values] for ratings in rows]), np.array(values))
        if value is None:
            self.notes["krippendorff_alpha_ratings"] = _NO_VARIANCE
        return {"value": value, "responses": len(rows)}

    def _tau(self) -> dict[str, Any]:
        taus = [(compute_tau(*np.array(order).T), count) for order, count in sorted(self._orders.items())]
        defined = [(tau, count) for tau, count in taus if tau is not None]
        total, compared = sum(count for _, count in defined), sum(self._orders.values())
        if not compared:
            self.notes["kendall_tau"] = "no two labelers ranked the same two responses"
        elif total < compared:
            self.notes["kendall_tau"] = f"not defined for {compared - total:,} of {compared:,}: one ranking is all ties"
        value = fsum(tau * count for tau, count in defined) / total if total else None
        return {"value": value, "comparisons": total}

    def _of_labeler(self, person: int) -> dict[str, Any]:
        sums = self._people[person]
        figure = ratio(*np.array(self._person_sums[person], np.int64).reshape(-1, 2).T)
        return {
            "items": sums["items"],
            "items_shared": sums["items_shared"],
            "agreement": figure["value"],
            "ci95": figure["ci95"],
            "comparisons": figure["pairs"],
            "tie_rate": sums["ties"] / sums["pairs"] if sums["pairs"] else None,
            "seconds": None,
        }


def pairwise_agreement(rankings: Iterable[Ranking]) -> dict[str, Any]:
    """The share of response pairs on which two labelers agree, over items that two or more labelers judged.

        value = sum_items agreements / sum_items comparisons

    A comparison is one pair of responses that two different labelers both put in a strict order: ties and unranked
    responses are skipped. `ci95` is value +- 1.96 standard errors of this ratio with the item as unit (pairs of one item
    are not independent), within [0, 1]. What an item and a labeler are: see `AgreementCounter`.

    Returns {"value": share, "ci95": [low, high], "n": items, "pairs": comparisons}; value and ci95 are None
    if no item was compared, and ci95 if there is only one.

    Source: Ouyang et al. 2022, section 3.4 (72.6 +- 1.5%).
    """
    counter = AgreementCounter()
    for ranking in rankings:
        counter.add(ranking)
    return counter.count().pairwise()


def describe(report: dict[str, Any]) -> list[str]:
    """The figures of a report as lines for the screen."""
    people = f"{report['labelers']:,} labelers" + (f", {report['unnamed']:,} unnamed" if report["unnamed"] else "")
    shared = f"{report['items_shared']:,} of {report['items']:,} items judged by two or more"
    lines = [f"agreement: {shared} ({people})"]
    if not report["items_shared"]:
        return lines
    notes = report["notes"]
    for title, name, is_share, count, unit in _LINES:
        figure = report[name]
        value, interval = figure["value"], figure.get("ci95")
        if value is None and not figure[count] and name == "krippendorff_alpha_ratings":
            continue  # most labels have no ratings
        cell = "-" if value is None else f"{value:.1%}" if is_share else f"{value:.3f}"
        cell += f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else ""
        why = f"; {notes[name]}" if name in notes else ""
        lines.append(f"  {title:<31} {cell:<24} {figure[count]:,} {unit}{why}")
    lines += [f"  {notes[name]}" for name in ("items", "size") if name in notes]
    table = report["by_labeler"]
    if table:
        lines.append(f"  {'labeler':<24} {'items':>7} {'with others':>11} {'agreement':>9} {'ties':>6} {'seconds':>7}")
    for name, row in list(table.items())[:_SHOWN]:
        agreement, ties = ("-" if row[key] is None else f"{row[key]:.1%}" for key in ("agreement", "tie_rate"))
        seconds = "-" if row["seconds"] is None else f"{row['seconds']:.1f}"
        label = name if name.isprintable() and len(name) <= 24 else shown(name, 24)
        lines.append(
            f"  {label:<24} {row['items']:>7,} {row['items_shared']:>11,} {agreement:>9} {ties:>6} {seconds:>7}"
        )
    if len(table) > _SHOWN:
        lines.append(f"  … and {len(table) - _SHOWN:,} more labelers in the report")
    return lines

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
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import combinations
from math import fsum, isfinite
from typing import Any, NamedTuple

import numpy as np

from rlhf.data.records import Ranking, shown

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


def ratio(agreements: Sequence[int], comparisons: Sequence[int]) -> dict[str, Any]:
    """sum(agreements) / sum(comparisons), with one entry of each per item, and its 95% interval.

    `ci95` is value +- 1.96 standard errors of the ratio with the item as unit, within [0, 1]; None if n < 2.
    """
    a, m = np.asarray(agreements, np.float64), np.asarray(comparisons, np.float64)
    n = len(m)
    if n == 0:
        return {"value": None, "ci95": None, "n": 0, "pairs": 0}
    value, interval = float(a.sum() / m.sum()), None
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
    """Cohen's kappa (Cohen 1960) of a (3, 3) table of two labelers' verdicts j better, tie, i better, each pair counted in
    both directions; None without variance.
    """
    return _call("statsmodels.stats.inter_rater", "cohens_kappa", table + table[::-1, ::-1], return_results=False)


def compute_fleiss(counts: np.ndarray) -> float | None:
    """Fleiss' kappa (Fleiss 1971) of (N, 3) counts of labelers by verdict, every row with the same sum; None without variance."""
    return _call("statsmodels.stats.inter_rater", "fleiss_kappa", np.concatenate([counts, counts[:, ::-1]]))


def _alpha(counts: np.ndarray, values: Sequence[float]) -> float | None:
    """Ordinal alpha (Krippendorff 2011) of (N, V) counts of labelers by value; None without variance."""
    if len(values) < 2:
        return None
    scale = {"value_domain": np.array(values), "level_of_measurement": "ordinal"}
    return _call("krippendorff", "alpha", value_counts=counts, **scale)


# --- judgements ------------------------------------------------------------------------------------------------------


class _Judgement(NamedTuple):
    """One person's judgement of an item with K responses, in the order of their texts; None: not judged."""

    person: int  # index of the name; unnamed people have negative numbers
    verdicts: tuple[int | None, ...]  # of each pair i < j: 1 if i is better, -1 if j is, 0 a tie
    ranks: tuple[float | None, ...]  # 0 best
    ratings: tuple[float | None, ...]


def _judgement(ranking: Ranking, texts: list[str], person: int) -> _Judgement:
    """A text that appears twice with two ranks or ratings has none; ties beside `pairs` are under `metadata.ties`."""
    place = {response.id: texts.index(response.text) for response in ranking.responses}
    pairs = list(combinations(range(len(texts)), 2))
    said: dict[Any, set[Any]] = defaultdict(set)
    for name, rating in ranking.ratings.items():
        said["rating", place[name]].add(rating)
    if ranking.pairs is None:
        for response, rank in zip(ranking.responses, ranking.ranks(), strict=True):
            said["rank", place[response.id]].add(rank if rank >= 0 else None)
    for better, worse in ranking.pairs or ():
        i, j = place[better], place[worse]
        said[min(i, j), max(i, j)].add(1 if i < j else -1)
    ties = ranking.metadata.get("ties") if ranking.pairs is not None else None
    for tie in ties if isinstance(ties, list) else ():
        if isinstance(tie, list) and len(tie) == 2 and all(isinstance(name, str) and name in place for name in tie):
            said[tuple(sorted(place[name] for name in tie))].add(0)

    def only(key: Any) -> Any:
        return next(iter(said[key])) if len(said.get(key, ())) == 1 else None

    ranks = tuple(only(("rank", i)) for i in range(len(texts)))
    ratings = tuple(only(("rating", i)) for i in range(len(texts)))
    if ranking.pairs is not None:
        return _Judgement(person, tuple(only(pair) for pair in pairs), ranks, ratings)
    ranked = ((ranks[i], ranks[j]) for i, j in pairs)
    verdicts = tuple(None if a is None or b is None else (a < b) - (a > b) for a, b in ranked)
    return _Judgement(person, verdicts, ranks, ratings)


def _merge(judgements: list[_Judgement]) -> _Judgement:
    """One judgement of a person who judged an item more than once: a pair goes to the response preferred more often (a tie
    if neither is), ranks and ratings are averaged.
    """
    if len(judgements) == 1:
        return judgements[0]

    def means(rows: Iterable[tuple[float | None, ...]]) -> tuple[float | None, ...]:
        given = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
        return tuple(sum(values) / len(values) if values else None for values in given)

    person, *columns = zip(*judgements, strict=True)
    verdicts, ranks, ratings = map(means, columns)
    return _Judgement(person[0], tuple(v if v is None else (v > 0) - (v < 0) for v in verdicts), ranks, ratings)


class AgreementCounter:
    """Counts judgements for the agreement of labelers; it keeps some hundred bytes of each, no text.

    Records without a labeler count as different people. A labeler who judged an item more than once counts once.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._items: dict[bytes, list[_Judgement]] = {}  # by a hash
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
        self._items.setdefault(digest, []).append(_judgement(ranking, texts, person))
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
        counts = self.count()
        notes = counts.notes
        if self._too_large:
            notes["size"] = f"{self._too_large:,} rankings of more than {MAX_RESPONSES} responses are left out"
        figures = {
            "pairwise": ratio(*counts.pairwise),
            "cohen_kappa": counts.cohen(sorted(self._names)),
            **counts.fleiss_and_alpha(),
            "krippendorff_alpha_ratings": counts.alpha_of_ratings(),
            "kendall_tau": counts.tau(),
        }
        if not counts.pairwise[1]:
            notes["pairwise"] = "no two labelers put the same pair in a strict order"
        if not counts.shared_items:
            notes |= dict.fromkeys(figures, "no item was judged by two or more labelers")
        table = {}
        for person, name in enumerate(sorted(self._names)):
            agreed, sums = ratio(*counts.pairwise_of[person]), counts.people[person]
            table[name] = {
                "items": sums["items"],
                "items_shared": sums["items_shared"],
                "agreement": agreed["value"],
                "ci95": agreed["ci95"],
                "comparisons": agreed["pairs"],
                "tie_rate": sums["ties"] / sums["pairs"] if sums["pairs"] else None,
                "seconds": float(np.median(self._seconds[name])) if name in self._seconds else None,
            }
        about = {"rankings": self.rankings, "items": counts.items, "items_shared": counts.shared_items}
        people = {"labelers": len(self._names), "unnamed": self.unnamed}
        return about | people | figures | {"by_labeler": table, "notes": notes}

    def count(self) -> "_Counts":
        """The judgements counted, item by item; people in the order of their names."""
        place = {self._names[name]: i for i, name in enumerate(sorted(self._names))}
        counts = _Counts()
        for digest in sorted(self._items):
            people: dict[int, list[_Judgement]] = {}
            for one in self._items[digest]:
                person = place.get(one.person, one.person)
                people.setdefault(person, []).append(one._replace(person=person))
            # names ascend, then those without one
            counts.add([_merge(people[person]) for person in sorted(people, key=lambda p: (p < 0, abs(p)))])
        return counts


class _Counts:
    """What the statistics are computed from."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.items = self.shared_items = self._left_out = 0
        self.pairwise: tuple[list[int], list[int]] = [], []  # agreements and comparisons of each item
        self.pairwise_of: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        self.people: dict[int, Counter[str]] = defaultdict(Counter)
        self._units: Counter[tuple[int, int, int]] = Counter()  # of pairs: the people who say j better, tie, i better
        self._tables: dict[tuple[int, int], np.ndarray] = defaultdict(
            lambda: np.zeros((3, 3), np.int64)
        )  # of two people
        self._common: Counter[tuple[int, int]] = Counter()  # items of two people
        self._orders: Counter[tuple[tuple[float, float], ...]] = Counter()  # two people's ranks of each response
        self._rated: list[list[float]] = []  # the ratings of a response

    def add(self, judgements: list[_Judgement]) -> None:
        """Count an item's judgements, one per person."""
        shared = len(judgements) > 1
        self.items += 1
        self.shared_items += shared
        for person, verdicts, _, _ in judgements:
            pairs = len(verdicts) - verdicts.count(None)
            self.people[person].update(items=1, items_shared=shared, ties=verdicts.count(0), pairs=pairs)
        if not shared:
            return
        columns = zip(*(one.verdicts for one in judgements), strict=True)
        counts = [(column.count(-1), column.count(0), column.count(1)) for column in columns]
        self._units.update(count for count in counts if sum(count) > 1)
        agree = sum(a * (a - 1) // 2 + b * (b - 1) // 2 for a, _, b in counts)
        _append(self.pairwise, agree, sum((a + b) * (a + b - 1) // 2 for a, _, b in counts))
        for person, verdicts, _, _ in judgements:
            strict = [(v, count) for v, count in zip(verdicts, counts, strict=True) if v]
            agree = sum(count[v + 1] - 1 for v, count in strict)
            _append(self.pairwise_of[person], agree, sum(a + b - 1 for _, (a, _, b) in strict))
        rated = ([r for r in column if r is not None] for column in zip(*(j.ratings for j in judgements), strict=True))
        self._rated += [ratings for ratings in rated if len(ratings) > 1]
        if len(judgements) > MAX_LABELERS:
            self._left_out += 1
            many = (
                f"{self._left_out:,} items of more than {MAX_LABELERS} labelers are left out of Cohen's kappa and tau"
            )
            self.notes["items"] = many
            return
        for first, second in combinations(judgements, 2):
            both = _both(first.verdicts, second.verdicts)
            if both and min(first.person, second.person) >= 0:
                key = first.person, second.person
                self._common[key] += 1
                for a, b in both:
                    self._tables[key][a + 1, b + 1] += 1
            ranks = sorted(_both(first.ranks, second.ranks))
            if len(ranks) > 1:
                self._orders[tuple(ranks)] += 1

    def cohen(self, names: list[str]) -> dict[str, Any]:
        by_pair: list[dict[str, Any]] = []
        for key in sorted(self._tables, key=lambda key: (-self._common[key], key)):
            table, items = self._tables[key], self._common[key]
            value = compute_cohen(table) if items >= MIN_COMMON_ITEMS else None
            labelers = [names[person] for person in key]
            by_pair.append({"labelers": labelers, "items": items, "pairs": int(table.sum()), "value": value})
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

    def fleiss_and_alpha(self) -> dict[str, Any]:
        units = np.array(sorted(self._units.elements()), np.int64).reshape(-1, 3)
        labelers, pairs = max(Counter(units.sum(1).tolist()).items(), key=lambda entry: entry[::-1], default=(None, 0))
        fleiss = compute_fleiss(units[units.sum(1) == labelers]) if pairs else None
        alpha = _alpha(np.concatenate([units, units[:, ::-1]]), (-1, 0, 1)) if pairs else None
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

    def alpha_of_ratings(self) -> dict[str, Any]:
        values = sorted({rating for ratings in self._rated for rating in ratings})
        rows = self._rated[: max(1, 8_000_000 // max(1, len(values)) ** 2)]  # the library makes an (N, V, V) array
        value = _alpha(np.array([[ratings.count(v) for v in values] for ratings in rows]), values)
        if value is None:
            why = _NO_VARIANCE if rows else "no response was rated by two labelers"
            self.notes["krippendorff_alpha_ratings"] = why
        return {"value": value, "responses": len(rows)}

    def tau(self) -> dict[str, Any]:
        """Mean of tau-b (Kendall 1945) over comparisons of two people's rankings of an item."""
        taus = [(_call("scipy.stats", "kendalltau", *np.array(o).T), n) for o, n in sorted(self._orders.items())]
        defined = [(tau, count) for tau, count in taus if tau is not None]
        total, compared = sum(count for _, count in defined), sum(self._orders.values())
        if not compared:
            self.notes["kendall_tau"] = "no two labelers ranked the same two responses"
        elif total < compared:
            self.notes["kendall_tau"] = f"not defined for {compared - total:,} of {compared:,}: one ranking is all ties"
        value = fsum(tau * count for tau, count in defined) / total if total else None
        return {"value": value, "comparisons": total}


def _append(sums: tuple[list[int], list[int]], agreements: int, comparisons: int) -> None:
    if comparisons:
        sums[0].append(agreements)
        sums[1].append(comparisons)


def _both(first: tuple[Any, ...], second: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """What two people said of each thing that both judged."""
    return [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]


def pairwise_agreement(rankings: Iterable[Ranking]) -> dict[str, Any]:
    """The share of response pairs on which two labelers agree, over items that two or more labelers judged.

        value = sum_items agreements / sum_items comparisons

    A comparison is one pair of responses that two different labelers both put in a strict order: ties and unranked
    responses are skipped. `ci95`: as in `ratio`, since pairs of one item are not independent.

    Returns {"value": share, "ci95": [low, high], "n": items, "pairs": comparisons}; value and ci95 are None
    if no item was compared, and ci95 if there is only one.

    Source: Ouyang et al. 2022, section 3.4 (72.6 +- 1.5%).
    """
    counter = AgreementCounter()
    for ranking in rankings:
        counter.add(ranking)
    return ratio(*counter.count().pairwise)


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

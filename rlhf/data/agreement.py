"""How often labelers agree with each other, as a reference for the reward model's accuracy.

statsmodels, krippendorff and scipy compute the statistics, pandas the tables that they need.

An item is a prompt with its set of response texts, whatever their order and ids. The unit of percent agreement, both kappas
and alpha is a pair of responses (i, j) of one item, and the categories are "i better", "tie" and "j better". The order of a
pair has no meaning, so the kappas and alpha count every pair in both directions, and no figure depends on the order of the
responses.
"""

import importlib
import warnings
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import fsum, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.data.records import Ranking
from rlhf.data.splits import hash64
from rlhf.system.schemas import shown

if TYPE_CHECKING:
    import pandas as pd

MAX_RESPONSES = 64  # items with more responses are left out
MIN_COMMON_ITEMS = 10  # a pair of labelers with fewer common items has no kappa
MAX_LABELERS = 50  # labelers per pair of responses or rank that are compared two by two; the others are left out
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


def _alpha(counts: np.ndarray, values: Sequence[float]) -> float | None:
    """Ordinal alpha (Krippendorff 2011) of (N, V) counts of labelers by value; None without variance."""
    scale = {"value_domain": np.array(values), "level_of_measurement": "ordinal"}
    return _call("krippendorff", "alpha", value_counts=counts, **scale) if len(values) > 1 else None


# --- counting --------------------------------------------------------------------------------------------------------

# The columns that say what a value is about: responses i < j of an item for a verdict; i, -1 for a rank; i, -2 for a rating.
_SLOT = ["item", "i", "j"]
_RANK, _RATING = -1, -2


class AgreementCounter:
    """Collects what labelers said of each item, in 24 bytes per verdict, rank or rating; no text is kept.

    Records without a labeler count as different people. A labeler who judged an item more than once counts once: a pair
    goes to the response preferred more often (a tie if neither is), ranks and ratings are averaged.
    """

    def __init__(self) -> None:
        self._items: dict[int, int] = {}  # number of each item, by a hash
        self._names: dict[str, int] = {}
        self._said: dict[str, array[Any]] = {name: array("i") for name in (*_SLOT, "person")} | {"value": array("d")}
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self.rankings = self.unnamed = self._too_large = 0

    def add(self, ranking: Ranking) -> None:
        """Count one record; one that judges nothing (a labelling task) changes nothing."""
        if ranking.ranking is None and ranking.pairs is None and not ranking.ratings:
            return
        if len(ranking.responses) > MAX_RESPONSES:
            self._too_large += 1
            return
        index = {text: i for i, text in enumerate(sorted({response.text for response in ranking.responses}))}
        place = {response.id: index[response.text] for response in ranking.responses}
        key = hash64(repr([[(message.role, message.content) for message in ranking.prompt], list(index)]))
        item, name = self._items.setdefault(key, len(self._items)), ranking.labeler
        self.rankings += 1
        self.unnamed += name is None
        person = -self.unnamed if name is None else self._names.setdefault(name, len(self._names))
        if name is not None and ranking.seconds is not None:
            self._seconds[name].append(ranking.seconds)

        def say(i: int, j: int, value: float) -> None:
            for column, one in zip(self._said.values(), (item, i, j, person, value), strict=True):
                column.append(one)

        def compare(i: int, j: int, verdict: int) -> None:
            """A verdict on two responses: 1 if i is better, -1 if j is, 0 a tie."""
            if i != j:
                say(min(i, j), max(i, j), verdict if i < j else -verdict)

        for one, rating in ranking.ratings.items():
            say(place[one], _RATING, rating)
        if ranking.pairs is None:
            ranked = [(place[name], rank) for rank, tie in enumerate(ranking.ranking or ()) for name in tie]
            for i, rank in ranked:
                say(i, _RANK, rank)
            for (i, a), (j, b) in combinations(ranked, 2):
                compare(i, j, (a < b) - (a > b))
        for better, worse in ranking.pairs or ():
            compare(place[better], place[worse], 1)
        ties = ranking.metadata.get("ties") if ranking.pairs is not None else None
        for tie in ties if isinstance(ties, list) else ():
            if isinstance(tie, list) and len(tie) == 2 and all(isinstance(one, str) and one in place for one in tie):
                compare(place[tie[0]], place[tie[1]], 0)

    def table(self) -> "pd.DataFrame":
        """What each person said, once per slot; people without a name have negative numbers."""
        import pandas as pd

        said = pd.DataFrame({name: np.array(column) for name, column in self._said.items()})
        said = said.groupby([*_SLOT, "person"], as_index=False).value.mean()
        return said.assign(value=said.value.where(said.j < 0, np.sign(said.value)))

    def report(self) -> dict[str, Any]:
        """Every figure of agreement; a value that cannot be computed is None and `notes` says why.

        Returns {"rankings": judgements, "items", "items_shared": by two or more labelers, "labelers": names,
        "unnamed": judgements without one, "pairwise": as `pairwise_agreement`, "cohen_kappa": {value,
        labeler_pairs, by_pair}, "fleiss_kappa": {value, labelers, pairs}, "krippendorff_alpha": {value, pairs},
        "krippendorff_alpha_ratings": {value, responses}, "kendall_tau": {value, comparisons}, "by_labeler":
        {name: {items, items_shared, agreement, ci95, comparisons, tie_rate, seconds}}, "notes": {figure: why}}.
        """
        said, names, notes = self.table(), list(self._names), {}
        verdicts = said[said.j >= 0]
        couples = _couples(verdicts)
        if self._too_large:
            notes["size"] = f"{self._too_large:,} rankings of more than {MAX_RESPONSES} responses are left out"
        figures = {
            "pairwise": _pairwise(couples),
            "cohen_kappa": _cohen(couples, names, notes),
            **_fleiss_and_alpha(verdicts, notes),
            "krippendorff_alpha_ratings": _alpha_of_ratings(said[said.j == _RATING], notes),
            "kendall_tau": _tau(said[said.j == _RANK], notes),
        }
        if not figures["pairwise"]["pairs"]:
            notes["pairwise"] = "no two labelers put the same pair in a strict order"
        judged = said[["item", "person"]].drop_duplicates()
        judged["shared"] = judged.groupby("item").person.transform("size") > 1
        shared = judged[judged.shared].item.nunique()
        if not shared:
            notes |= dict.fromkeys(figures, "no item was judged by two or more labelers")
        table = {}
        for name, person in sorted(self._names.items()):
            agreed = _pairwise(couples[(couples.person_a == person) | (couples.person_b == person)])
            ties = verdicts[verdicts.person == person].value == 0
            mine = judged[judged.person == person]
            table[name] = {
                "items": len(mine),
                "items_shared": int(mine.shared.sum()),
                "agreement": agreed["value"],
                "ci95": agreed["ci95"],
                "comparisons": agreed["pairs"],
                "tie_rate": float(ties.mean()) if len(ties) else None,
                "seconds": float(np.median(self._seconds[name])) if self._seconds[name] else None,
            }
        about = {"rankings": self.rankings, "items": len(self._items), "items_shared": shared}
        people = {"labelers": len(names), "unnamed": self.unnamed}
        return about | people | figures | {"by_labeler": table, "notes": notes}


# --- the figures -----------------------------------------------------------------------------------------------------


def _couples(said: "pd.DataFrame") -> "pd.DataFrame":
    """What two people said of each slot that both judged: value_a of person_a < person_b, and value_b."""
    few = said[said.groupby(_SLOT).cumcount() < MAX_LABELERS]
    both = few.merge(few, on=_SLOT, suffixes=("_a", "_b"))
    return both[both.person_a < both.person_b]


def _pairwise(couples: "pd.DataFrame") -> dict[str, Any]:
    strict = couples[(couples.value_a != 0) & (couples.value_b != 0)]
    agree = (strict.value_a == strict.value_b).groupby(strict.item)
    return ratio(agree.sum().to_numpy(), agree.count().to_numpy())


def _cohen(couples: "pd.DataFrame", names: list[str], notes: dict[str, str]) -> dict[str, Any]:
    by_pair: list[dict[str, Any]] = []
    for key, said in couples[couples.person_a >= 0].groupby(["person_a", "person_b"]):
        table, items = np.zeros((3, 3), np.int64), said.item.nunique()
        np.add.at(table, (said.value_a.astype(int) + 1, said.value_b.astype(int) + 1), 1)
        both = table + table[::-1, ::-1]  # each pair counted in both directions
        kappa = _call("statsmodels.stats.inter_rater", "cohens_kappa", both, return_results=False)
        value = kappa if items >= MIN_COMMON_ITEMS else None
        labelers = sorted(names[person] for person in key)
        by_pair.append({"labelers": labelers, "items": items, "pairs": len(said), "value": value})
    by_pair.sort(key=lambda pair: (-pair["items"], pair["labelers"]))
    used = [pair for pair in by_pair if pair["value"] is not None]
    if not by_pair:
        notes["cohen_kappa"] = "no two labelers with a name judged the same pair of responses"
    elif by_pair[0]["items"] < MIN_COMMON_ITEMS:
        notes["cohen_kappa"] = f"no two labelers have {MIN_COMMON_ITEMS} items in common"
    elif not used:
        notes["cohen_kappa"] = _NO_VARIANCE
    items = sum(pair["items"] for pair in used)
    value = fsum(pair["value"] * pair["items"] for pair in used) / items if used else None
    return {"value": value, "labeler_pairs": len(used), "by_pair": by_pair}


def _fleiss_and_alpha(verdicts: "pd.DataFrame", notes: dict[str, str]) -> dict[str, Any]:
    units = _people_by_value(verdicts, (-1, 0, 1))
    size = units.sum(1)
    numbers, counts = np.unique(size, return_counts=True)
    labelers, pairs = max(zip(numbers.tolist(), counts.tolist(), strict=True), key=lambda n: n[::-1], default=(None, 0))
    fleiss = alpha = None
    if pairs:
        same, both = units[size == labelers], np.concatenate([units, units[:, ::-1]])  # each pair in both directions
        fleiss = _call("statsmodels.stats.inter_rater", "fleiss_kappa", np.concatenate([same, same[:, ::-1]]))
        alpha = _alpha(both, (-1, 0, 1))
    if pairs < len(units):
        left = f"{len(units) - pairs:,} pairs judged by another number of labelers than {labelers} are left out"
        notes["fleiss_kappa"] = left
    for name, value in (("fleiss_kappa", fleiss), ("krippendorff_alpha", alpha)):
        if value is None:
            notes[name] = _NO_VARIANCE if pairs else "no pair was judged by two labelers"
    return {
        "fleiss_kappa": {"value": fleiss, "labelers": labelers, "pairs": pairs},
        "krippendorff_alpha": {"value": alpha, "pairs": len(units)},
    }


def _people_by_value(said: "pd.DataFrame", values: Sequence[float]) -> np.ndarray:
    """How many people gave each of the values to each slot that two or more judged, (N, V)."""
    slots = said.groupby(_SLOT)
    units = np.zeros((slots.ngroups, len(values)), np.int64)
    np.add.at(units, (slots.ngroup(), np.searchsorted(values, said.value)), 1)
    return units[units.sum(1) > 1]


def _alpha_of_ratings(ratings: "pd.DataFrame", notes: dict[str, str]) -> dict[str, Any]:
    ratings = ratings[ratings.groupby(_SLOT).person.transform("size") > 1]
    values = sorted(ratings.value.unique().tolist())
    most = max(1, 8_000_000 // max(1, len(values)) ** 2)  # alpha allocates (N, V, V)
    units = _people_by_value(ratings, values)[:most]
    value = _alpha(units, values)
    if value is None:
        notes["krippendorff_alpha_ratings"] = _NO_VARIANCE if len(units) else "no response was rated by two labelers"
    return {"value": value, "responses": len(units)}


def _tau(ranks: "pd.DataFrame", notes: dict[str, str]) -> dict[str, Any]:
    """Mean of tau-b (Kendall 1945) over comparisons of two people's rankings of an item."""
    both = _couples(ranks).groupby(["item", "person_a", "person_b"])[["value_a", "value_b"]]
    orders = (sorted(map(tuple, said.to_numpy().tolist())) for _, said in both)  # both ranks of each response
    counts = Counter(tuple(order) for order in orders if len(order) > 1)
    taus = [(_call("scipy.stats", "kendalltau", *np.array(order).T), n) for order, n in sorted(counts.items())]
    defined = [(tau, count) for tau, count in taus if tau is not None]
    total, compared = sum(count for _, count in defined), counts.total()
    if not compared:
        notes["kendall_tau"] = "no two labelers ranked the same two responses"
    elif total < compared:
        notes["kendall_tau"] = f"not defined for {compared - total:,} of {compared:,}: one ranking is all ties"
    value = fsum(tau * count for tau, count in defined) / total if total else None
    return {"value": value, "comparisons": total}


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
    said = counter.table()
    return _pairwise(_couples(said[said.j >= 0]))


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
    lines += [f"  {notes['size']}"] if "size" in notes else []
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

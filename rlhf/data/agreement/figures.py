"""The statistics of labelers' agreement, computed from arrays of judgements.

Records and texts are handled in `judgements.py`. The libraries statsmodels, krippendorff and scipy compute the
statistics; this module counts the judgements into the tables that they need.

The unit of percent agreement, both kappas and alpha is a pair of responses (i, j) of one item, and the
categories are "i better", "tie" and "j better". Neither response of a pair is the first one, so every pair is
counted in both directions in the kappas and alpha: no figure depends on how the responses are ordered.
"""

import importlib
import warnings
from collections import Counter
from itertools import combinations
from math import fsum, isfinite
from typing import Any, NamedTuple

import numpy as np

MISSING = 2  # the verdict on a pair that was not judged
MIN_COMMON_ITEMS = 10  # a pair of labelers with fewer common items has no kappa
MAX_LABELERS = 50  # items judged by more people are left out of figures that compare labelers two by two
MAX_LISTED = 1000  # labelers, or pairs of labelers, in a report

_NO_SHARED_ITEMS = "no item was judged by two or more labelers"
_NO_VARIANCE = "no variance: every judgement is the same, so chance explains it all"


class Judgements(NamedTuple):
    """Judgements of complete items with the same number K of responses, P = K (K - 1) / 2 pairs i < j.

    One row is one person's judgement of one item; the R rows of an item are adjacent, people ascending.
    """

    verdicts: np.ndarray  # (R, P) int8: 1 where i is better, -1 where j is, 0 a tie, MISSING
    ranks: np.ndarray  # (R, K) float32, 0 best, NaN unranked
    ratings: np.ndarray  # (R, K) float32 from 1 to 7, NaN unrated
    people: np.ndarray  # (R,) int64; those from `named` on have no name and occur once
    starts: np.ndarray  # (I,) the first row of each item
    chosen: np.ndarray  # (I,) bool: in the sample for the expensive figures


def ratio(agreements: np.ndarray, comparisons: np.ndarray) -> dict[str, Any]:
    """sum(agreements) / sum(comparisons), both (n,) with one entry per item, and its 95% interval.

    `ci95` is value +- 1.96 standard errors of the ratio with the item as unit, within [0, 1]; None if n < 2.
    """
    a, m = agreements.astype(np.float64), comparisons.astype(np.float64)
    n = len(m)
    if n == 0:
        return {"value": None, "ci95": None, "n": 0, "pairs": 0}
    value = a.sum() / m.sum()
    interval = None
    if n > 1:
        squares = fsum((a - value * m) ** 2)  # the same bits for any order of the items
        error = float(np.sqrt(n / (n - 1) * squares) / m.sum())
        interval = [max(0.0, float(value) - 1.96 * error), min(1.0, float(value) + 1.96 * error)]
    return {"value": float(value), "ci95": interval, "n": n, "pairs": int(m.sum())}


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


class Figures:
    """Counts judgements, batch by batch; `compute` makes the figures. People 0 … len(names) - 1 have a name."""

    def __init__(self, names: list[str]):
        self.names = names
        self.notes: dict[str, str] = {}
        self.items = self.shared_items = 0
        m = len(names)
        self._judged_items, self._shared = np.zeros(m, np.int64), np.zeros(m, np.int64)
        self._tied, self._judged_pairs = np.zeros(m, np.int64), np.zeros(m, np.int64)
        self._item_sums: list[np.ndarray] = []  # (2, n) agreements and comparisons of each item
        self._row_sums: list[np.ndarray] = []  # (3, n) person, agreements and comparisons with others
        self._units: list[np.ndarray] = []  # (n, 3) number of people who say j better, tie, i better
        self._tables: dict[int, np.ndarray] = {}  # of two people: the (9,) table, then their common items
        self._orders: Counter[bytes] = Counter()  # two rows of ranks
        self._rated: list[np.ndarray] = []  # (2, n) response and rating
        self._rated_responses = self._left_out = 0

    def add(self, batch: Judgements) -> None:
        """Count a batch of whole items."""
        verdicts, named = batch.verdicts, batch.people < len(self.names)
        sizes = np.diff(batch.starts, append=len(batch.people))  # (I,)
        item = np.repeat(np.arange(len(sizes)), sizes)  # (R,)
        shared = sizes > 1
        self.items += len(sizes)
        self.shared_items += int(shared.sum())
        for total, rows in (
            (self._judged_items, np.ones(len(item))),
            (self._shared, shared[item]),
            (self._tied, (verdicts == 0).sum(1)),
            (self._judged_pairs, (verdicts != MISSING).sum(1)),
        ):
            total += np.bincount(batch.people[named], rows[named], len(total)).astype(np.int64)
        if not shared.any():
            return
        counts = [np.add.reduceat(verdicts == v, batch.starts, 0, np.int64) for v in (-1, 0, 1)]  # each (I, P)
        self._add_agreement(batch, counts[0], counts[2], item)
        units = np.stack(counts, -1)[batch.chosen].reshape(-1, 3)  # (I P, 3)
        self._units.append(units[units.sum(1) > 1].astype(np.int32))
        self._add_ratings(batch, item)
        for size in np.unique(sizes[shared]):
            items = np.flatnonzero(sizes == size)
            if size > MAX_LABELERS:
                self._left_out += len(items)
                continue
            for a, b in combinations(range(size), 2):
                first, second = batch.starts[items] + a, batch.starts[items] + b
                self._add_tables(batch, first, second)
                self._add_orders(batch, first[batch.chosen[items]], second[batch.chosen[items]])

    def _add_agreement(self, batch: Judgements, worse: np.ndarray, better: np.ndarray, item: np.ndarray) -> None:
        """Two people agree on a pair where both put it in the same strict order."""
        strict = better + worse  # (I, P) people who put the pair in a strict order
        agree = (better * (better - 1) + worse * (worse - 1)).sum(1) // 2
        compared = (strict * (strict - 1)).sum(1) // 2
        self._item_sums.append(np.stack([agree, compared])[:, compared > 0])
        same = np.where(batch.verdicts == 1, better[item], worse[item])  # people who say the same, oneself included
        is_strict = np.abs(batch.verdicts) == 1
        agree, compared = ((others - 1).sum(1, where=is_strict) for others in (same, strict[item]))
        rows = (batch.people < len(self.names)) & (compared > 0)
        self._row_sums.append(np.stack([batch.people, agree, compared])[:, rows])

    def _add_tables(self, batch: Judgements, first: np.ndarray, second: np.ndarray) -> None:
        """Cohen's tables of two named people: the verdicts of one by those of the other."""
        rows = batch.people[second] < len(self.names)  # people ascend, so the first has a name too
        a, b = batch.verdicts[first[rows]], batch.verdicts[second[rows]]  # (n, P)
        both = (a != MISSING) & (b != MISSING)
        people = batch.people[first[rows]] * len(self.names) + batch.people[second[rows]]
        keys, which = np.unique(people, return_inverse=True)
        cells = (which[:, None] * 9 + (a + 1) * 3 + (b + 1))[both]
        tables = np.bincount(cells, minlength=9 * len(keys)).reshape(-1, 9)
        common = np.bincount(which[both.any(1)], minlength=len(keys))
        for key, row in zip(keys.tolist(), np.column_stack([tables, common]), strict=True):
            if row[9]:
                self._tables[key] = self._tables[key] + row if key in self._tables else row

    def _add_orders(self, batch: Judgements, first: np.ndarray, second: np.ndarray) -> None:
        """Two people's ranks of the responses that both ranked, counted so that tau is computed once for each."""
        ranks = np.stack([batch.ranks[first], batch.ranks[second]], 1)  # (n, 2, K)
        both = ~np.isnan(ranks).any(1)
        ranks = np.where(both[:, None], ranks, -1).astype(np.float32)[both.sum(1) > 1]
        # Sorted by the first one's ranks: tau does not depend on the order of the responses, and few orders are left.
        by_first = np.argsort(ranks[:, 0] * 1000.0 + ranks[:, 1], axis=1)
        ranks = np.take_along_axis(ranks, by_first[:, None], axis=2)
        for order, count in zip(*np.unique(ranks, axis=0, return_counts=True), strict=True):
            self._orders[order.tobytes()] += int(count)

    def _add_ratings(self, batch: Judgements, item: np.ndarray) -> None:
        rated = ~np.isnan(batch.ratings)
        twice = (np.add.reduceat(rated, batch.starts, 0, np.int64) > 1) & batch.chosen[:, None]  # (I, K)
        number = np.cumsum(twice).reshape(twice.shape) - 1 + self._rated_responses
        where = rated & twice[item]
        self._rated.append(np.stack([number[item][where], batch.ratings[where]]))
        self._rated_responses += int(twice.sum())

    def pairwise(self) -> dict[str, Any]:
        """Percent agreement: see `pairwise_agreement`."""
        return ratio(*np.concatenate([np.zeros((2, 0)), *self._item_sums], 1))

    def compute(self) -> dict[str, Any]:
        """Every figure except the labelers' times. Keys: see `AgreementCounter.report`."""
        pairwise = self.pairwise()
        if pairwise["value"] is None:
            self.notes["pairwise"] = "no two labelers put the same pair in a strict order"
        if self._left_out:
            self.notes["items"] = (
                f"{self._left_out:,} items of more than {MAX_LABELERS} labelers are left out of Cohen's kappa and tau"
            )
        figures = {
            "pairwise": pairwise,
            "cohen_kappa": self._cohen(),
            **self._kappa_and_alpha(),
            "krippendorff_alpha_ratings": self._alpha_of_ratings(),
            "kendall_tau": self._tau(),
            "by_labeler": self._by_labeler(),
        }
        if not self.shared_items:
            self.notes |= {name: _NO_SHARED_ITEMS for name in figures if name != "by_labeler"}
        return figures

    def _cohen(self) -> dict[str, Any]:
        by_pair: list[dict[str, Any]] = []
        for key, row in sorted(self._tables.items(), key=lambda entry: (-entry[1][9], entry[0])):
            names = [self.names[person] for person in divmod(key, len(self.names))]
            value = compute_cohen(row[:9].reshape(3, 3)) if row[9] >= MIN_COMMON_ITEMS else None
            by_pair.append({"labelers": names, "items": int(row[9]), "pairs": int(row[:9].sum()), "value": value})
        used = [pair for pair in by_pair if pair["value"] is not None]
        items = sum(pair["items"] for pair in used)
        if not by_pair:
            self.notes["cohen_kappa"] = "no two labelers with a name judged the same pair of responses"
        elif not any(pair["items"] >= MIN_COMMON_ITEMS for pair in by_pair):
            self.notes["cohen_kappa"] = f"no two labelers have {MIN_COMMON_ITEMS} items in common"
        elif not used:
            self.notes["cohen_kappa"] = _NO_VARIANCE
        elif len(by_pair) > MAX_LISTED:
            self.notes["cohen_kappa"] = (
                f"of {len(by_pair):,} pairs of labelers, the {MAX_LISTED:,} with most are listed"
            )
        value = fsum(pair["value"] * pair["items"] for pair in used) / items if used else None
        return {"value": value, "labeler_pairs": len(used), "by_pair": by_pair[:MAX_LISTED]}

    def _kappa_and_alpha(self) -> dict[str, Any]:
        units = np.concatenate([np.zeros((0, 3), np.int32), *self._units])
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
        response, rating = np.concatenate([np.zeros((2, 0)), *self._rated], 1)
        values, column = np.unique(rating, return_inverse=True)
        if not len(values):
            self.notes["krippendorff_alpha_ratings"] = "no response was rated by two labelers"
            return {"value": None, "responses": 0}
        cells = response.astype(np.int64) * len(values) + column
        counts = np.bincount(cells, minlength=self._rated_responses * len(values)).reshape(-1, len(values))
        counts = counts[: max(1, 8_000_000 // len(values) ** 2)]  # the library makes an (N, V, V) array
        value = compute_alpha(counts, values)
        if value is None:
            self.notes["krippendorff_alpha_ratings"] = _NO_VARIANCE
        elif len(counts) < self._rated_responses:
            of = f"computed from {len(counts):,} of {self._rated_responses:,} responses"
            self.notes["krippendorff_alpha_ratings"] = of
        return {"value": value, "responses": len(counts)}

    def _tau(self) -> dict[str, Any]:
        taus: list[tuple[float, int]] = []
        for order, count in self._orders.items():
            ranks = np.frombuffer(order, np.float32).reshape(2, -1)  # (2, K)
            tau = compute_tau(*ranks[:, ranks[0] >= 0])
            if tau is not None:
                taus.append((tau, count))
        total, compared = sum(count for _, count in taus), sum(self._orders.values())
        if not compared:
            self.notes["kendall_tau"] = "no two labelers ranked the same two responses"
        elif total < compared:
            self.notes["kendall_tau"] = f"not defined for {compared - total:,} of {compared:,}: one ranking is all ties"
        value = fsum(tau * count for tau, count in taus) / total if total else None
        return {"value": value, "comparisons": total}

    def _by_labeler(self) -> dict[str, dict[str, Any]]:
        people, agree, compared = np.concatenate([np.zeros((3, 0), np.int64), *self._row_sums], 1)
        order = np.argsort(people, kind="stable")
        bounds = np.searchsorted(people[order], np.arange(len(self.names) + 1))
        listed = sorted(np.argsort(-self._judged_items, kind="stable")[:MAX_LISTED].tolist())
        if len(self.names) > MAX_LISTED:
            self.notes["by_labeler"] = f"of {len(self.names):,} labelers, the {MAX_LISTED:,} with most items are listed"
        table = {}
        for person in listed:
            rows = order[bounds[person] : bounds[person + 1]]
            figure = ratio(agree[rows], compared[rows])
            pairs = int(self._judged_pairs[person])
            table[self.names[person]] = {
                "items": int(self._judged_items[person]),
                "items_shared": int(self._shared[person]),
                "agreement": figure["value"],
                "ci95": figure["ci95"],
                "comparisons": figure["pairs"],
                "tie_rate": int(self._tied[person]) / pairs if pairs else None,
                "seconds": None,
            }
        return table

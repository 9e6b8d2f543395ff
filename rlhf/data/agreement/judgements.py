"""How often labelers agree with each other, as a reference for the reward model's accuracy.

Judgements are stored as bytes by `packing.py`; the statistics are in `figures.py`.
"""

from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from rlhf.data.agreement import packing
from rlhf.data.agreement.figures import MAX_LABELERS, Figures, Judgements
from rlhf.data.records import Ranking, shown

MAX_COMPARISONS = 300_000  # of two labelers on a pair; above this, alpha, Fleiss' kappa and tau use a sample
_SHOWN = 20  # labelers on the screen
_LINES = (  # title, figure, whether a share, its count, the unit of the count
    ("pairwise agreement", "pairwise", True, "pairs", "comparisons"),
    ("Cohen's kappa", "cohen_kappa", False, "labeler_pairs", "pairs of labelers"),
    ("Fleiss' kappa", "fleiss_kappa", False, "pairs", "pairs of responses"),
    ("Krippendorff's alpha", "krippendorff_alpha", False, "pairs", "pairs of responses"),
    ("Krippendorff's alpha of ratings", "krippendorff_alpha_ratings", False, "responses", "responses"),
    ("Kendall's tau", "kendall_tau", False, "comparisons", "comparisons of two rankings"),
)


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


class Judgement(NamedTuple):
    """The part of a record that agreement needs; `packed` is None if it has too many responses."""

    packed: tuple[bytes, int, int, bytes] | None
    labeler: str | None
    seconds: float | None


def judgement_of(ranking: Ranking, item: packing.Item) -> Judgement | None:
    """A record's judgement of its item in a few bytes; None if it judges nothing (a labelling task)."""
    if ranking.ranking is None and ranking.pairs is None and not ranking.ratings:
        return None
    fits = len(ranking.responses) <= packing.MAX_RESPONSES
    return Judgement(packing.pack(ranking, item) if fits else None, ranking.labeler, ranking.seconds)


class AgreementCounter:
    """Counts judgements for the agreement of labelers; a ranking of K responses costs 30 + K bytes.

    An item is a prompt with its set of response texts, whatever their order and ids; it is kept as a 128-bit
    hash. Records without a labeler count as different people. A labeler who judged an item more than once counts
    once: a pair goes to the response preferred more often (a tie if neither is), ranks and ratings are averaged.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._digests = bytearray()  # 16 bytes per judgement
        self._people = array("i")  # index of the labeler's name; -1: none
        self._seconds = array("d")  # NaN: not given
        self._sizes = bytearray()  # K, the number of different response texts
        self._forms = bytearray()
        self._judgements = bytearray()  # K ranks or K (K - 1) / 2 verdicts, then K ratings, as given
        self._too_large = 0

    def add(self, ranking: Ranking) -> None:
        """Count one record; one that judges nothing (a labelling task) changes nothing."""
        self.add_judgement(judgement_of(ranking, packing.item_of(ranking)))

    def add_judgement(self, judgement: "Judgement | None") -> None:
        """Count a result of `judgement_of`, perhaps from another process."""
        if judgement is None:
            return
        if judgement.packed is None:
            self._too_large += 1
            return
        digest, size, form, data = judgement.packed
        self._forms.append(form)
        self._sizes.append(size)
        self._judgements += data
        self._digests += digest
        name = judgement.labeler
        self._people.append(-1 if name is None else self._names.setdefault(name, len(self._names)))
        self._seconds.append(float("nan") if judgement.seconds is None else judgement.seconds)

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
        self._add_seconds(values["by_labeler"])
        return {
            "rankings": len(self._people),
            "items": figures.items,
            "items_shared": figures.shared_items,
            "labelers": len(self._names),
            "unnamed": self._people.count(-1),
            **values,
            "notes": figures.notes,
        }

    def count(self) -> Figures:
        """The judgements counted, item by item."""
        names = sorted(self._names)
        rank_of = {name: i for i, name in enumerate(names)}
        people = np.array(self._people, dtype=np.int64)
        unnamed = people < 0
        if names:
            people = np.array([rank_of[name] for name in self._names])[people]
        people[unnamed] = len(names) + np.arange(unnamed.sum())
        figures = Figures(names)
        sampled = self._add_batches(figures, people) if len(people) else 0
        if sampled < figures.shared_items:
            of = f"{sampled:,} of {figures.shared_items:,} items, a sample"
            figures.notes["sample"] = f"Fleiss' kappa, alpha and tau are computed from {of}"
        if self._too_large:
            figures.notes["size"] = (
                f"{self._too_large:,} rankings of more than {packing.MAX_RESPONSES} responses are left out"
            )
        return figures

    def _add_batches(self, figures: Figures, people: np.ndarray) -> int:
        """Give `figures` all judgements, item by item; returns how many items are in the sample."""
        digests = np.frombuffer(bytes(self._digests), ">u8").astype(np.uint64).reshape(-1, 2)
        sizes, forms = np.array(self._sizes, np.int64), np.array(self._forms, np.uint8)
        orders = np.select([forms & packing.RANKS > 0, forms & packing.PAIRS > 0], [sizes, sizes * (sizes - 1) // 2])
        lengths = orders + np.where(forms & packing.RATINGS, sizes, 0)  # of each judgement, in bytes
        offsets = np.cumsum(lengths) - lengths
        data = np.frombuffer(bytes(self._judgements), np.uint8)
        # Sorted by K, then by item, then by person.
        order = np.lexsort((people, digests[:, 1], digests[:, 0], sizes))
        digests, people = digests[order], people[order]
        new_item = np.ones(len(order), bool)
        new_item[1:] = (digests[1:] != digests[:-1]).any(1)
        new_row = new_item.copy()
        new_row[1:] |= people[1:] != people[:-1]
        starts = np.flatnonzero(new_item)
        labelers = np.minimum(np.add.reduceat(new_row, starts, dtype=np.int64), MAX_LABELERS)
        sizes = sizes[order]
        k = sizes[starts]
        chosen = _sample(digests[starts, 0], np.maximum(k, k * (k - 1) // 2) * (labelers * (labelers - 1) // 2))
        for first, last in packing.cut(starts, sizes):
            rows = slice(starts[first], starts[last] if last < len(starts) else len(order))
            judged = order[rows]
            batch = packing.read(data, offsets[judged], forms[judged], orders[judged], int(k[first]))
            where = np.flatnonzero(new_row[rows])
            firsts = np.cumsum(new_row[rows])[starts[first:last] - rows.start] - 1
            verdicts, ranks, ratings = packing.merge(batch, where)
            figures.add(Judgements(verdicts, ranks, ratings, people[rows][where], firsts, chosen[first:last]))
        return int(chosen.sum())

    def _add_seconds(self, table: dict[str, dict[str, Any]]) -> None:
        """The median time of each listed labeler."""
        people, seconds = np.array(self._people), np.array(self._seconds)
        timed = np.flatnonzero(~np.isnan(seconds))
        timed = timed[np.argsort(people[timed], kind="stable")]
        for name, row in table.items():
            low, high = np.searchsorted(people[timed], [self._names[name], self._names[name] + 1])
            if low < high:
                row["seconds"] = float(np.median(seconds[timed[low:high]]))


def _sample(hashes: np.ndarray, comparisons: np.ndarray) -> np.ndarray:
    """Which items, (I,) bool, in the order of their hashes until they make MAX_COMPARISONS; the first one always."""
    shared = np.flatnonzero(comparisons)
    by_hash = shared[np.argsort(hashes[shared])]
    kept = np.cumsum(comparisons[by_hash]) <= MAX_COMPARISONS
    kept[:1] = True
    chosen = np.zeros(len(hashes), bool)
    chosen[by_hash[kept]] = True
    return chosen


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
    lines += [f"  {notes[name]}" for name in ("items", "sample", "size", "by_labeler") if name in notes]
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

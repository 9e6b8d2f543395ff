"""How often labelers agree with each other, as a reference for the reward model's accuracy: pairwise agreement, and
Krippendorff's alpha, which subtracts what chance gives.

An item is a prompt with its set of response texts, whatever their order and ids. The unit of percent agreement and
alpha is a pair of responses (i, j) of one item, and the categories are "i better", "tie" and "j better". The order of a
pair has no meaning, so alpha counts every pair in both directions, and no figure depends on the order of the responses.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.data.records import Ranking
from rlhf.data.splits import hash64
from rlhf.system.terminal import one_line

DECIDES = "manager"  # the labeler of the decisions on the manager's page

if TYPE_CHECKING:
    import pandas as pd

MAX_LABELERS = 50  # labelers per pair of responses that are compared two by two; the others are left out
LEAST_ITEMS = 10  # of fewer no interval is given
_SHOWN = 20  # labelers on the screen
_LINES = (  # title, figure, its form, its count, the unit of the count
    ("pairwise agreement", "pairwise", ".1%", "pairs", "comparisons"),
    ("Krippendorff's alpha", "krippendorff_alpha", ".3f", "pairs", "pairs of responses"),
    ("Krippendorff's alpha of ratings", "krippendorff_alpha_ratings", ".3f", "responses", "responses"),
)


def figure(value: float, half: float | None, n: int) -> dict[str, Any]:
    """{"value", "ci95": [low, high], "n"}, rounded. half: half the width of the interval; None if it is unknown."""
    ends = None if half is None else [round(value - half, 4), round(value + half, 4)]
    return {"value": round(value, 4), "ci95": ends, "n": n}


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], share: bool = False) -> dict[str, Any]:
    """`figure` of a ratio whose parts come from items, such as prompts: sum of numerators over sum of denominators.
    share: of parts of a whole.

    The interval is the delta method's with an item as the unit (Cochran 1977, section 6.3); a share's that would reach
    0 or 1 is Wilson's, for as many independent cases as give that variance (if it is 0, the items). Fewer than
    LEAST_ITEMS give none.
    """
    n, total = len(numerators), sum(denominators)
    ratio = sum(numerators) / total
    residuals = math.fsum((a - ratio * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    half = None if n < LEAST_ITEMS else 1.96 * math.sqrt(n / (n - 1) * residuals) / total
    if half is None or not share or 0 < ratio - half <= ratio + half < 1:
        return figure(ratio, half, round(total))
    spread = ratio * (1 - ratio)
    z = half**2 / spread if half and spread > 0 else 1.96**2 / n  # 1.96^2 over the number of cases
    centre, half = (ratio + z / 2) / (1 + z), math.sqrt(z * ratio * (1 - ratio) + z**2 / 4) / (1 + z)
    return figure(ratio, None, round(total)) | {"ci95": [round(centre - half, 4), round(centre + half, 4)]}


# The columns that say what a value is about: responses i < j of an item for a verdict; i, -1 for a rating.
_SLOT = ["item", "i", "j"]
_RATING = -1


class AgreementCounter:
    """Collects what labelers said of each item, in 40 bytes per verdict or rating; no text is kept. Records without a
    labeler count as different people. A labeler who judged an item more than once counts once: a pair goes to the
    response preferred more often (a tie if neither is), ratings are averaged.
    """

    def __init__(self) -> None:
        self._items: dict[int, int] = {}  # number of each item, by a hash
        self._names: dict[str, int] = {}
        self._said = array("d")  # item, i, j, person and value, one after another
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self.rankings = self.unnamed = 0

    def add(self, ranking: Ranking) -> None:
        """Count one record; one that judges nothing (a labelling task) changes nothing."""
        judges = ranking.ranking is not None or ranking.pairs is not None or ranking.ratings
        if not judges or ranking.labeler == DECIDES:  # the manager has seen what the others say
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
        for one, rating in ranking.ratings.items():
            self._said.extend((item, place[one], _RATING, person, rating))
        for one, other, verdict in ranking.verdicts():
            i, j = place[one], place[other]
            if i != j:
                self._said.extend((item, min(i, j), max(i, j), person, verdict if i < j else -verdict))

    def table(self) -> "pd.DataFrame":
        """What each person said, once per slot; people without a name have negative numbers."""
        import pandas as pd

        said = pd.DataFrame(np.reshape(self._said, (-1, 5)), columns=[*_SLOT, "person", "value"])
        said = said.groupby([*_SLOT, "person"], as_index=False).value.mean()
        return said.assign(value=said.value.where(said.j < 0, np.sign(said.value)))

    def report(self) -> dict[str, Any]:
        """Every figure of agreement; a value that cannot be computed is None. Shared: judged by two or more labelers."""
        said = self.table()
        verdicts = said[said.j >= 0]
        couples = _couples(verdicts)
        judged = said[["item", "person"]].drop_duplicates()
        judged["shared"] = judged.groupby("item").person.transform("size") > 1
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
        return {
            "rankings": self.rankings,
            "items": len(self._items),
            "items_shared": judged[judged.shared].item.nunique(),
            "labelers": len(self._names),
            "unnamed": self.unnamed,
            "pairwise": _pairwise(couples),
            "krippendorff_alpha": _alpha(verdicts, "pairs", both_ways=True),
            "krippendorff_alpha_ratings": _alpha(said[said.j == _RATING], "responses"),
            "by_labeler": table,
        }


def _couples(said: "pd.DataFrame") -> "pd.DataFrame":
    """What two people said of each slot that both judged: value_a of person_a < person_b, and value_b."""
    few = said[said.groupby(_SLOT).cumcount() < MAX_LABELERS]
    both = few.merge(few, on=_SLOT, suffixes=("_a", "_b"))
    return both[both.person_a < both.person_b]


def _pairwise(couples: "pd.DataFrame") -> dict[str, Any]:
    strict = couples[(couples.value_a != 0) & (couples.value_b != 0)]
    agree = (strict.value_a == strict.value_b).groupby(strict.item)
    if not len(agree):
        return {"value": None, "ci95": None, "n": 0, "pairs": 0}
    found = ratio_interval(agree.sum().tolist(), agree.count().tolist(), share=True)
    return found | {"n": len(agree), "pairs": found["n"]}


def _alpha(said: "pd.DataFrame", unit: str, both_ways: bool = False) -> dict[str, Any]:
    """Ordinal alpha (Krippendorff 2011), None without variance, and by `unit` the number of slots that two or more
    people judged. both_ways: each value -v counts beside v.
    """
    import krippendorff
    import pandas as pd

    said = said[said.groupby(_SLOT).person.transform("size") > 1]
    values = sorted({*said.value, *(-said.value if both_ways else ())})
    most = max(1, 8_000_000 // max(1, len(values)) ** 2)  # alpha allocates (N, V, V)
    people = pd.crosstab(said.groupby(_SLOT).ngroup(), said.value)  # by slot and value
    counts = people.reindex(columns=values, fill_value=0).to_numpy()[:most]
    if len(values) < 2:
        return {"value": None, unit: len(counts)}

    units = np.concatenate([counts, counts[:, ::-1]]) if both_ways else counts
    scale: Any = {"value_domain": np.array(values), "level_of_measurement": "ordinal"}
    return {"value": float(krippendorff.alpha(value_counts=units, **scale)), unit: len(counts)}


def pairwise_agreement(rankings: Iterable[Ranking]) -> dict[str, Any]:
    """The share of response pairs on which two labelers agree, over items that two or more labelers judged.

        value = sum_items agreements / sum_items comparisons

    A comparison is one pair of responses that two different labelers both put in a strict order: ties and unranked
    responses are skipped. Returns {"value": share, "ci95": [low, high] by `ratio_interval`, "n": items, "pairs":
    comparisons}; value and ci95 are None if no item was compared.

    Source: Ouyang et al. 2022, section 3.4 (72.6 +- 1.5%).
    """
    counter = AgreementCounter()
    for ranking in rankings:
        counter.add(ranking)
    said = counter.table()
    return _pairwise(_couples(said[said.j >= 0]))


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def describe(report: dict[str, Any]) -> list[str]:
    """The figures of a report as lines for the screen."""
    people = f"{report['labelers']:,} labelers" + (f", {report['unnamed']:,} unnamed" if report["unnamed"] else "")
    shared = f"{report['items_shared']:,} of {report['items']:,} items judged by two or more"
    lines = [f"agreement: {shared} ({people})"]
    if not report["items_shared"]:
        return lines
    for title, name, form, count, unit in _LINES:
        figure = report[name]
        if figure[count] or name != "krippendorff_alpha_ratings":  # most labels have no ratings
            interval = figure.get("ci95")
            cell = _cell(figure["value"], form) + (f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else "")
            lines.append(f"  {title:<31} {cell:<24} {figure[count]:,} {unit}")
    table = report["by_labeler"]
    if table:
        lines.append(f"  {'labeler':<24} {'items':>7} {'with others':>11} {'agreement':>9} {'ties':>6} {'seconds':>7}")
    for name, row in list(table.items())[:_SHOWN]:
        counts = f"{row['items']:>7,} {row['items_shared']:>11,} {_cell(row['agreement'], '.1%'):>9}"
        more = f"{_cell(row['tie_rate'], '.1%'):>6} {_cell(row['seconds'], '.1f'):>7}"
        lines.append(f"  {one_line(name, 24):<24} {counts} {more}")
    if len(table) > _SHOWN:
        lines.append(f"  … and {len(table) - _SHOWN:,} more labelers in the report")
    return lines

"""How often labelers agree with each other: the yardstick beside the reward model's accuracy."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf.data.records import Ranking


def _order(ranking: Ranking, position: dict[str, int]) -> np.ndarray:
    """(K, K) int64 with 1 where i beats j and -1 where j beats i, responses placed by their text."""
    order = np.zeros((len(position), len(position)), dtype=np.int64)
    for better, worse in ranking.pair_list():
        i, j = position[ranking.responses[better].text], position[ranking.responses[worse].text]
        order[i, j], order[j, i] = 1, -1
    return order


def pairwise_agreement(rankings: Sequence[Ranking]) -> dict[str, Any]:
    """The share of response pairs on which two labelers agree, over items that two or more labelers judged.

        value = sum_items agreements / sum_items comparisons

    An item is a prompt with its set of response texts, whatever their order and ids. A comparison is one pair
    of responses that two different labelers both put in a strict order: ties and unranked responses are
    skipped. Records without a labeler count as different people. `ci95` is value +- 1.96 standard errors of
    this ratio with the item as unit (pairs of one item are not independent), within [0, 1].

    Returns {"value": share, "ci95": [low, high], "n": items, "pairs": comparisons}; value and ci95 are None
    where no item was compared, and ci95 where there is only one.

    Source: Ouyang et al. 2022, section 3.4 (72.6 +- 1.5%).
    """
    items: dict[Any, list[Ranking]] = defaultdict(list)
    for ranking in rankings:
        prompt = tuple((message.role, message.content) for message in ranking.prompt)
        items[prompt, frozenset(response.text for response in ranking.responses)].append(ranking)

    agreements, comparisons = [], []
    for (_, texts), judged in items.items():
        if len(judged) < 2:
            continue
        position = {text: i for i, text in enumerate(sorted(texts))}
        upper = np.triu_indices(len(position), k=1)
        orders = np.stack([_order(ranking, position)[upper] for ranking in judged])  # (L, pairs)
        names = [ranking.labeler if ranking.labeler is not None else i for i, ranking in enumerate(judged)]
        different = np.array([[a != b for b in names[:i]] + [False] * (len(names) - i) for i, a in enumerate(names)])
        both = np.abs(orders) @ np.abs(orders).T  # (L, L) pairs that both put in order
        agree = (both + orders @ orders.T) // 2
        if both[different].sum():
            agreements.append(int(agree[different].sum()))
            comparisons.append(int(both[different].sum()))

    a, m = np.array(agreements, dtype=np.float64), np.array(comparisons, dtype=np.float64)
    n = len(m)
    if n == 0:
        return {"value": None, "ci95": None, "n": 0, "pairs": 0}
    value = a.sum() / m.sum()
    interval = None
    if n > 1:
        error = float(np.sqrt(n / (n - 1) * ((a - value * m) ** 2).sum()) / m.sum())
        interval = [max(0.0, float(value) - 1.96 * error), min(1.0, float(value) + 1.96 * error)]
    return {"value": float(value), "ci95": interval, "n": n, "pairs": int(m.sum())}

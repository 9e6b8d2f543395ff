"""What a win rate does not show: whether responses are still text like the base's, whether they differ, and how long they are.

Every figure has a 95% interval with a prompt as the unit.
"""

import math
from collections import Counter
from collections.abc import Sequence

from rlhf.evaluation.statistics import Figures, figure, interval, ratio_interval


def text_figures(
    texts: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]], nats: Sequence[Sequence[float]]
) -> dict[str, Figures]:
    """Figures of one policy's responses, a list per prompt.

    lengths: response tokens; nats: log-probs of whole responses under the SFT model.
    perplexity: under the SFT model, per token. distinct_n: different n-grams of words over all n-grams, and repeated: share of
    responses that occur for another prompt too; both use the first response to each prompt, so that they do not depend on
    the number of samples. repetition: share of a response's 3-grams that it contains earlier. tokens, words: per response.
    """
    words = [[text.lower().split() for text in row] for row in texts]
    first = [row[0] for row in words]
    said = Counter(map(tuple, first))
    spread = ratio_interval([-sum(row) for row in nats], [float(sum(row)) for row in lengths])
    return {
        "perplexity": exponential(spread),
        **{f"distinct_{n}": distinct([ngrams(response, n) for response in first]) for n in (1, 2, 3)},
        "repeated": interval([float(said[tuple(response)] > 1) for response in first]),
        "repetition": interval([mean([repetition(response) for response in row]) for row in words]),
        "tokens": interval([mean(row) for row in lengths]),
        "words": interval([mean([len(response) for response in row]) for row in words]),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def exponential(of: Figures) -> Figures:
    ends = [round(math.exp(end), 4) for end in of["ci95"]]
    return of | {"value": round(math.exp(of["value"]), 4), "ci95": ends}


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def repetition(words: Sequence[str]) -> float:
    trigrams = ngrams(words, 3)
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def distinct(rows: Sequence[Sequence[tuple[str, ...]]]) -> Figures:
    """Different n-grams over all n-grams of all rows; the interval is the delete-one jackknife's (Efron and Tibshirani 1993,
    chapter 11).
    """
    rows_with: Counter[tuple[str, ...]] = Counter(gram for row in rows for gram in set(row))
    total, kinds, n = sum(map(len, rows)), len(rows_with), len(rows)
    if not total or n < 2:
        return {"value": None, "ci95": None, "n": n}
    left = []
    for row in rows:
        alone = sum(rows_with[gram] == 1 for gram in set(row))
        left.append((kinds - alone) / max(1, total - len(row)))
    centre = mean(left)
    return figure(kinds / total, 1.96 * math.sqrt((n - 1) / n * sum((x - centre) ** 2 for x in left)), n)

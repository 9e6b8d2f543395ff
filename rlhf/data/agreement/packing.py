"""Judgements as a few bytes each, and back to arrays.

Only the parts that the figures of agreement need are kept: neither texts nor ids. Responses are in the order of their texts.
"""

import marshal
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import combinations
from typing import NamedTuple

import numpy as np

from rlhf.data.agreement.figures import MISSING
from rlhf.data.records import Ranking

MAX_RESPONSES = 250  # items with more responses are left out: a rank is stored in one byte
RANKS, PAIRS, RATINGS = 1, 2, 4  # the form of a judgement's bytes
_UNRANKED = 255
_BATCH_CELLS = 500_000  # verdicts processed together for the report


class Item(NamedTuple):
    """What a ranking is about, a prompt and a set of texts, and its responses by position."""

    digest: bytes  # 16 bytes
    size: int  # K, the number of different texts
    place: list[int]  # of each response's text among the sorted ones
    ranks: list[int] | None  # of each response, as `Ranking.ranks`; None without a ranking


def item_of(ranking: Ranking) -> Item:
    given = [response.text for response in ranking.responses]
    texts = sorted(set(given))
    position = dict(zip(texts, range(len(texts)), strict=True))
    place = list(map(position.__getitem__, given))
    ranks = None if ranking.ranking is None else ranking.ranks()
    return Item(_digest(ranking, texts), len(texts), place, ranks)


def pack(ranking: Ranking, item: Item) -> tuple[bytes, int, int, bytes]:
    """The item's hash, its number K of different texts, the form, and the bytes of one judgement.

    They are K ranks or K (K - 1) / 2 verdicts, then K ratings, as given.
    """
    digest, size, place, ranks = item
    form, data = 0, b""
    if ranks is not None:
        form, data = RANKS, _ranks(ranks, place, size)
    elif ranking.pairs is not None:
        form, data = PAIRS, _verdicts(ranking, place, size)
    if ranking.ratings:
        form, data = form | RATINGS, data + _ratings(ranking, place, size)
    return digest, size, form, data


def _digest(ranking: Ranking, texts: list[str]) -> bytes:
    """16 bytes that identify the item: a hash of its prompt and its different response texts."""
    about = [[(message.role, message.content) for message in ranking.prompt], texts]
    return blake2b(marshal.dumps(about, 2), digest_size=16).digest()  # later versions write one object in memory once


def _ranks(ranks: list[int], place: list[int], size: int) -> bytes:
    """The rank of each text in one byte; a text that appears twice with two ranks has none."""
    of_text: dict[int, int] = {}
    for i, rank in zip(place, ranks, strict=True):
        rank = _UNRANKED if rank < 0 else rank
        of_text[i] = rank if of_text.get(i, rank) == rank else _UNRANKED
    return bytes([of_text[i] for i in range(size)])


def _verdicts(ranking: Ranking, place: list[int], size: int) -> bytes:
    """The verdict on each pair i < j of texts in one byte; ties are under `metadata.ties` if given."""
    verdicts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for better, worse in ranking.pair_list():
        i, j = place[better], place[worse]
        verdicts[min(i, j), max(i, j)].add(1 if i < j else -1)
    index = {response.id: i for response, i in zip(ranking.responses, place, strict=True)}
    ties = ranking.metadata.get("ties")
    for tie in ties if isinstance(ties, list) else ():
        if isinstance(tie, list) and len(tie) == 2 and all(isinstance(name, str) and name in index for name in tie):
            i, j = sorted(index[name] for name in tie)
            verdicts[i, j].add(0)
    said = (verdicts.get(pair, set()) for pair in combinations(range(size), 2))
    return np.array([next(iter(v)) if len(v) == 1 else MISSING for v in said], dtype=np.int8).tobytes()


def _ratings(ranking: Ranking, place: list[int], size: int) -> bytes:
    """The rating of each text in quarters, in one byte; 0: none, or a text that appears twice with two ratings."""
    quarters: dict[int, set[int]] = defaultdict(set)
    for response, i in zip(ranking.responses, place, strict=True):
        if response.id in ranking.ratings:
            quarters[i].add(round(4 * ranking.ratings[response.id]))
    return bytes(quarters[i].pop() if len(quarters[i]) == 1 else 0 for i in range(size))


def cut(starts: np.ndarray, sizes: np.ndarray) -> Iterator[tuple[int, int]]:
    """Batches of whole items with the same K, as ranges of items; `sizes` is K of each row, ascending."""
    k = sizes[starts]
    for size in np.unique(k).tolist():
        first, end = np.searchsorted(k, [size, size + 1]).tolist()
        limit = max(1, _BATCH_CELLS // max(size, size * (size - 1) // 2))
        while first < end:
            last = int(np.searchsorted(starts, starts[first] + limit, "right")) - 1
            last = min(end, max(first + 1, last))
            yield first, last
            first = last


def read(
    data: np.ndarray, offsets: np.ndarray, forms: np.ndarray, orders: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Verdicts (R, P) int8, ranks (R, K) and ratings (R, K) float32 of the judgements at `offsets`.

    `orders` (R,) is how many bytes of each hold its ranks or verdicts; its ratings follow them.
    """
    i, j = np.triu_indices(size, k=1)
    byte = np.full((len(offsets), size), _UNRANKED, np.uint8)
    rows = np.flatnonzero(forms & RANKS)
    byte[rows] = data[offsets[rows, None] + np.arange(size)]
    ranks = np.where(byte == _UNRANKED, np.nan, byte).astype(np.float32)
    order = ranks[:, j] - ranks[:, i]  # above 0 if i is better
    verdicts = np.where(np.isnan(order), MISSING, np.sign(order)).astype(np.int8)
    rows = np.flatnonzero(forms & PAIRS)
    verdicts[rows] = data[offsets[rows, None] + np.arange(len(i))].view(np.int8)
    ratings = np.full(ranks.shape, np.nan, np.float32)
    rows = np.flatnonzero(forms & RATINGS)
    quarters = data[(offsets + orders)[rows, None] + np.arange(size)]
    ratings[rows] = np.where(quarters == 0, np.nan, quarters / 4)
    return verdicts, ranks, ratings


def merge(batch: tuple[np.ndarray, np.ndarray, np.ndarray], starts: np.ndarray) -> tuple[np.ndarray, ...]:
    """One row from the rows of one person on one item, which begin at `starts`."""
    verdicts, ranks, ratings = batch
    if len(starts) == len(verdicts):
        return batch
    given = verdicts != MISSING
    verdict = np.sign(np.add.reduceat(np.where(given, verdicts, 0), starts, 0, np.int64))
    verdict[~np.logical_or.reduceat(given, starts, 0)] = MISSING
    means = []
    for values in (ranks, ratings):
        there = ~np.isnan(values)
        count = np.add.reduceat(there, starts, 0, np.int64)
        total = np.add.reduceat(np.where(there, values, 0), starts, 0)
        means.append(np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32))
    return verdict.astype(np.int8), *means

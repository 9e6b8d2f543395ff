"""The properties of a record that cleaning needs, and the steps of cleaning in order.

`fact_of` handles one record alone and can run in any process; `Cleaner` gets the records in order and keeps only hashes.
`assignments.py` chooses the splits.
"""

import hashlib
import marshal
import re
from collections import Counter
from typing import Any

import numpy as np

from rlhf.data.agreement.packing import Item
from rlhf.data.records import KINDS, Ranking, Record
from rlhf.data.splits import SPLITS, conversation, given_split, hash64, key_hash, prompt_key, seeded_bits

KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
PII_KINDS = ("card", "email", "phone")  # bit i of a fact's `pii` is kind i
# The result for a record; for a row with several records, the first of these that one of them has.
KEPT, FILTERED, DUPLICATE, REJECTED = range(4)

# The stored properties of a record; hashes are 64 bits, 0 if there is none.
FACT = np.dtype(
    [
        ("kind", "u1"),  # as KIND_NUMBERS
        ("row", "u4"),  # index of its row in the batch
        ("identity", "u8"),  # of the content
        ("prompt", "u8"),  # of the unchanged prompt
        ("key", "u8"),  # of the split key
        ("prefix", "u8"),  # of the normalised beginning of a prompt record
        ("user", "u8"),
        ("group", "u8"),  # u of its hash with the seed, times 2^64
        ("given", "i1"),  # the split that the record states, as in SPLITS; -1: none
        ("pii", "u1"),
        ("responses", "u4"),  # K
        ("pairs", "u4"),  # strictly ordered
        ("ties", "u4"),
    ]
)

# Begins where a run of such characters does: a search from each of a million letters would take hours.
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[^\W\d_]{2,}")
_ASCII_DIGITS = "0123456789"
_DIGITS = re.compile(r"(?<![\w.])[+(]?\d(?:[\d ().\-/]{5,}\d)(?![\w]|[.,]\d)")
_PHONES = (
    re.compile(r"\+\d{1,3}[ .\-/]?(?:\(\d{1,4}\)[ .\-/]?)?\d{1,4}(?:[ .\-/]?\d{2,4}){1,4}"),  # international
    re.compile(r"(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}"),  # North America
    re.compile(r"\(?0\d{1,4}\)?[ .\-/]\d{2,4}(?:[ .\-/]\d{2,4}){1,3}"),  # with a trunk zero
)
_CARD = re.compile(r"\d(?:[ -]?\d){12,18}")


def luhn(digits: str) -> bool:
    """Whether a card number's check digit is right: ISO/IEC 7812-1, annex B."""
    total = 0
    for i, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + i % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


def find_pii(text: str) -> set[str]:
    """Which of PII_KINDS a text holds: e-mail addresses, card numbers with a right check digit, phone numbers."""
    kinds = {"email"} if "@" in text and _EMAIL.search(text) else set()
    if not any(map(text.__contains__, _ASCII_DIGITS)):
        return kinds
    for match in _DIGITS.finditer(text):
        run = match[0]
        digits = "".join(c for c in run if c in _ASCII_DIGITS)
        if _CARD.fullmatch(run) and 13 <= len(digits) <= 19 and luhn(digits) and len(set(digits)) > 1:
            kinds.add("card")
        elif 7 <= len(digits) <= 15 and any(phone.fullmatch(run) for phone in _PHONES):
            kinds.add("phone")
    return kinds


def _digest(value: Any) -> int:
    """64 bits of a hash of lists, strings and numbers; compared within one import only."""
    plain = marshal.dumps(value, 2)  # later versions write what is one object in memory once
    return int.from_bytes(hashlib.blake2b(plain, digest_size=8).digest(), "big")


def _judgement(record: Ranking, item: Item) -> list[Any]:
    """What a labeler said of the responses, by position, so that their names do not matter."""
    said: list[Any] = [record.labeler, item.ranks]
    if record.pairs is None and not record.ratings and not record.flags:
        return said
    at = {response.id: i for i, response in enumerate(record.responses)}
    said.append(None if record.pairs is None else sorted([at[better], at[worse]] for better, worse in record.pairs))
    said.append(sorted((at[name], value) for name, value in record.ratings.items()))
    said.append(sorted((at[name], sorted(values)) for name, values in record.flags.items()))
    return said


def identity_of(record: Record, item: Item | None, prompt: int, own_id: bool) -> int:
    """The hash of what makes two records duplicates: prompt, responses, judgement and labeler.

    Neither id nor time belongs to it. But two people without a name may judge alike, so the id of a ranking
    without a labeler does, if the file gives one (`own_id`).
    """
    if record.kind == "demonstration":
        return _digest([record.kind, prompt, record.response, record.labeler])
    if record.kind == "prompt":
        return _digest([record.kind, prompt])
    assert item is not None
    named = record.id if own_id and record.labeler is None else None
    return _digest([record.kind, item.digest, item.place, _judgement(record, item), named])


def _count_pairs(record: Ranking) -> tuple[int, int]:
    """Strictly ordered pairs and ties of a ranking; beside `pairs`, its ties are in the metadata."""
    if record.pairs is not None:
        ties = record.metadata.get("ties")
        return len({(a, b) for a, b in record.pairs}), len(ties) if isinstance(ties, list) else 0
    sizes = [len(tie) for tie in record.ranking or ()]
    ranked, ties = sum(sizes), sum(size * (size - 1) // 2 for size in sizes)
    return ranked * (ranked - 1) // 2 - ties, ties


def fact_of(record: Record, item: Item | None, own_id: bool, prefix_characters: int, seed: int) -> tuple[Any, ...]:
    """A record's row of FACT without `row` (which is 0); `item` is that of a ranking."""
    turns = record.prompt
    prompt = _digest([[m.role, m.content] for m in turns])
    metadata = record.metadata
    user = (record.user if record.kind == "prompt" else None) or metadata.get("user")
    group = metadata.get("group")
    given = given_split(record)
    pii = 0
    for message in turns:
        for name in find_pii(message.content):
            pii |= 1 << PII_KINDS.index(name)
    prefix = responses = pairs = ties = 0
    if record.kind == "ranking":
        responses = len(record.responses)
        pairs, ties = _count_pairs(record)
    elif record.kind == "demonstration":
        responses = 1
    else:
        prefix = hash64(prompt_key(conversation(turns)[: 2 * prefix_characters])[:prefix_characters])
    return (
        KIND_NUMBERS[record.kind], 0, identity_of(record, item, prompt, own_id), prompt,
        key_hash(turns, prefix_characters), prefix, 0 if user is None else hash64("user", str(user)),
        0 if group is None else seeded_bits(prompt_key(str(group)), seed), SPLITS.index(given) if given in SPLITS else -1,
        pii, responses, pairs, ties,
    )  # fmt: skip


class Cleaner:
    """Decides for each record in order whether it is kept; the steps in the order of their counts."""

    def __init__(self, duplicates: str, pii: str, filter_prefixes: bool, max_prompts_per_user: int):
        self.drop_duplicates = duplicates == "drop"
        self.drop_pii = pii == "drop"
        self.filter_prefixes = filter_prefixes
        self.max_prompts_per_user = max_prompts_per_user
        self.counts: Counter[str] = Counter(dict.fromkeys(("duplicates", "pii", "shared_prefix", "prompts_of_user"), 0))
        self._seen: set[int] = set()
        self._prefixes: set[int] = set()
        self._of_user: Counter[int] = Counter()

    def judge(self, kind: int, identity: int, prefix: int, user: int, pii: int) -> int:
        """KEPT, DUPLICATE or FILTERED."""
        if self.drop_duplicates:
            if identity in self._seen:
                self.counts["duplicates"] += 1
                return DUPLICATE
            self._seen.add(identity)
        if pii and self.drop_pii:
            self.counts["pii"] += 1
            return FILTERED
        if kind != KIND_NUMBERS["prompt"]:
            return KEPT
        if self.filter_prefixes:
            if prefix in self._prefixes:
                self.counts["shared_prefix"] += 1
                return FILTERED
            self._prefixes.add(prefix)
        if user:
            if self._of_user[user] >= self.max_prompts_per_user:
                self.counts["prompts_of_user"] += 1
                return FILTERED
            self._of_user[user] += 1
        return KEPT

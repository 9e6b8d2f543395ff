"""The facts of a record that cleaning and splitting use, and the steps of cleaning in order. Only hashes are kept."""

import re
from collections import Counter
from typing import Any, NamedTuple

from rlhf.config.commands import ImportConfig
from rlhf.data.records import Record
from rlhf.data.splits import PREFIX_CHARACTERS, conversation, given_split, hash64, prompt_key, split_key, uniform

PII_KINDS = ("card", "email", "phone")
# The result for a record. A row with several records has the smallest of their results.
KEPT, FILTERED, DUPLICATE, REJECTED = range(4)

# A match starts at the start of a run of such characters: a search from each of a million letters would take hours.
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[^\W\d_]{2,}")
_DIGITS = re.compile(r"(?<![\w.])[+(]?\d(?:[\d ().\-/]{5,}\d)(?![\w]|[.,]\d)")
_PHONES = (
    re.compile(r"\+\d{1,3}[ .\-/]?(?:\(\d{1,4}\)[ .\-/]?)?\d{1,4}(?:[ .\-/]?\d{2,4}){1,4}"),  # international
    re.compile(r"(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}"),  # North America
    re.compile(r"\(?0\d{1,4}\)?[ .\-/]\d{2,4}(?:[ .\-/]\d{2,4}){1,3}"),  # with a trunk zero
)
# Beside other numbers. The third form would find dates.
_PHONES_WITHIN = [re.compile(rf"(?<!\d)(?:{phone.pattern})(?!\d)") for phone in _PHONES[:2]]
_CARD = re.compile(r"\d(?:[ -]?\d){12,18}")
_WITHIN = re.compile(r"(?<!\d)\d(?:[ -]?\d){12,15}(?!\d)")


class Facts(NamedTuple):
    """The properties of one record; hashes are 64 bits, 0 if there is none."""

    kind: str
    identity: int  # of the content
    key: int  # of the split key; an import stores only this of a prompt
    prefix: int = 0  # of the normalised beginning of a prompt record
    user: int = 0
    group: float = 0.0  # its hash with the seed, in [0, 1)
    given: str | None = None  # the split that the record states
    pii: tuple[str, ...] = ()


def _is_card(digits: str) -> bool:
    """Whether the check digit is right. Source: ISO/IEC 7812-1, annex B."""
    doubled = [int(digit) * (1 + i % 2) for i, digit in enumerate(reversed(digits))]
    return sum(value - 9 * (value > 9) for value in doubled) % 10 == 0 and len(set(digits)) > 1


def find_pii(text: str) -> set[str]:
    """Which of PII_KINDS a text holds: e-mail addresses, card numbers with a right check digit, phone numbers."""
    kinds = {"email"} if "@" in text and _EMAIL.search(text) else set()
    for match in _DIGITS.finditer(text):
        run = match[0]
        parts = [run, *(part[0] for part in _WITHIN.finditer(run))]  # a card's expiry date may follow it
        whole = 7 <= len(re.sub(r"\D", "", run)) <= 15 and any(phone.fullmatch(run) for phone in _PHONES)
        if any(_CARD.fullmatch(part) and _is_card(re.sub(r"\D", "", part)) for part in parts):
            kinds.add("card")
        elif whole or any(phone.search(run) for phone in _PHONES_WITHIN):
            kinds.add("phone")
    return kinds


def identity_of(record: Record, own_id: bool) -> int:
    """The hash of what makes two records duplicates: prompt, responses, judgement (by position, so that the responses'
    names do not matter) and labeler. Id and time are not part of it, with one exception: two people without a name may
    judge alike, so the id of a ranking without a labeler is part of it if the file gives one (`own_id`).
    """
    said: list[Any] = [record.kind, [[m.role, m.content] for m in record.prompt]]
    if record.kind == "demonstration":
        said += [record.response, record.labeler]
    elif record.kind == "ranking":
        at = {response.id: i for i, response in enumerate(record.responses)}
        said += [
            [response.text for response in record.responses],
            None if record.ranking is None else record.ranks(),
            None if record.pairs is None else sorted([at[better], at[worse]] for better, worse in record.pairs),
            sorted((at[name], value) for name, value in record.ratings.items()),
            sorted((at[name], sorted(values)) for name, values in record.flags.items()),
            record.labeler,
            record.id if own_id and record.labeler is None else None,
        ]
    return hash64(repr(said))


def facts_of(record: Record, own_id: bool, seed: int) -> Facts:
    turns, metadata = record.prompt, record.metadata
    user = (record.user if record.kind == "prompt" else None) or metadata.get("user")
    group = metadata.get("group")
    beginning = prompt_key(conversation(turns)[: 2 * PREFIX_CHARACTERS])[:PREFIX_CHARACTERS]
    return Facts(
        record.kind,
        identity_of(record, own_id),
        hash64(split_key(turns)),
        hash64(beginning) if record.kind == "prompt" else 0,
        0 if user is None else hash64("user", str(user)),
        0.0 if group is None else uniform(prompt_key(str(group)), seed),
        given_split(record),
        tuple(sorted({kind for message in turns for kind in find_pii(message.content)})),
    )


class Cleaner:
    """Decides for each record in order whether it is kept; the steps in the order of their counts."""

    def __init__(self, config: ImportConfig):
        self.config = config
        steps = ("duplicates", "pii", "shared_prefix", "prompts_of_user", "gold_accuracy")
        self.counts: Counter[str] = Counter(dict.fromkeys(steps, 0))
        self._seen: set[int] = set()
        self._prefixes: set[int] = set()
        self._of_user: Counter[int] = Counter()

    def judge(self, facts: Facts) -> int:
        """KEPT, DUPLICATE or FILTERED."""
        step, seen = None, facts.identity in self._seen
        self._seen.add(facts.identity)
        if self.config.duplicates == "drop" and seen:
            step = "duplicates"
        elif facts.pii and self.config.pii == "drop":
            step = "pii"
        elif facts.kind == "prompt":
            shared = facts.prefix in self._prefixes
            self._prefixes.add(facts.prefix)
            if shared and self.config.filter_prefixes:
                step = "shared_prefix"
            else:
                self._of_user[facts.user] += 1
                many = self._of_user[facts.user] > self.config.max_prompts_per_user
                step = "prompts_of_user" if facts.user and many else None
        if step is None:
            return KEPT
        self.counts[step] += 1
        return DUPLICATE if step == "duplicates" else FILTERED

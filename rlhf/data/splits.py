"""The split of a prompt, so that no prompt is ever in two splits: by hash for one record alone, and for an import, in
which users and groups stay together, and stated splits and those of earlier imports are kept.
"""

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rlhf.data.records import Message, Record, common_beginning
from rlhf.errors import UserError

PREFIX_CHARACTERS = 200
KEY_LETTERS = PREFIX_CHARACTERS * 3 // 4  # of a split key
SPLITS = ("train", "dev", "test")
LARGE_SHARE, LEAST_SHARING = 0.05, 10  # a beginning that more prompts share is no reason to keep them together
_NO_ASCII_LETTER = bytes(c for c in range(128) if not chr(c).isalnum())
_MARKS = re.compile(r"([^\w\s\x00-\x7f]{1000})[^\w\s\x00-\x7f]+")


def _normal(form: str, text: str) -> str:
    """A Unicode normal form. A run of accents is cut to 1000, since sorting them takes time that grows with the square."""
    return unicodedata.normalize(form, text if text.isascii() else _MARKS.sub(r"\1", text))  # type: ignore[arg-type]


def prompt_key(prompt: str | Sequence[Message]) -> str:
    """A prompt's normalised text: Unicode NFKC, case and runs of white space do not matter. A bare string and the same
    text as one user turn have the same key; the turns of other roles are named.
    """
    if not isinstance(prompt, str):
        prompt = "\n".join(m.content if m.role == "user" else f"{m.role}: {m.content}" for m in prompt)
    return " ".join(_normal("NFKC", prompt).casefold().split())


def conversation(prompt: str | Sequence[Message]) -> str:
    """The text of the turns from the first user turn on: a system turn that many prompts share stays out."""
    if isinstance(prompt, str):
        return prompt
    first = next((i for i, m in enumerate(prompt) if m.role == "user"), 0)
    return "\n".join(m.content for m in prompt[first:])


def _letters(text: str) -> str:
    """Only letters and digits, in one case and one Unicode form, without accents."""
    if text.isascii():  # the same, ten times as fast
        return text.lower().encode().translate(None, _NO_ASCII_LETTER).decode()
    text = unicodedata.normalize("NFKD", _normal("NFKD", text).upper().casefold())
    return unicodedata.normalize("NFKC", "".join(filter(str.isalnum, text)))


def split_key(prompt: str | Sequence[Message], shared: Sequence[str] = ()) -> str:
    """The key that decides a prompt's split: the letters and digits with which it begins, after `shared_beginnings`.
    Two prompts that differ in case, white space, punctuation, accents or Unicode form have the same key. So have two
    that share PREFIX_CHARACTERS, of which at least KEY_LETTERS are letters and digits in ordinary text.
    """
    letters = _letters(conversation(prompt))
    for beginning in shared:
        letters = letters.removeprefix(beginning)
    return letters[:KEY_LETTERS]


def shared_beginnings(prompts: Iterable[str | Sequence[Message]]) -> tuple[str, ...]:
    """The beginnings that more than LARGE_SHARE of the distinct prompts share, such as a preamble, as letters and digits."""
    texts, found = sorted({_letters(conversation(prompt)) for prompt in prompts}), list[str]()
    least = max(LEAST_SHARING - 1, LARGE_SHARE * len(texts))
    while True:
        sharing: dict[str, list[str]] = defaultdict(list)
        for text in texts:
            if len(text) >= KEY_LETTERS:
                sharing[text[:KEY_LETTERS]].append(text)
        large = [common_beginning(group) for group in sharing.values() if len(group) > least]
        if not large:
            return tuple(found)
        found += large
        for beginning in large:
            texts = [text.removeprefix(beginning) for text in texts]
        texts = list(dict.fromkeys(texts))


def hash64(*parts: str) -> int:
    """64 bits of a hash of strings, the same on every machine."""
    text = "\0".join(parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def uniform(key: str, seed: int) -> float:
    """A number in [0, 1) that depends on the key and the seed only."""
    return hash64(str(seed), key) / 2**64


def choose(u: float, fractions: Mapping[str, float]) -> str:
    """The split at u in [0, 1): `fractions` maps split names to shares that add up to 1."""
    names = [name for name, share in fractions.items() if share > 0]
    ends = accumulate(fractions[name] for name in names)
    return next((name for name, end in zip(names[:-1], ends, strict=False) if u < end), names[-1])


def split_of(text: str, seed: int, fractions: Mapping[str, float]) -> str:
    """The split of a text such as a group's key, by its `prompt_key`."""
    return choose(uniform(prompt_key(text), seed), fractions)


def given_split(record: Record) -> str | None:
    """The split that a record states, in `split` or `metadata.split`."""
    stated = record.split if record.kind == "demonstration" else None
    return stated or record.metadata.get("split")


def record_split(record: Record, seed: int, fractions: Mapping[str, float], shared: Sequence[str] = ()) -> str:
    """A record's split: its `split` or `metadata.split` if given, else by `metadata.group`, else by prompt. Records of
    one group (the same request in other words, or one user) are kept together, and so are prompts with one `split_key`.
    Raises: UserError if the given split is none of `fractions`.
    """
    given = given_split(record)
    if given is not None:
        if not isinstance(given, str) or given not in fractions:
            raise UserError(f"record {record.id}: split is {given!r}: want one of {', '.join(fractions)}, or null")
        return given
    return choose(uniform(unit_key(record, shared), seed), fractions)


def unit_key(record: Record, shared: Sequence[str] = ()) -> str:
    """What records that stay together share: their `metadata.group`, else their prompt's `split_key`."""
    group = record.metadata.get("group")
    return f"{hash64(split_key(record.prompt, shared=shared)):016x}" if group is None else prompt_key(str(group))


def record_half(record: Record, seed: int, shared: Sequence[str] = ()) -> int:
    """1 or 2: the half of the prompts that a record belongs to, whatever its split. What stays together is in one half."""
    return 1 + int(uniform(f"half {unit_key(record, shared)}", seed) >= 0.5)


def with_split(record: Record, split: str) -> Record:
    """The record as it is read back from the file of that split."""
    if record.kind == "demonstration":
        return record.model_copy(update={"split": split})
    return record.model_copy(update={"metadata": record.metadata | {"split": split}})


# The split of each prompt and user that was ever imported: by "prompt" or "user", and its hash.
Assignments = dict[tuple[str, int], str]


class Assigner:
    """Collects what connects prompts, then decides once all records were seen.

    A prompt's records have one split because it is decided by `key`, the hash of the split key. The first of these
    decides it:

        1. what an earlier import gave the prompt
        2. what the first record with the prompt states
        3. what is known of a prompt of the same user or group: the user's split in an earlier import, another prompt's
           there, what another record states
        4. the hash of the user, else of the group, else of the prompt
    """

    def __init__(self, seed: int, fractions: Mapping[str, float], earlier: Assignments):
        from scipy.cluster.hierarchy import DisjointSet

        self.seed, self.fractions, self.earlier = seed, fractions, earlier
        self.splits: dict[int, str] = {}  # by the key of each kept prompt; decided at the end
        self._connected: Any = DisjointSet()  # of prompts, users and groups, each as (what, its hash)
        self._given: dict[int, str] = {}  # by key: the first split that a record states

    def add(self, key: int, user: int, group: float, given: str | None, kept: bool) -> None:
        """Add a record. One that is not kept connects prompts too: the order of two duplicates must not matter."""
        if kept:
            self.splits[key] = ""
        for node in (("user", user), ("group", group)):
            if node[1]:
                self._connected.add(("prompt", key))
                self._connected.add(node)
                self._connected.merge(("prompt", key), node)
        if given in SPLITS:
            self._given.setdefault(key, given)

    def decide(self) -> Assignments:
        """Give every prompt its split; returns these and the users', with the earlier ones. Of prompts that users and
        groups connect, the best reason and the least hash decide, whatever the order of the rows.
        """
        together: Assignments = {}
        for members in self._connected.subsets():
            kinds = ("user", "prompt", "group")
            users, prompts, groups = (sorted(node for node in members if node[0] == kind) for kind in kinds)
            reasons = [self.earlier.get(node) for node in (*users, *prompts)]
            reasons += [self._given.get(key) for _, key in prompts]
            places = [uniform(f"user {user:016x}", self.seed) for _, user in users] + [u for _, u in groups]
            together |= dict.fromkeys(members, next(filter(None, reasons), None) or choose(places[0], self.fractions))
        for key in self.splits:
            split = self.earlier.get(("prompt", key), self._given.get(key, together.get(("prompt", key))))
            self.splits[key] = split or choose(uniform(f"{key:016x}", self.seed), self.fractions)
        users_of = {node: split for node, split in together.items() if node[0] == "user"}
        return users_of | {("prompt", key): split for key, split in self.splits.items()} | self.earlier

"""The splits of an import: users and groups stay together, and stated splits and those of earlier imports are kept.

Only hashes are stored. A prompt's records have one split because it is decided by `key`, the hash of the split key
(`splits.py`). The first of these decides it:

    1. what an earlier import gave the prompt
    2. what the first record with the prompt states
    3. what is known of a prompt of the same user or group: the user's split in an earlier import, another prompt's
       there, what another record states
    4. the hash of the user, else of the group, else of the prompt
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.data.splits import SPLITS, choose, splits_of_hashes, uniform
from rlhf.errors import UserError

FILE = "assignments.arrow"
_KEY, _USER, _GROUP = 0, 1, 2


@dataclass(slots=True)
class Assignments:
    """The split (an index into SPLITS) of each prompt and user that was ever imported, by their hashes."""

    prompts: dict[int, int] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    conflicts: int = 0  # prompts and users on whose split two earlier imports differ; the first one counts

    def add(self, other: "Assignments") -> None:
        for mine, theirs in ((self.prompts, other.prompts), (self.users, other.users)):
            for key, split in theirs.items():
                self.conflicts += mine.setdefault(key, split) != split


def read_assignments(folder: Path, prefix_characters: int) -> Assignments:
    """What an import decided.

    Raises: UserError if the folder is no import, or if its keys were made in another way.
    """
    from rlhf.data.storage import read_arrow, verify

    manifest = verify(folder, only=FILE)
    made_with = manifest.get("splits", {}).get("prefix_characters")
    if made_with != prefix_characters:
        raise UserError(
            f"{folder}: was imported with prefix_characters={made_with}, now it is {prefix_characters}: "
            f"set prefix_characters={made_with}, or do without that earlier import"
        )
    assignments = Assignments()
    for row in read_arrow(folder / FILE, 10_000) if (folder / FILE).exists() else ():
        (assignments.prompts if row["what"] == "prompt" else assignments.users)[row["key"]] = SPLITS.index(row["split"])
    return assignments


def write_assignments(path: Path, assignments: Assignments) -> None:
    """Every prompt and user with its split, sorted, so that the order of the rows that were read does not matter."""
    import pyarrow as pa

    from rlhf.data.storage import ArrowWriter

    schema = pa.schema([("what", pa.string()), ("key", pa.uint64()), ("split", pa.string())])
    writer = ArrowWriter(path, schema)
    names = np.array(SPLITS)
    for what, known in (("prompt", assignments.prompts), ("user", assignments.users)):
        keys = np.array(sorted(known), np.uint64)
        for begin in range(0, len(keys), 100_000):
            part = keys[begin : begin + 100_000]
            splits = names[[known[key] for key in part.tolist()]]
            columns = [pa.array([what] * len(part)), pa.array(part), pa.array(splits.tolist())]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=schema))
    writer.close()


class Assigner:
    """Collects what connects prompts, then decides once all records were seen."""

    def __init__(self, seed: int, fractions: Mapping[str, float], earlier: Assignments):
        self.seed, self.fractions, self.earlier = seed, fractions, earlier
        self._above: dict[int, int] = {}  # union-find over keys, users and groups
        self._given: dict[int, int] = {}  # by key: the first split that a record states
        self._keys: list[np.ndarray] = []
        self._decided = np.zeros(0, np.uint64), np.zeros(0, np.int8)
        self.assignments = Assignments()

    def add(self, facts: np.ndarray, kept: np.ndarray) -> None:
        """Add records, rows of `cleaning.FACT`, and which of them are kept.

        The others connect prompts too, and may state a split: the order of two duplicates must not matter.
        """
        self._keys.append(np.unique(facts["key"][kept]))
        for row in facts[(facts["user"] != 0) | (facts["group"] != 0)]:
            key, user, group = int(row["key"]), int(row["user"]), int(row["group"])
            if user:
                self._connect(4 * key + _KEY, 4 * user + _USER)
            if group:
                self._connect(4 * key + _KEY, 4 * group + _GROUP)
        for row in facts[facts["given"] >= 0]:
            self._given.setdefault(int(row["key"]), int(row["given"]))

    def _root(self, node: int) -> int:
        above = self._above
        above.setdefault(node, node)
        while above[node] != node:
            above[node] = node = above[above[node]]
        return node

    def _connect(self, a: int, b: int) -> None:
        first, second = sorted((self._root(a), self._root(b)))
        self._above[second] = first

    def decide(self) -> None:
        """Give every prompt and user its split."""
        together = self._decide_connected()
        keys = np.unique(np.concatenate([np.zeros(0, np.uint64), *self._keys]))
        splits = splits_of_hashes(keys.tolist(), self.seed, self.fractions)
        for i, key in enumerate(keys.tolist()):
            split = self.earlier.prompts.get(key, self._given.get(key))
            if split is None and 4 * key in self._above:
                split = together[self._root(4 * key)]
            if split is not None:
                splits[i] = split
        self._decided = keys, splits
        users = {node // 4: together[self._root(node)] for node in self._above if node % 4 == _USER}
        self.assignments = Assignments(dict(self.earlier.prompts), dict(self.earlier.users))
        self.assignments.add(Assignments(dict(zip(keys.tolist(), splits.tolist(), strict=True)), users))

    def _decide_connected(self) -> dict[int, int]:
        """The split of each set of prompts that users and groups connect, by its root."""
        known: dict[int, tuple[int, int]] = {}  # (rank of the reason, split)
        by_hash: dict[int, tuple[int, int]] = {}
        for node in sorted(self._above):  # the least hash decides, whatever the order of the rows
            root, tag, value = self._root(node), node % 4, node // 4
            if tag == _USER and value in self.earlier.users:
                self._keep_first(known, root, 0, self.earlier.users[value])
            elif tag == _KEY and value in self.earlier.prompts:
                self._keep_first(known, root, 1, self.earlier.prompts[value])
            if tag == _USER:
                name = choose(uniform(f"user {value:016x}", self.seed), self.fractions)
                self._keep_first(by_hash, root, 0, SPLITS.index(name))
            elif tag == _GROUP:
                self._keep_first(by_hash, root, 1, SPLITS.index(choose(value / 2**64, self.fractions)))
        for key, split in self._given.items():
            if 4 * key in self._above:
                self._keep_first(known, self._root(4 * key), 2, split)
        return {root: known.get(root, by_hash[root])[1] for root in by_hash}

    @staticmethod
    def _keep_first(decided: dict[int, tuple[int, int]], root: int, rank: int, split: int) -> None:
        if root not in decided or rank < decided[root][0]:
            decided[root] = rank, split

    def splits_of(self, keys: np.ndarray) -> np.ndarray:
        """The splits (indices into SPLITS) of prompts that were added."""
        known, splits = self._decided
        return splits[np.searchsorted(known, keys)]


def describe_splits(assigner: Assigner, facts: Iterable[np.ndarray]) -> dict[str, Any]:
    """The report's entry on splits: prompts by split, and stated splits that could not be kept."""
    prompts = dict.fromkeys(SPLITS, 0)
    keys, splits = assigner._decided
    for index, count in zip(*np.unique(splits, return_counts=True), strict=True):
        prompts[SPLITS[index]] = int(count)
    overruled = 0
    pairs: set[tuple[int, int]] = set()
    for part in facts:
        final = assigner.splits_of(part["key"])
        overruled += int(((part["given"] >= 0) & (part["given"] != final)).sum())
        of_users = part["user"] != 0
        pairs.update(zip(part["user"][of_users].tolist(), final[of_users].tolist(), strict=True))
    users = {user for user, _ in pairs}
    return {
        "prompts": prompts,
        "users": len(users),
        "users_in_several_splits": len(pairs) - len(users),
        "stated_splits_overruled": overruled,
        "kept_from_earlier": int(np.isin(keys, np.array(sorted(assigner.earlier.prompts), np.uint64)).sum()),
        "earlier_conflicts": assigner.earlier.conflicts,
    }

"""The splits of an import: users and groups stay together, and stated splits and those of earlier imports are kept.

Only hashes are stored. A prompt's records have one split because it is decided by `key`, the hash of the split key
(`splits.py`). The first of these decides it:

    1. what an earlier import gave the prompt
    2. what the first record with the prompt states
    3. what is known of a prompt of the same user or group: the user's split in an earlier import, another prompt's
       there, what another record states
    4. the hash of the user, else of the group, else of the prompt
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.data.splits import SPLITS, choose, uniform
from rlhf.data.storage import ArrowWriter, read_arrow, verify
from rlhf.errors import UserError

FILE = "assignments.arrow"
_Node = tuple[str, int]  # "key", "user" or "group", and its hash


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
    """What an import decided. Raises: UserError if the folder is no import, or if its keys were made in another way."""
    made_with = verify(folder, only=FILE).get("splits", {}).get("prefix_characters")
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

    writer = ArrowWriter(path, pa.schema([("what", pa.string()), ("key", pa.uint64()), ("split", pa.string())]))
    for what, known in (("prompt", assignments.prompts), ("user", assignments.users)):
        for key in sorted(known):
            writer.add({"what": what, "key": key, "split": SPLITS[known[key]]}, 32)
    writer.close()


class Assigner:
    """Collects what connects prompts, then decides once all records were seen."""

    def __init__(self, seed: int, fractions: Mapping[str, float], earlier: Assignments):
        self.seed, self.fractions, self.earlier = seed, fractions, earlier
        self.splits: dict[int, int] = {}  # by the key of each kept prompt; decided at the end
        self._above: dict[_Node, _Node] = {}  # union-find over keys, users and groups
        self._given: dict[int, int] = {}  # by key: the first split that a record states
        self._kept: Counter[tuple[int, int, str | None]] = Counter()  # key, user and stated split of kept records

    def add(self, key: int, user: int, group: int, given: str | None, kept: bool) -> None:
        """Add a record. One that is not kept connects prompts too: the order of two duplicates must not matter."""
        if kept:
            self.splits[key] = -1
            self._kept[key, user, given if given in SPLITS else None] += 1
        for node in (("user", user), ("group", group)):
            if node[1]:
                first, second = sorted((self._root(("key", key)), self._root(node)))
                self._above[second] = first
        if given in SPLITS:
            self._given.setdefault(key, SPLITS.index(given))

    def _root(self, node: _Node) -> _Node:
        above = self._above
        above.setdefault(node, node)
        while above[node] != node:
            above[node] = node = above[above[node]]
        return node

    def _choose(self, u: float) -> int:
        return SPLITS.index(choose(u, self.fractions))

    def decide(self) -> Assignments:
        """Give every prompt its split; returns these and the users', with the earlier ones."""
        together = self._decide_connected()
        for key in self.splits:
            split = self.earlier.prompts.get(key, self._given.get(key))
            if split is None and ("key", key) in self._above:
                split = together[self._root(("key", key))]
            self.splits[key] = self._choose(uniform(f"{key:016x}", self.seed)) if split is None else split
        users = {node[1]: together[self._root(node)] for node in self._above if node[0] == "user"}
        decided = Assignments(dict(self.earlier.prompts), dict(self.earlier.users))
        decided.add(Assignments(self.splits, users))
        return decided

    def _decide_connected(self) -> dict[_Node, int]:
        """The split of each set of prompts that users and groups connect, by its root; the best reason and the least hash
        decide, whatever the order of the rows.
        """
        known: dict[_Node, tuple[int, int]] = {}  # (rank of the reason, split)

        def propose(node: _Node, rank: int, split: int | None) -> None:
            root = self._root(node)
            if split is not None and (root not in known or rank < known[root][0]):
                known[root] = rank, split

        for node in sorted(self._above):
            what, value = node
            if what == "user":
                propose(node, 0, self.earlier.users.get(value))
                propose(node, 3, self._choose(uniform(f"user {value:016x}", self.seed)))
            elif what == "group":
                propose(node, 4, self._choose(value / 2**64))
            else:
                propose(node, 1, self.earlier.prompts.get(value))
        for key, split in self._given.items():
            if ("key", key) in self._above:
                propose(("key", key), 2, split)
        return {root: split for root, (_, split) in known.items()}

    def report(self) -> dict[str, Any]:
        """Prompts by split, and stated splits that could not be kept."""
        prompts = Counter(SPLITS[split] for split in self.splits.values())
        users = {(user, self.splits[key]) for key, user, _ in self._kept if user}
        return {
            "prompts": {split: prompts[split] for split in SPLITS},
            "users": len({user for user, _ in users}),
            "users_in_several_splits": len(users) - len({user for user, _ in users}),
            "stated_splits_overruled": sum(
                n for (key, _, given), n in self._kept.items() if given in SPLITS and given != SPLITS[self.splits[key]]
            ),
            "kept_from_earlier": sum(key in self.earlier.prompts for key in self.splits),
            "earlier_conflicts": self.earlier.conflicts,
        }

"""OpenAssistant's flat messages: one message per row, in any order, which names the message that it answers.

The messages of a file become its trees, which `oasst` turns into records; replies keep the order of their rows. A message
is held as JSON until the file has been read, and one tree at a time is built from it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rlhf.data.conversion.verdicts import as_number, is_empty
from rlhf.data.importers import Format, oasst
from rlhf.data.reading.readers import Reject, Row
from rlhf.data.records import shown
from rlhf.errors import UserError

HELD_BYTES = 2 << 30  # of the messages of one file; OpenAssistant's second release has about 0.3 GB
_OF_TREE = ("message_tree_id", "tree_state")  # the same for all messages of a tree


def recognise(row: Mapping[str, Any]) -> str | None:
    fits = all(key in row for key in ("message_id", "text", "role")) and "replies" not in row
    return "keys message_id, text and role: one message of a tree" if fits else None


class _Message(NamedTuple):
    """A row that waits for the rest of its tree."""

    place: Row  # without its value
    key: str
    parent: str | None
    packed: bytes

    def reject(self, name: str, field: str, message: str) -> Reject:
        return Reject(
            name, self.place.line, field, f"{field}: {message}", self.place.number, self.place.offset, self.packed
        )


def gather(rows: Iterable[Row | Reject], name: str) -> Iterator[Row | Reject]:
    """The trees of a file's messages, in the order of their first messages; a Reject for each tree that lacks one.

    Raises: UserError for more than HELD_BYTES.
    """
    held: dict[str, _Message] = {}
    below: dict[str | None, list[str]] = {}  # a message's replies; of None: first messages
    size = 0
    for row in rows:
        one = row if isinstance(row, Reject) else _message(row, held, name)
        if isinstance(one, Reject):
            yield one
            continue
        size += len(one.packed)
        if size > HELD_BYTES:
            raise UserError(
                f"{name}: more than {HELD_BYTES >> 20} MB of messages, which are held until their trees are whole: "
                "split the file by message_tree_id"
            )
        held[one.key] = one
        below.setdefault(one.parent, []).append(one.key)
    left = dict.fromkeys(held)  # in order
    for root in below.get(None, []):
        yield _tree(root, held, below, left)
    for key in list(left):
        parent = held[key].parent
        if parent not in held:
            lost = len(_take(key, below, left)) - 1
            problem = f"got {shown(parent)}, which no message has; {lost} below it are left out too: add it"
            yield held[key].reject(name, "parent_id", problem)
    while left:
        met: dict[str, None] = {}
        at = next(iter(left))
        while at not in met:
            met[at] = None
            at = str(held[at].parent)
        circle = list(met)[list(met).index(at) :]
        lost = len(_take(circle[0], below, left)) - len(circle)
        problem = f"{shown(circle)} answer each other in a circle; {lost} below them are left out too: mend one"
        yield held[circle[0]].reject(name, "parent_id", problem)


def _message(row: Row, held: Mapping[str, _Message], name: str) -> _Message | Reject:
    """A row's message, or what is wrong with it."""
    key: Any = row.value.get("message_id")
    parent = row.value.get("parent_id") or None
    problem = None
    if not isinstance(key, str) or not key:
        problem = "message_id", f"got {shown(key)}, want a string"
    elif key in held:
        problem = "message_id", f"{shown(key)} came before, in line {held[key].place.line}: want each message once"
    elif parent is not None and not isinstance(parent, str):
        problem = "parent_id", f"got {shown(parent)}, want the message_id of another row, or null"
    try:
        packed = json.dumps(row.value, default=str).encode()
    except RecursionError:
        packed, problem = b"", ("", "nested too deeply")
    message = _Message(Row(row.line, {}, row.number, row.offset), key, parent, packed)
    return message if problem is None else message.reject(name, *problem)


def _take(key: str, below: Mapping[str | None, list[str]], left: dict[str, None]) -> list[str]:
    """A message and all below it, each before its replies; they are left no longer."""
    taken = []
    waiting = [key]
    while waiting:
        if (one := waiting.pop()) in left:
            del left[one]
            taken.append(one)
            waiting += below.get(one, [])
    return taken


def _tree(root: str, held: Mapping[str, _Message], below: Mapping[str | None, list[str]], left: dict[str, None]) -> Row:
    nodes = {key: _node(json.loads(held[key].packed)) for key in _take(root, below, left)}
    about = {name: nodes[root][name] for name in _OF_TREE if name in nodes[root]}
    for key, node in nodes.items():
        for name in _OF_TREE:
            node.pop(name, None)
        node["replies"] = [nodes[reply] for reply in below.get(key, [])]
    place = held[root].place
    return Row(place.line, {**about, "prompt": nodes[root]}, place.number)


def _node(row: Mapping[str, Any]) -> dict[str, Any]:
    """A message as trees have it: in a table every key is there, and in CSV numbers and truth are text."""
    node = {name: value for name, value in row.items() if name == "text" or not is_empty(value)}
    if isinstance(node.get("rank"), str) and (rank := as_number(node["rank"])) is not None:
        node["rank"] = rank
    if isinstance(node.get("deleted"), str):
        node["deleted"] = node["deleted"].strip().lower() not in ("false", "0")
    return node


FORMAT = Format(
    "oasst_messages",
    "keys message_id, parent_id, text, role, rank: one message of a tree per row; rows are counted as trees",
    recognise,
    oasst.convert,
    gather=gather,
)

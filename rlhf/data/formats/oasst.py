"""OpenAssistant's message trees (oasst), and its flat messages, one per row (oasst_messages).

People wrote every message, and ranked the answers to the same message. Every set of ranked siblings is one ranking, whose
prompt is the path to them: rank 0 is best, equal ranks tie. A sibling without a rank stays among the responses and out of
the order; one that is marked deleted is left out, as are all answers that nobody ranked. A tree without any ranking gives
its first message as a prompt. Message ids become the ids of responses.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rlhf.data.formats.shapes import (
    ROLES,
    BadRow,
    Values,
    answer_of,
    as_number,
    chat_turns,
    is_empty,
    is_list,
    number,
    other_keys,
    ranking_of,
    require,
)
from rlhf.data.inputs import Reject, Row
from rlhf.data.records import shown
from rlhf.errors import UserError

HELD_BYTES = 2 << 30  # of the messages of one file; OpenAssistant's second release has about 0.3 GB
_OF_TREE = ("message_tree_id", "tree_state")  # the same for all messages of a tree


def is_oasst(row: Values) -> str | None:
    root = row.get("prompt")
    fits = isinstance(root, dict) and "text" in root and ("replies" in root or "message_tree_id" in row)
    return "key prompt is the first message of a tree, with replies" if fits else None


def _id(node: Values) -> str | None:
    name = node.get("message_id")
    return name if isinstance(name, str) and name else None


def _turn(node: Values) -> dict[str, Any]:
    turn = {"role": node.get("role"), "content": node.get("text"), **other_keys(node, "role", "text", "replies")}
    return chat_turns([turn], "message")[0]


def _replies(node: Values) -> list[Values]:
    replies = node.get("replies") or []
    require(replies == [] or is_list(replies, dict), "replies", replies, "a list of messages")
    return replies


def _ranking(path: list[dict[str, Any]], node: Values) -> dict[str, Any] | None:
    """The ranking of the replies to one message; None if fewer than two of them are ranked answers."""
    answers = [reply for reply in _replies(node) if ROLES.get(str(reply.get("role"))) == "assistant"]
    kept = [reply for reply in answers if not reply.get("deleted")]
    if path[-1]["role"] != "user" or sum(reply.get("rank") is not None for reply in kept) < 2:
        return None
    responses, ranks = [], {}
    for i, reply in enumerate(kept):
        name = _id(reply) or f"reply-{i}"
        if reply.get("rank") is not None:
            ranks[name] = number(reply["rank"], "rank", f"a number, 0 for the best, in message {name}")
        wanted = f"a message with a text, in {name}"
        responses.append(answer_of(name, reply, "text", wanted, "text", "model_name", "role", "replies", "message_id"))
    left_out = [_id(reply) for reply in answers if reply.get("deleted")]
    return {
        "kind": "ranking",
        "id": _id(node),
        "prompt": path,
        "responses": responses,
        "ranking": ranking_of(ranks, best="lowest"),
        "metadata": {"deleted_replies": left_out} if left_out else {},
    }


def from_oasst(row: Values) -> Iterator[dict[str, Any] | BadRow]:
    """One ranking for every set of ranked siblings, a message before its replies; else one prompt.

    A message that has no text or another role is a BadRow of its own, with all that follows it.
    """
    root: Any = row.get("prompt")
    require(isinstance(root, dict), "prompt", root, "the first message of a tree")
    about = other_keys(row, "prompt")
    yielded = False
    left: list[tuple[list[dict[str, Any]], Values]] = [([], root)]  # (turns above, message); a stack: trees may be deep
    while left:
        above, node = left.pop()
        try:
            replies = _replies(node)
            path = [*above, _turn(node)]
            made = _ranking(path, node)
        except BadRow as error:
            yielded = True
            yield error
            continue
        if made is not None:
            yielded = True
            yield made | {"metadata": about | made["metadata"]}
        left += [(path, reply) for reply in reversed(replies)]
    if not yielded:
        yield {"kind": "prompt", "id": _id(root), "prompt": [_turn(root)], "metadata": about}


# --- flat messages -----------------------------------------------------------------------------------------------------


def is_oasst_messages(row: Values) -> str | None:
    fits = all(key in row for key in ("message_id", "text", "role")) and "replies" not in row
    return "keys message_id, text and role: one message of a tree" if fits else None


from_oasst_messages = from_oasst  # of the trees that `gather_messages` makes


class _Message(NamedTuple):
    """A row that waits for the rest of its tree."""

    line: int
    number: int
    parent: str | None
    packed: bytes  # JSON

    def reject(self, name: str, field: str, message: str) -> Reject:
        return Reject(name, self.line, field, f"{field}: {message}", self.number, self.packed)


def gather_messages(rows: Iterable[Row | Reject], name: str) -> Iterator[Row | Reject]:
    """The trees of a file's messages, which come in any order, and a Reject for each message whose tree is not whole.

    Raises: UserError for more than HELD_BYTES.
    """
    held: dict[str, _Message] = {}
    below: dict[str | None, list[str]] = {}  # a message's replies; of None: first messages
    size = 0
    for row in rows:
        if isinstance(row, Reject):
            yield row
            continue
        key: Any = row.value.get("message_id")
        parent: Any = row.value.get("parent_id") or None
        message = _Message(row.line, row.number, parent, json.dumps(row.value, default=str).encode())
        if not isinstance(key, str) or not key:
            yield message.reject(name, "message_id", f"got {shown(key)}, want a string")
        elif key in held:
            before = f"{shown(key)} came before, in line {held[key].line}"
            yield message.reject(name, "message_id", f"{before}: want each message once")
        elif not isinstance(parent, str | None):
            yield message.reject(name, "parent_id", f"got {shown(parent)}, want the message_id of a row, or null")
        else:
            held[key] = message
            below.setdefault(parent, []).append(key)
            size += len(message.packed)
        if size > HELD_BYTES:
            raise UserError(
                f"{name}: more than {HELD_BYTES >> 20} MB of messages, which are held until their trees are whole: "
                "split the file by message_tree_id"
            )
    left = dict.fromkeys(held)
    for root in below.get(None, []):
        yield _tree(root, held, below, left)
    for key in left:
        parent = held[key].parent
        problem = f"got {shown(parent)}, which no message has: add it"
        if parent in held:
            problem = f"got {shown(parent)}, whose tree has no first message: add it, or remove this one"
        yield held[key].reject(name, "parent_id", problem)


def _tree(root: str, held: Mapping[str, _Message], below: Mapping[str | None, list[str]], left: dict[str, None]) -> Row:
    """The tree below a first message, as a row of `oasst`."""
    nodes: dict[str, dict[str, Any]] = {}
    waiting = [root]
    while waiting:
        key = waiting.pop()
        del left[key]
        nodes[key] = _node(json.loads(held[key].packed))
        waiting += below.get(key, [])
    about = {name: nodes[root][name] for name in _OF_TREE if name in nodes[root]}
    for key, node in nodes.items():
        for name in _OF_TREE:
            node.pop(name, None)
        node["replies"] = [nodes[reply] for reply in below.get(key, [])]
    return Row(held[root].line, {**about, "prompt": nodes[root]}, held[root].number)


def _node(row: Values) -> dict[str, Any]:
    """A message as trees have it: in a table every key is there, and in CSV numbers and truth are text."""
    node = {name: value for name, value in row.items() if name == "text" or not is_empty(value)}
    if isinstance(node.get("rank"), str) and (rank := as_number(node["rank"])) is not None:
        node["rank"] = rank
    if isinstance(node.get("deleted"), str):
        node["deleted"] = node["deleted"].strip().lower() not in ("false", "0")
    return node

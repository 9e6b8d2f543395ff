"""OpenAssistant's message trees (oasst), and its flat messages, one per row (oasst_messages).

People wrote every message, and ranked the answers to the same message. Every set of ranked siblings is one ranking, whose
prompt is the path to them: rank 0 is best, equal ranks tie. A sibling without a rank stays among the responses and out of
the order; one that is marked deleted is left out, as are all answers that nobody ranked. A tree without any ranking gives
its first message as a prompt. Message ids become the ids of responses.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from rlhf.data.formats.shapes import (
    ROLES,
    Turns,
    Values,
    as_number,
    chat_turns,
    is_empty,
    number,
    other_keys,
    ranking_of,
    require_text,
)
from rlhf.data.inputs import Reject, Row
from rlhf.data.records import shown
from rlhf.errors import UserError

HELD_BYTES = 2 << 30  # of the messages of one file; OpenAssistant's second release has about 0.3 GB
_OF_TREE = ("message_tree_id", "tree_state")  # the same for all messages of a tree


def is_oasst(row: Values) -> bool:
    root = row.get("prompt")
    return isinstance(root, dict) and "text" in root and ("replies" in root or "message_tree_id" in row)


def _turn(node: Values) -> dict[str, Any]:
    turn = {"role": node.get("role"), "content": node.get("text"), **other_keys(node, "role", "text", "replies")}
    return chat_turns([turn], "message")[0]


def _ranking(path: Turns, node: Values) -> dict[str, Any] | None:
    """The ranking of the replies to one message; None if fewer than two of them are ranked answers."""
    answers = [reply for reply in node.get("replies") or [] if ROLES.get(reply["role"]) == "assistant"]
    kept = {
        reply.get("message_id") or f"reply-{i}": reply for i, reply in enumerate(answers) if not reply.get("deleted")
    }
    ranks = {name: number(reply["rank"], "rank") for name, reply in kept.items() if reply.get("rank") is not None}
    if path[-1]["role"] != "user" or len(ranks) < 2:
        return None
    deleted = [reply.get("message_id") for reply in answers if reply.get("deleted")]
    responses = [
        {
            "id": name,
            "text": require_text(reply, "text"),
            "policy": reply.get("model_name"),
            "metadata": other_keys(reply, "text", "model_name", "role", "replies", "message_id"),
        }
        for name, reply in kept.items()
    ]
    return {
        "kind": "ranking",
        "id": node.get("message_id"),
        "prompt": path,
        "responses": responses,
        "ranking": ranking_of(ranks, best="lowest"),
        "metadata": {"deleted_replies": deleted} if deleted else {},
    }


def from_oasst(row: Values) -> Iterator[dict[str, Any]]:
    """One ranking for every set of ranked siblings, a message before its replies; else one prompt."""
    root, about = row["prompt"], other_keys(row, "prompt")
    ranked = False
    left: list[tuple[Turns, Values]] = [([], root)]  # (turns above, message); a stack: trees may be deep
    while left:
        above, node = left.pop()
        path = [*above, _turn(node)]
        if (made := _ranking(path, node)) is not None:
            ranked = True
            yield made | {"metadata": about | made["metadata"]}
        left += [(path, reply) for reply in reversed(node.get("replies") or [])]
    if not ranked:
        yield {"kind": "prompt", "id": root.get("message_id"), "prompt": [_turn(root)], "metadata": about}


# --- flat messages -----------------------------------------------------------------------------------------------------


def is_oasst_messages(row: Values) -> bool:
    return row.keys() >= {"message_id", "text", "role"} and "replies" not in row


from_oasst_messages = from_oasst  # of the trees that `gather_oasst_messages` makes


def gather_oasst_messages(rows: Iterable[Row | Reject], name: str) -> Iterator[Row | Reject]:
    """The trees of a file's messages, which come in any order, and a Reject for each message whose tree is not whole.

    Raises: UserError for more than HELD_BYTES.
    """
    held: dict[str, Row] = {}  # each with its packed JSON only
    parents: dict[str, str | None] = {}
    below: dict[str | None, list[str]] = {}  # a message's replies; of None: first messages
    size = 0
    for row in rows:
        if isinstance(row, Reject):
            yield row
            continue
        key, parent = row.value.get("message_id"), row.value.get("parent_id") or None
        packed = json.dumps(row.value, default=str).encode()
        if not isinstance(key, str) or not isinstance(parent, str | None) or key in held:
            problem = f"message_id: got {shown(key)} in reply to {shown(parent)}, want texts, and each message once"
            yield Reject(name, row.line, "message_id", problem, row.number, packed)
            continue
        held[key], parents[key] = Row(row.line, {}, row.number, packed), parent
        below.setdefault(parent, []).append(key)
        size += len(packed)
        if size > HELD_BYTES:
            raise UserError(
                f"{name}: more than {HELD_BYTES >> 20} MB of messages, which are held until their trees are whole: "
                "split the file by message_tree_id"
            )
    for root in below.get(None, []):
        nodes: dict[str, dict[str, Any]] = {}
        place = held[root]
        waiting = [root]
        while waiting:
            key = waiting.pop()
            nodes[key] = _node(json.loads(held.pop(key).raw or b"{}"))
            waiting += below.get(key, [])
        about = {one: nodes[root][one] for one in _OF_TREE if one in nodes[root]}
        for key, node in nodes.items():
            for one in _OF_TREE:
                node.pop(one, None)
            node["replies"] = [nodes[reply] for reply in below.get(key, [])]
        yield Row(place.line, {**about, "prompt": nodes[root]}, place.number)
    for key, row in held.items():
        problem = f"parent_id: got {shown(parents[key])}, whose tree has no first message: add it, or remove this one"
        yield Reject(name, row.line, "parent_id", problem, row.number, row.raw)


def _node(row: Values) -> dict[str, Any]:
    """A message as trees have it: in a table every key is there, and in CSV numbers and truth are text."""
    node = {name: value for name, value in row.items() if name == "text" or not is_empty(value)}
    if isinstance(node.get("rank"), str):
        node["rank"] = as_number(node["rank"])
    if isinstance(node.get("deleted"), str):
        node["deleted"] = node["deleted"].strip().lower() not in ("false", "0")
    return node

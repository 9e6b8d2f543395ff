"""OpenAssistant's message trees: people wrote every message, and ranked the answers to the same message.

Every set of ranked siblings is one ranking, whose prompt is the path to them: rank 0 is best, equal ranks tie.
A sibling without a rank stays among the responses and out of the order; one that is marked deleted is left
out, as are all answers that nobody ranked. A tree without any ranking gives its first message as a prompt.
Message ids become the ids of responses; what else is known of a message is kept beside its text.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import ROLES, answer_of, chat_turns, is_list, number, ranking_of, require
from rlhf.data.importers import BadRow, Format, other_keys
from rlhf.data.records import shown

Node = Mapping[str, Any]


def recognise(row: Mapping[str, Any]) -> str | None:
    root = row.get("prompt")
    fits = isinstance(root, dict) and "text" in root and ("replies" in root or "message_tree_id" in row)
    return "key prompt is the first message of a tree, with replies" if fits else None


def _id(node: Node) -> str | None:
    name = node.get("message_id")
    return name if isinstance(name, str) and name else None


def _turn(node: Node) -> dict[str, Any]:
    turn = {"role": node.get("role"), "content": node.get("text"), **other_keys(node, "role", "text", "replies")}
    return chat_turns([turn], "message")[0]


def _replies(node: Node) -> list[Node]:
    replies = node.get("replies") or []
    require(replies == [] or is_list(replies, dict), "replies", replies, "a list of messages")
    return replies


def _ranking(path: list[dict[str, Any]], node: Node) -> dict[str, Any] | None:
    """The ranking of the replies to one message; None if fewer than two of them are ranked answers."""
    answers = [reply for reply in _replies(node) if ROLES.get(str(reply.get("role"))) == "assistant"]
    kept = [reply for reply in answers if not reply.get("deleted")]
    if path[-1]["role"] != "user" or sum(reply.get("rank") is not None for reply in kept) < 2:
        return None
    responses, ranks = [], {}
    for i, reply in enumerate(kept):
        name = _id(reply) or f"reply-{i}"
        if not isinstance(reply.get("text"), str):
            raise BadRow("text", f"got {shown(reply.get('text'))} in message {name}, want a string")
        if reply.get("rank") is not None:
            ranks[name] = number(reply["rank"], "rank", f"a number, 0 for the best, in message {name}")
        responses.append(
            answer_of(name, reply, "text", "a string", "text", "model_name", "role", "replies", "message_id")
        )
    left_out = [_id(reply) for reply in answers if reply.get("deleted")]
    return {
        "kind": "ranking",
        "id": _id(node),
        "prompt": path,
        "responses": responses,
        "ranking": ranking_of(ranks, best="lowest"),
        "metadata": {"deleted_replies": left_out} if left_out else {},
    }


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any] | BadRow]:
    """One ranking for every set of ranked siblings, a message before its replies; else one prompt.

    A message that has no text or another role is a BadRow of its own, with all that follows it.
    """
    root: Any = row.get("prompt")
    require(isinstance(root, dict), "prompt", root, "the first message of a tree")
    about = other_keys(row, "prompt")
    yielded = False
    left: list[tuple[list[dict[str, Any]], Node]] = [([], root)]  # (turns above, message); a stack: trees may be deep
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


FORMAT = Format(
    "oasst",
    "key prompt with the first message of a tree: text, role and replies",
    recognise,
    convert,
)

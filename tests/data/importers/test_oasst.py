"""Message trees: every set of ranked siblings is one ranking."""

import copy

import pytest

from rlhf.data.importers import SourceInfo, import_source, load_all
from rlhf.data.reading.readers import Reject
from rlhf.data.reading.sources import Source
from rlhf.errors import UserError
from tests.data.importers.samples import OASST


def turns(record):
    return [(message.role, message.content) for message in record.prompt]


def reply(name, rank, *replies, text=None, role="assistant", **more):
    return {"message_id": name, "text": text or name, "role": role, "rank": rank, "replies": list(replies), **more}


def tree(*replies):
    return {
        "message_tree_id": "t",
        "prompt": {"message_id": "t", "text": "Hi", "role": "prompter", "replies": list(replies)},
    }


def test_a_tree_gives_a_ranking_for_each_set_of_ranked_siblings(load):
    first, second = load("oasst", OASST)
    assert turns(first) == [("user", "Name a colour.")] and first.id == "m-0"
    assert [response.id for response in first.responses] == ["m-1", "m-2", "m-3"]
    assert first.ranking == [["m-2"], ["m-1"]] and first.ranks() == [1, 0, -1]  # m-3 has no rank
    assert first.responses[0].policy == "m-x" and first.responses[0].metadata == {"parent_id": "m-0", "rank": 1}
    assert first.metadata == {"message_tree_id": "m-0", "tree_state": "ready_for_export"}
    assert first.prompt[0].model_extra == {"message_id": "m-0", "lang": "en"}
    assert turns(second) == [("user", "Name a colour."), ("assistant", "Red."), ("user", "Another?")]
    assert second.ranking == [["m-5", "m-6"]] and second.id == "m-4"


def test_replies_without_a_rank_stand_outside_of_the_order(load):
    row = tree(
        reply("a", 0),
        reply("b", 1, deleted=True),
        reply("c", 2, reply("d", None, reply("e", None), reply("f", None), role="prompter")),
        reply("g", None),
    )
    [record] = load("oasst", row)  # e and f have no rank: no ranking of them
    assert [response.id for response in record.responses] == ["a", "c", "g"]
    assert record.ranking == [["a"], ["c"]] and record.metadata["deleted_replies"] == ["b"]


def test_one_ranked_reply_is_no_order_and_the_tree_a_prompt(load):
    [record] = load("oasst", tree(reply("a", 0), reply("b", None)))
    assert record.kind == "prompt" and turns(record) == [("user", "Hi")] and record.id == "t"


def test_a_deep_tree(load):
    node = reply("x", None)
    for i in range(120):
        node = reply(f"n{i}", 0, node, role="prompter" if i % 2 == 0 else "assistant")
    [record] = load("oasst", tree(node, reply("y", 1)))
    assert record.ranking == [["n119"], ["y"]]


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"role": "bot"}, "message.0.role", "got 'bot', want system, user (human) or assistant (gpt): remove the row"),
        ({"text": None}, "text", "got None in message m-1, want a string"),
        ({"rank": "first"}, "rank", "got 'first', want a number, 0 for the best, in message m-1"),
        ({"replies": 3}, "replies", "got 3, want a list of messages"),
    ],
)
def test_a_bad_message_does_not_take_the_rest_of_the_tree_with_it(write_jsonl, change, field, message):
    bad = copy.deepcopy(OASST)
    bad["prompt"]["replies"][0] |= change
    bad["prompt"]["replies"] += [
        reply("m-7", 2),
        reply("m-8", None, reply("u", None, reply("v", 1), reply("w", 0), role="prompter")),
    ]
    path = write_jsonl([bad])
    made = list(import_source(Source(str(path), path), "auto", SourceInfo()))
    assert [(one.field, one.message) for one in made if isinstance(one, Reject)] == [(field, f"{field}: {message}")]
    of_siblings = change.keys() & {"text", "rank"}  # then the set of siblings is lost, with all below it
    assert ("u" in [one.id for one in made if not isinstance(one, Reject)]) == (not of_siblings)


def test_a_root_that_is_no_message_is_a_reject(rejects):
    assert rejects("oasst", OASST, {"prompt": "Hi"}) == [
        ("prompt", "prompt: got 'Hi', want the first message of a tree")
    ]


def test_flat_messages_are_told_to_come_as_trees(write_jsonl):
    row = {"message_id": "m", "parent_id": None, "text": "Hi", "role": "prompter", "rank": None}
    with pytest.raises(UserError, match=r"The nearest formats are oasst: .*take the file of trees"):
        load_all(write_jsonl([row]))

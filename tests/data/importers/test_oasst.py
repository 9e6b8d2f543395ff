"""Message trees and flat messages, of which every set of ranked siblings is one ranking; Argilla's exports."""

import copy
import gzip
import json
from itertools import zip_longest

import pyarrow
import pytest
from pyarrow import parquet
from pydantic import BaseModel

from rlhf.data.reading import load_all
from rlhf.errors import UserError
from tests.data.importers.samples import ARGILLA_1, ARGILLA_2, OASST, USER, answer, turns


def reply(name, rank, *replies, text=None, role="assistant", **more):
    return {"message_id": name, "text": text or name, "role": role, "rank": rank, "replies": list(replies), **more}


def tree(*replies):
    prompt = {"message_id": "t", "text": "Hi", "role": "prompter", "replies": list(replies)}
    return {"message_tree_id": "t", "prompt": prompt}


def test_a_tree_gives_a_ranking_for_each_set_of_ranked_siblings(load):
    first, second = load("oasst", OASST)
    assert turns(first) == [("user", "Name a colour.")] and first.id == "m-0"
    assert [response.id for response in first.responses] == ["m-1", "m-2", "m-3"]
    assert first.ranking == [["m-2"], ["m-1"]] and first.ranks() == [1, 0, -1]  # m-3 has no rank
    assert first.responses[0].policy == "m-x" and first.responses[0].metadata == {"parent_id": "m-0", "rank": 1}
    assert first.metadata == {"message_tree_id": "m-0", "tree_state": "ready_for_export", "group": "m-0"}
    assert first.prompt[0].model_extra == {"message_id": "m-0", "lang": "en"}
    assert turns(second) == [("user", "Name a colour."), ("assistant", "Red."), ("user", "Another?")]
    assert second.ranking == [["m-5", "m-6"]] and second.id == "m-4"


def test_replies_without_a_rank_are_unranked(load):
    # e and f have no rank: no ranking of them
    asked = reply("d", None, reply("e", None), reply("f", None), role="prompter")
    [record] = load("oasst", tree(reply("a", 0), reply("b", 1, deleted=True), reply("c", 2, asked), reply("g", None)))
    assert [response.id for response in record.responses] == ["a", "c", "g"]
    assert record.ranking == [["a"], ["c"]] and record.metadata["deleted_replies"] == ["b"]


def flat(row):
    """The messages of a tree as rows, each before its replies, as OpenAssistant publishes them."""
    about = {key: value for key, value in row.items() if key != "prompt"}
    rows, waiting = [], [row["prompt"]]
    while waiting:
        node = waiting.pop()
        rows.append({"parent_id": None, "rank": None, "user_id": "u", **about, **node})
        waiting += reversed(rows[-1].pop("replies", []))
    return rows


def linked(row):
    """A tree in which each message names the one that it answers."""
    row = copy.deepcopy(row)
    nodes = [row["prompt"]]
    for node in nodes:
        for one in node.get("replies", []):
            one["parent_id"] = node["message_id"]
            nodes.append(one)
    return row


TREES = [
    linked(OASST),
    linked(tree(reply("a", 0, reply("b", None, reply("c", 1), reply("d", 0), role="prompter")), reply("e", 1))),
]
COLUMNS = ["message_tree_id", "message_id", "parent_id", "text", "role", "lang", "user_id", "tree_state", "model_name"]
KINDS = dict.fromkeys(COLUMNS, pyarrow.string()) | {"rank": pyarrow.int64(), "deleted": pyarrow.bool_()}


def plain(value):
    """A record as plain values, without columns that only the messages have; null is as good as absent."""
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key not in ("user_id", "deleted") and one is not None}
    return [plain(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("packed", ["jsonl", "jsonl.gz", "parquet"])
def test_flat_messages_are_the_records_of_their_trees(tmp_path, write_jsonl, packed):
    wanted, _ = load_all(write_jsonl(TREES))
    rows = [row for pair in zip_longest(*map(flat, TREES)) for row in pair if row is not None]  # of both in turns
    path = tmp_path / f"flat.{packed}"
    rows = [row | {"deleted": False} for row in rows]
    table = pyarrow.Table.from_pylist(rows, pyarrow.schema(KINDS))
    if packed == "parquet":
        parquet.write_table(table, path)
    else:
        write = gzip.open if packed.endswith("gz") else open
        with write(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    records, info = load_all(path)
    assert info[0].format == "oasst_messages" and sum(file.rows for file in info) == 2
    assert plain(records) == plain(wanted)
    with pytest.raises(UserError, match=r"1 of 2 rows cannot be used.*:2: got 3, want an object"):
        load_all(write_jsonl([*flat(tree()), 3], "damaged.jsonl"))


TWO = {"prompt": "Hi", "response-1": "a", "response-2": "b"}
THREE = TWO | {"response-3": "c"}


def row(fields, **answers):
    """A record with one annotator's answers."""
    values = {question.replace("_", "-"): [{"value": value, "user_id": "u"}] for question, value in answers.items()}
    return {"fields": fields, "responses": values}


def test_rankings_of_several_annotators_and_ratings_of_one_response(load):
    first, second = load("argilla", ARGILLA_1)
    assert turns(first) == turns(second) == [("user", "Name a colour.")]
    assert {one.id: one.text for one in first.responses} == {"response-1": "Blue.", "response-2": "Tree."}
    assert first.ranking == [["response-1"], ["response-2"]] and first.labeler == "u-1"
    assert second.ranking == [["response-2"], ["response-1"]] and second.labeler == "u-2"
    assert (first.id, second.id) == ("rec-1.0", "rec-1.1")
    assert first.metadata["question"] == "ranking" and first.metadata["answers"]["comment"] == "Easy."
    assert first.metadata["record"] == {"metadata": {"batch": 3}}
    assert first.metadata["left_out"] == {"u-3": {"comment": "Hm."}}
    first, second = load("argilla", ARGILLA_2)
    assert first.ratings == {"response": 5} and first.flags == {} and first.labeler == "u-1"
    assert second.ratings == {"response": 2} and second.flags == {"response": ["too short"]}
    assert first.metadata["record"]["suggestions"] == {"quality": {"value": 3, "score": None, "agent": "m-1"}}
    assert first.pair_list() == [] and first.ranking is None


@pytest.mark.parametrize(("fields", "answers", "judged"), [
    (TWO, {"rank": ["response-2", "response-1"]}, {"ranking": [["response-2"], ["response-1"]]}),
    # the best of three says nothing about the others
    (THREE, {"label": "response-2"}, {"pairs": [["response-2", "response-1"], ["response-2", "response-3"]]}),
    (TWO, {"preferred": 2}, {"ranking": [["response-2"], ["response-1"]]}),
    (TWO, {"rating_1": 3, "rating_2": 6}, {"ratings": {"response-1": 3, "response-2": 6}}),
    (TWO, {"Rating A": 3, "Rating B": 6}, {"ratings": {"response-1": 3, "response-2": 6}}),
    ({"prompt": "p", "Response-1": "a", "Response-2": "b"},
     {"response_1_is": 3, "response_2_is": 6}, {"ratings": {"Response-1": 3, "Response-2": 6}}),
    ({"prompt": "p", "response_0": "a", "response_1": "b"},
     {"rating_0": 3, "rating_1": 6}, {"ratings": {"response_0": 3, "response_1": 6}}),
    ({"prompt": "p", "response": "a", "response_2": "b"},
     {"rank": ["response_2", "response"]}, {"ranking": [["response_2"], ["response"]]}),
    # outside of 1 to 7: the order only
    (TWO, {"score_1": 10, "score_2": 0}, {"ranking": [["response-1"], ["response-2"]], "ratings": {}}),
])  # fmt: skip
def test_what_orders_several_responses(load, fields, answers, judged):
    [record] = load("argilla", row(fields, **answers))
    for key, value in judged.items():
        assert getattr(record, key) == value


def test_chats_and_what_annotators_wrote_are_demonstrations(load):
    chat = [USER, answer("Blue."), USER]
    [record] = load("argilla", row({"chat": chat, "response_a": "x", "response_b": "y", "note": "n"}, label="a"))
    assert turns(record) == [("user", "Name a colour."), ("assistant", "Blue."), ("user", "Name a colour.")]
    assert record.ranking == [["response_a"], ["response_b"]] and record.metadata["fields"] == {"note": "n"}
    [record] = load("argilla", row({"chat": chat[:2]}, rating=7))
    assert turns(record) == [("user", "Name a colour.")] and record.ratings == {"chat": 7}
    assert record.responses[0].text == "Blue."
    [record] = load("argilla", row({"instruction": "Sum up.", "input": " A text. "}, answer="Short.", level="easy"))
    assert record.kind == "demonstration" and turns(record) == [("user", "Sum up.\n\n A text. ")]
    assert record.response == "Short." and record.labeler == "u" and record.metadata["question"] == "answer"


def test_a_comment_is_no_second_ranking(load):
    [record] = load("argilla", row(TWO, preference="response-2", comment="response-1 is wrong about the date"))
    assert record.ranking == [["response-2"], ["response-1"]]

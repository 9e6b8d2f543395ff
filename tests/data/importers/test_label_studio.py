"""Label Studio: exports that a real server wrote come back as what the labelers meant; foreign tasks; bad rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.formats.shapes import BadRow
from rlhf.data.inputs import RECORD_SUFFIXES, resolve_sources
from rlhf.data.reading import FORMATS
from rlhf.data.records import Ranking
from rlhf.data.rows import read_rows

FIXTURES = Path(__file__).parents[1] / "fixtures" / "label_studio"


def rows_of(path: Path) -> list[dict[str, Any]]:
    found = [row for source in resolve_sources(str(path), RECORD_SUFFIXES) for row in read_rows(source)]
    assert not any(row.problem for row in found)
    return [row.value for row in found]


def convert(row: dict[str, Any]) -> list[Ranking]:
    made = ({k: v for k, v in values.items() if v is not None} for values in FORMATS["label_studio"].convert(row))
    return [Ranking.model_validate({"id": "none"} | values) for values in made]


def meant(folder: Path) -> dict[tuple[str, str], dict[frozenset[str], str | None]]:
    """{(item, labeler): {pair of ids: the better one, None where equal}}, from what the labelers wrote down."""
    found: dict[tuple[str, str], dict[frozenset[str], str | None]] = {}
    for line in (folder / "intended.jsonl").read_text().splitlines():
        one = json.loads(line)
        pairs = found.setdefault((one["item"], str(one["labeler_id"])), {})
        if "ranking" in one:
            order = [tie[0] for tie in one["ranking"]]
            pairs |= {frozenset((a, b)): a for i, a in enumerate(order) for b in order[i + 1 :]}
        elif "equal" in one:
            pairs[frozenset(one["equal"])] = None
        else:
            pairs[frozenset((one["better"], one["worse"]))] = one["better"]
    return found


def said(record: Ranking) -> dict[frozenset[str], str | None]:
    """The same of an imported record; ties beside `pairs` stand in its metadata."""
    ids = [response.id for response in record.responses]
    pairs: dict[frozenset[str], str | None] = {frozenset((ids[i], ids[j])): ids[i] for i, j in record.pair_list()}
    for tie in record.ranking or record.metadata.get("ties", []):
        pairs |= {frozenset((a, b)): None for i, a in enumerate(tie) for b in tie[i + 1 :]}
    return pairs


@pytest.mark.parametrize("interface", ["pairwise", "ranker"])
def test_an_export_of_the_server_comes_back_as_what_the_labelers_meant(interface, imported):
    folder = FIXTURES / interface
    intended = meant(folder)
    records, _, _ = imported(folder / "export.json")
    assert sorted((r.metadata["item"], r.labeler) for r in records) == sorted(intended)
    # Three labelers of six items; the ranker's third skipped the first, and so gave five.
    assert len(records) == {"pairwise": 18, "ranker": 17}[interface]
    more = 0
    for record in records:
        judged, got = intended[record.metadata["item"], record.labeler], said(record)
        assert {pair: got.get(pair, "nothing") for pair in judged} == judged
        more += len(got) - len(judged)
    assert more <= (interface == "pairwise")  # the pair that was skipped may follow from the two others
    shown: dict[str, dict[str, str]] = {}
    for task in json.loads((folder / "tasks.json").read_text()):
        data = task["data"]
        texts = {response["id"]: response["body"] for response in data.get("responses", ())}  # of the ranker
        shown.setdefault(data["item"], {}).update(
            texts or {data[f"{side}_id"]: data[side] for side in ("left", "right")}
        )
    for record in records:
        assert {r.id: r.text for r in record.responses} == shown[record.metadata["item"]]
        assert {r.policy for r in record.responses} == {f"small/sft@{record.metadata['item'].split('@')[1]}"}
        assert all(isinstance(r.metadata["ended"], bool) for r in record.responses)
        assert record.metadata["split"] == "train" and record.metadata["prompt_id"] in record.metadata["item"]
        assert record.prompt[0].content == record.metadata["gold"]["prompt"]
        assert record.seconds is not None and record.seconds > 4 and record.created is not None


def test_a_skipped_task_is_no_judgement_and_is_remembered():
    rows = rows_of(FIXTURES / "ranker" / "export.json")
    records = [convert(row) for row in rows]
    assert [len(r) for r in records] == [2, 3, 3, 3, 3, 3]
    assert [r.metadata.get("skipped_by") for r in records[0]] == [["4"], ["4"]]
    assert not any("skipped_by" in r.metadata for several in records[1:] for r in several)


def test_a_circle_of_pairs_is_a_reject_spelled_out(tmp_path, imported):
    rows = rows_of(FIXTURES / "pairwise" / "export.json")[3:6]  # the three pairs of the second item
    for row in rows:
        data = row["data"]
        better = {"ab": "a", "bc": "b", "ac": "c"}["".join(sorted(data["left_id"] + data["right_id"]))]
        selected = "left" if data["left_id"] == better else "right"
        value = {"from_name": "better", "to_name": "better", "type": "pairwise", "value": {"selected": selected}}
        row["annotations"] = [row["annotations"][0] | {"result": [value]}]
    path = tmp_path / "cycle.json"
    path.write_text(json.dumps(rows))
    records, rejects, _ = imported(path)
    assert len(rejects) == 3 and all("a over b over c over a" in one["message"] for one in rejects) and not records


def test_ratings_flags_and_a_choice_between_two():
    rows = rows_of(FIXTURES / "ratings" / "export.json")
    first, second, third = (convert(row) for row in rows[:3])
    assert [r.ranking for r in first] == [[["answer1"], ["answer2"]]] * 2
    assert first[0].ratings == {"answer1": 6, "answer2": 2} and first[1].ratings == {}
    assert first[0].metadata["results"] == {"comment": [{"text": ["The second one is wrong."]}]}
    assert first[0].metadata["data"] == {"source_id": "q0"}
    assert [r.ranking for r in second] == [[["answer2"], ["answer1"]], [["answer1", "answer2"]]]
    assert second[0].flags == {"answer2": ["harmful", "off topic"]}
    assert second[0].prompt[0].content == "Name a <b>bold</b> bird."
    assert second[0].responses[1].text == "<script>alert(1)</script> A hawk."
    # Two ratings of 4 and no choice: a tie. The other annotator skipped the task.
    assert [r.ranking for r in third] == [[["answer1", "answer2"]]] and third[0].metadata["skipped_by"] == ["3"]
    with pytest.raises(BadRow, match="got 2 that were skipped or judge nothing, want a ranking"):
        convert(rows[3])


TWO = {"prompt": "Which?", "answer1": "One.", "answer2": "Two."}
MANY = {"prompt": "Which?", "responses": [{"id": n, "body": n.upper()} for n in "abc"]}


def result(kind: str, value: Any, name: str = "control", to: str = "prompt") -> dict[str, Any]:
    return {"type": kind, "from_name": name, "to_name": to, "value": value}


def task(data: dict[str, Any], *results: Any, **more: Any) -> dict[str, Any]:
    return {"data": data, "annotations": [{"completed_by": 7, "result": list(results)} | more]}


def test_who_judged_when_and_for_how_long():
    who = {"completed_by": {"id": 3, "email": "annotator-3@example.com"}, "lead_time": 12, "unique_id": "u-1"}
    [record] = convert(task(TWO, result("pairwise", {"selected": "left"}), created_at="2026-05-01T10:00:00Z", **who))
    assert (record.id, record.labeler, record.seconds) == ("u-1", "annotator-3@example.com", 12)
    assert record.created == "2026-05-01T10:00:00Z"


@pytest.mark.parametrize("control", ["control", "preference", "q1", "comparison_a"])
@pytest.mark.parametrize(("choice", "ranking"), [
    ("A", [["answer1"], ["answer2"]]), ("answer2", [["answer2"], ["answer1"]]),
    ("Response 2 is better", [["answer2"], ["answer1"]]), ("right", [["answer2"], ["answer1"]]),
    ("equally good", [["answer1", "answer2"]]), ("no preference", [["answer1", "answer2"]]),
])  # fmt: skip
def test_a_choice_between_two_whatever_its_controls_name(choice, ranking, control):
    [record] = convert(task(TWO, result("choices", {"choices": [choice]}, control)))
    assert record.ranking == ranking and not record.flags


def test_a_number_of_a_scale_is_no_verdict():
    [named] = convert(task(TWO, result("choices", {"choices": ["2"]}, "preference")))
    assert named.ranking == [["answer2"], ["answer1"]]
    pairwise = result("pairwise", {"selected": "left"}, "compare", "answer1,answer2")
    [record] = convert(task(TWO, pairwise, result("choices", {"choices": ["2"]}, "difficulty")))
    assert record.ranking == [["answer1"], ["answer2"]]


def test_a_ranker_orders_a_list():
    [record] = convert(task(MANY, result("ranker", {"ranker": {"rank": ["c", "a"]}}, "rank", "items")))
    assert record.ranking == [["c"], ["a"]] and record.ranks() == [1, -1, 0]
    with pytest.raises(BadRow, match="want a ranking"):  # an export gives buckets no order
        convert(task(MANY, result("ranker", {"ranker": {"good": ["c"], "bad": ["b"]}}, "rank")))


@pytest.mark.parametrize(("data", "ids"), [
    ({"question": "Q", "response_a": "x", "response_b": "y"}, ["response_a", "response_b"]),
    ({"prompt": "Q", "answer10": "z", "answer1": "x", "answer2": "y"}, ["answer1", "answer2", "answer10"]),
    ({"prompt": "Q", "responses": ["x", "y", "z"]}, ["1", "2", "3"]),
    ({"prompt": "Q", "responses": [{"id": "m", "body": "x"}, {"id": 5, "text": "y"}]}, ["m", "5"]),
    ({"instruction": [{"role": "user", "content": "Q"}], "answer": "x"}, ["answer"]),
])  # fmt: skip
def test_the_keys_of_a_foreign_task(data, ids):
    [record] = convert({"data": data, "annotations": []})
    assert record.prompt[-1].content == "Q"
    assert [(r.id, r.text) for r in record.responses] == list(zip(ids, "xyz", strict=False))


@pytest.mark.parametrize(("row", "message"), [
    (task(TWO, result("pairwise", {"selected": "middle"})), "value.selected: got 'middle', want left or right"),
    (task(TWO, result("choices", {"choices": "bad"}, "answer1")), "value.choices: got 'bad', want a list of strings"),
    (task(TWO, result("pairwise", {"selected": "left"}), was_cancelled=True), "got 1 that were skipped or judge nothing"),
    ({"data": {"image": "x.png"}, "annotations": []}, "got the keys ['image'], found no responses"),
    ({"data": {"answer1": "x", "answer2": "y"}, "annotations": []}, "got the keys ['answer1', 'answer2'], found no prompt"),
])  # fmt: skip
def test_a_bad_row_says_what_came_and_what_was_wanted(row, message):
    with pytest.raises(BadRow) as caught:
        convert(row)
    assert message in caught.value.message

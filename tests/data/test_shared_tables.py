"""Real tables in ../shared/data as `format=table`, if present; the expected values are counted here from the bytes."""

import gzip
import json

TABLE = ["format=table", "duplicates=keep", "filter_prefixes=false"]
OPEN_INSTRUCT = [
    "columns.prompt=prompt", "columns.responses=[completion_a,completion_b]", "columns.winner=preference",
    "columns.labeler=evaluator", "columns.created=timestamp", "columns.id=id",
]  # fmt: skip
PANDALM = [
    "columns.prompt=[instruction,input]",
    "columns.responses=[response1,response2]",
    "columns.winner=[annotator1,annotator2,annotator3]",
]


def read_json(path):
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def test_pandalm(shared_data, imported):
    records, rejects, report = imported(shared_data / "comparisons/pandalm-999x3-annotators.json", *TABLE, *PANDALM)
    items = read_json(shared_data / "comparisons/pandalm-999x3-annotators.json")
    assert len(items) == 999 and len(records) == 2997 and not rejects
    said = {"0": [["a", "b"]], "1": [["a"], ["b"]], "2": [["b"], ["a"]]}
    for labeler in ("annotator1", "annotator2", "annotator3"):
        mine = {one.metadata["idx"]: one for one in records if one.labeler == labeler}
        assert all(mine[item["idx"]].ranking == said[str(item[labeler])] for item in items)
        assert all(mine[item["idx"]].responses[1].text == str(item["response2"]) for item in items)
    ties = sum(item[name] == 0 for item in items for name in ("annotator1", "annotator2", "annotator3"))
    assert sum(one.ranking == [["a", "b"]] for one in records) == ties == 97 + 116 + 113
    assert report["agreement"]["items"] > 800


def test_the_spreadsheet_of_annotations(shared_data, imported):
    """1302 rows below the header: 1150 with a judgement, and 152 at the end that hold formatted cells and nothing else."""
    records, rejects, report = imported(
        shared_data / "labels/open-instruct-annotations-1302.xlsx", *TABLE, *OPEN_INSTRUCT
    )
    assert report["counts"] == {"input": 1302, "accepted": 1150, "duplicates": 0, "filtered": 0, "rejected": 152}
    assert [one["line"] for one in rejects] == list(range(1152, 1304))  # the header is line 1
    assert {one["field"] for one in rejects} == {"preference"}
    said = {"a-is-better", "a-is-slightly-better", "tie", "b-is-slightly-better", "b-is-better"}
    assert {one.metadata["preference_scale"] for one in records} == said
    orders = {"a": [["a"], ["b"]], "b": [["b"], ["a"]], "t": [["a", "b"]]}
    assert all(one.ranking == orders[one.metadata["preference_scale"][0]] for one in records)
    assert len({one.labeler for one in records}) == 16
    assert min(one.created for one in records).startswith("2023-05-")

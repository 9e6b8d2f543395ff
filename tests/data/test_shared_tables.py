"""Real tables in ../shared/data as `format=table`, where present; what is expected is counted from the bytes here."""

import gzip
import json
import re
import zipfile
from xml.etree import ElementTree

import pytest

from rlhf.config.compose import compose_config
from rlhf.data.importer import Importer
from rlhf.data.inputs import RECORD_SUFFIXES, resolve_sources
from rlhf.data.splits import Assignments
from rlhf.data.storage import read_records

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


@pytest.fixture
def imported(shared_data, tmp_path):
    """What the import of one file gives: (records, rejects, report)."""

    def run(name, *overrides):
        given = [f"path={shared_data / name}", f"out={tmp_path / 'out'}", "format=table", "duplicates=keep", *overrides]
        config = compose_config([*given, "filter_prefixes=false"], "import")
        (tmp_path / "out").mkdir()
        importer = Importer(config, tmp_path / "out", Assignments(), lambda done: None)
        report = importer.run(resolve_sources(config.path, RECORD_SUFFIXES))
        rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
        return list(read_records(tmp_path / "out")), rejects, report

    return run


def test_pandalm(shared_data, imported):
    records, rejects, report = imported("comparisons/pandalm-999x3-annotators.json", *PANDALM)
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


def shared_rows(path):
    """The rows of a workbook's only sheet, from its XML: lists of the text of the cells that have a value."""
    space = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
    with zipfile.ZipFile(path) as packed:
        strings = [
            "".join(t.text or "" for t in one.iter(f"{space}t"))
            for one in ElementTree.fromstring(packed.read("xl/sharedStrings.xml"))
        ]
        rows = list(ElementTree.fromstring(packed.read("xl/worksheets/sheet1.xml")).iter(f"{space}row"))
    found = []
    for one in rows:
        cells = {}
        for cell in one.iter(f"{space}c"):
            value = cell.find(f"{space}v")
            if value is not None:
                text = strings[int(value.text)] if cell.get("t") == "s" else value.text
                cells[re.sub(r"\d", "", cell.get("r"))] = text
        found.append(cells)
    return found


def test_the_spreadsheet_of_annotations(shared_data, imported):
    """1302 rows below the header: 1150 with a judgement, and 152 at the end that hold formatted cells and nothing else."""
    name = "labels/open-instruct-annotations-1302.xlsx"
    header, *rows = shared_rows(shared_data / name)
    column = {title: letter for letter, title in header.items()}
    judged = [one for one in rows if column["preference"] in one]
    assert (len(rows), len(judged)) == (1302, 1150) and not any(rows[1150:])
    records, rejects, report = imported(name, *OPEN_INSTRUCT)
    assert report["counts"] == {"input": 1302, "accepted": 1150, "duplicates": 0, "filtered": 0, "rejected": 152}
    assert [one["line"] for one in rejects] == list(range(1152, 1304))  # the header is line 1
    assert {one["field"] for one in rejects} == {"preference"}
    assert {one.metadata["preference_scale"] for one in records} == {
        "a-is-better",
        "a-is-slightly-better",
        "tie",
        "b-is-slightly-better",
        "b-is-better",
    }
    by_id = {one.id: one for one in records}
    for one in judged:
        made = by_id[str(int(float(one["A"])))]
        word = one[column["preference"]]
        assert made.metadata["preference_scale"] == word
        assert made.ranking == ([["a", "b"]] if word == "tie" else [["a"], ["b"]] if word[0] == "a" else [["b"], ["a"]])
        assert made.labeler == one[column["evaluator"]]
        assert made.metadata["completion_a_is_acceptable"] == one[column["completion_a_is_acceptable"]]
    assert len({one.labeler for one in records}) == 16
    assert min(one.created for one in records).startswith("2023-05-")

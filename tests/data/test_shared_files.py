"""The real files in ../shared/data, if present; each behaviour is also covered on small data elsewhere.

The expected counts are stated by hand or counted here from the raw JSON, never taken from the importer.
"""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlhf.commands import import_data
from rlhf.config.commands import ImportConfig
from rlhf.data.reading import FORMATS


class Expected(NamedTuple):
    """What becomes of a file with `format=auto`."""

    file: str
    format: str
    rows: int
    kind: str
    records: int  # before duplicates are dropped
    duplicates: int = 0


# None of these files has a bad row: none has a blank answer, a null judgement or an odd role.
# Files whose columns the user must name, spreadsheets and exports of labelling tools have tests of their own.
FILES = [
    Expected("comparisons/hh-harmless-first-1500.jsonl.gz", "hh", 1500, "ranking", 1500),
    Expected("comparisons/hh-helpful-2352-dsp.json.gz", "hh", 2352, "ranking", 2352),
    Expected("comparisons/qa-feedback-500x4.json.gz", "qa_feedback", 500, "ranking", 500),
    Expected("comparisons/oasst-trees-100.jsonl", "oasst", 100, "ranking", 212),
    Expected("comparisons/dpo-sharegpt-300.json.gz", "sharegpt", 300, "ranking", 300, 5),
    Expected("comparisons/kto-300.json", "kto", 300, "ranking", 300),
    Expected("comparisons/stack_exchange_paired_tiny.json", "pairs", 25, "ranking", 25),
    Expected("comparisons/dummy-dpo.jsonl", "pairs", 100, "ranking", 100, 96),
    Expected("demonstrations/alpaca-en-999.json", "alpaca", 999, "demonstration", 999, 14),
    Expected("demonstrations/alpaca-zh-1000.json", "alpaca", 1000, "demonstration", 1000, 8),
    Expected("demonstrations/messages-500.jsonl", "messages", 500, "demonstration", 500, 1),
    Expected("demonstrations/sharegpt-500.json", "sharegpt", 500, "demonstration", 500),
    Expected("demonstrations/gpteacher-roleplay-1923.json.gz", "alpaca", 1923, "demonstration", 1923),
    Expected("demonstrations/gsm8k-train-7473.jsonl.gz", "question_answer", 7473, "demonstration", 7473),
    Expected("demonstrations/dolly-6400-no-context.jsonl.gz", "decoded", 6400, "demonstration", 6400, 3),
    Expected("demonstrations/self-instruct-seed-175.jsonl", "self_instruct", 175, "demonstration", 175),
    Expected("prompts/mt-bench-80.jsonl", "mt_bench", 80, "prompt", 80),
]  # fmt: skip
NOT_THE_TEXT = ("id", "decoded")  # keys that do not make two rows different judgements or demonstrations


def raw_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without the readers under test."""
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    if ".jsonl" in path.name:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    return json.loads(text)


@pytest.mark.parametrize("expected", FILES, ids=[expected.file for expected in FILES])
def test_what_becomes_of_a_file(shared_data, tmp_path, capsys, expected):
    path = shared_data / expected.file
    rows = raw_rows(path)
    texts = [json.dumps({k: v for k, v in row.items() if k not in NOT_THE_TEXT}) for row in rows]
    assert (len(rows), len(rows) - len(set(texts))) == (expected.rows, expected.duplicates)

    import_data.run(ImportConfig(path=str(path), out=str(tmp_path / "out")))
    assert f"{expected.format} ({FORMATS[expected.format].wants}" in capsys.readouterr().out
    report = json.loads((tmp_path / "out/report.json").read_text())
    [file] = report["files"]
    assert file["format"] == expected.format
    counts = report["counts"]
    assert counts["input"] == counts["accepted"] + counts["duplicates"] == expected.rows
    assert counts["duplicates"] == expected.duplicates and counts["rejected"] == counts["filtered"] == 0
    kept = expected.records - expected.duplicates
    assert {kind: sum(splits.values()) for kind, splits in report["records"].items()} == {expected.kind: kept}


def test_every_file_without_columns_to_name_is_in_the_table(shared_data):
    folders = ("comparisons", "demonstrations", "prompts")
    here = {f"{folder}/{path.name}" for folder in folders for path in (shared_data / folder).iterdir()}
    named_columns = {"comparisons/pandalm-999x3-annotators.json", "comparisons/alpaca-eval-annotations-805.json.gz"}
    assert here - named_columns == {expected.file for expected in FILES}


TABLE = ["format=table", "duplicates=keep", "filter_prefixes=false"]
OPEN_INSTRUCT = [
    "columns.prompt=prompt", "columns.responses=[completion_a,completion_b]", "columns.winner=preference",
    "columns.labeler=evaluator", "columns.created=timestamp", "columns.id=id",
]  # fmt: skip


def test_the_spreadsheet_of_annotations(shared_data, imported):
    """1150 rows with a judgement; 152 at the end that hold formatted cells and nothing else are none."""
    records, _, report = imported(shared_data / "labels/open-instruct-annotations-1302.xlsx", *TABLE, *OPEN_INSTRUCT)
    assert report["counts"] == {"input": 1150, "accepted": 1150, "duplicates": 0, "filtered": 0, "rejected": 0}
    said = {"a-is-better", "a-is-slightly-better", "tie", "b-is-slightly-better", "b-is-better"}
    assert {one.metadata["preference_scale"] for one in records} == said
    orders = {"a": [["a"], ["b"]], "b": [["b"], ["a"]], "t": [["a", "b"]]}
    assert all(one.ranking == orders[one.metadata["preference_scale"][0]] for one in records)
    assert len({one.labeler for one in records}) == 16
    assert min(one.created for one in records).startswith("2023-05-")

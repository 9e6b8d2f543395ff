"""The notebooks of docs/notebooks: small, with outputs, without traces of the machine that ran them; a long test runs them."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
IN_ORDER = ("gold_world.ipynb", "reading_a_run.ipynb")


def cells(name: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads((FOLDER / name).read_text())["cells"] if cell["cell_type"] == "code"]


def test_every_notebook_is_listed():
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(IN_ORDER)


@pytest.mark.parametrize("name", IN_ORDER)
def test_outputs_are_there_and_small(name):
    whole = json.loads((FOLDER / name).read_text())
    assert set(whole["metadata"]) == {"kernelspec", "language_info"}
    for number, cell in enumerate(cells(name), start=1):
        assert cell["execution_count"] == number and cell["metadata"] == {}
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"]
    assert any(cell["outputs"] for cell in cells(name))
    text = (FOLDER / name).read_text()
    assert len(text) < 100_000
    assert not re.findall(r"(?:^|[\s\"'(=])/\w+/\w+", text)  # no absolute path: it would name the machine that ran them


@pytest.mark.long
def test_they_run(tmp_path):
    execute = runpy.run_path(str(ROOT / "scripts" / "run_notebooks.py"))["execute"]
    for name in IN_ORDER:
        execute(name, tmp_path)
    results = json.loads((tmp_path / "runs/five-minutes/evaluate/results.json").read_text())
    assert 0 < results["gold"]["win_rate_vs_sft"]["value"] < 1

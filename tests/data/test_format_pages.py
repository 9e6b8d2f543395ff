"""data/README.md and docs/importing.md are right: good lines import, bad ones give the error that is shown."""

import json
import re
from pathlib import Path

import pytest

from rlhf.commands import import_data
from rlhf.config.compose import compose_config
from rlhf.data.reading import FORMATS, load_all
from rlhf.errors import UserError

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "importing.md").read_text(encoding="utf-8")
GOOD = re.findall(r"^Good:\n\n```json\n(.*?)\n```", README, re.S | re.M)
BAD = re.findall(r"^Bad, [^\n]*\n\n```json\n(.*?)\n```\n\n```text\n(.*?)\n```", README, re.S | re.M)


def run_import(folder: Path, line: str) -> None:
    (folder / "bad.jsonl").write_text(line + "\n", encoding="utf-8")
    import_data.run(compose_config([f"path='{folder / 'bad.jsonl'}'", f"out='{folder / 'imported'}'"], "import"))


def test_there_is_a_good_and_a_bad_line_of_each_kind():
    for lines in (GOOD, [line for line, _ in BAD]):
        assert [json.loads(line)["kind"] for line in lines] == ["demonstration", "ranking", "prompt"]


@pytest.mark.parametrize("line", GOOD, ids=lambda line: json.loads(line)["kind"])
def test_good_lines_import(tmp_path, line):
    run_import(tmp_path, line)
    report = json.loads((tmp_path / "imported" / "report.json").read_text())
    assert report["counts"] == {"input": 1, "accepted": 1, "duplicates": 0, "filtered": 0, "rejected": 0}


@pytest.mark.parametrize(("line", "shown"), BAD, ids=lambda value: value[:24] if value.startswith("{") else "")
def test_bad_lines_get_the_error_that_is_shown(tmp_path, capsys, line, shown):
    with pytest.raises(UserError) as raised:
        run_import(tmp_path, line)
    said = [text for text in capsys.readouterr().out.splitlines() if "reject: " in text]
    said.append(f"rlhf: error: {raised.value}")
    command, *wanted = shown.splitlines()
    assert command == "$ rlhf import path=bad.jsonl out=imported"
    assert [text.replace(f"{tmp_path}/", "") for text in said] == wanted


def test_the_guide_lists_every_format_and_the_one_that_it_adds_works(tmp_path, capsys, monkeypatch):
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", GUIDE, re.M))
    assert listed.keys() == FORMATS.keys()
    assert all(listed[name] == f.wants for name, f in FORMATS.items() if name != "table")
    source = re.search(r"```python\n(.*?)\n```", GUIDE, re.S)
    assert source
    monkeypatch.chdir(tmp_path)
    Path("arena.py").write_text(source[1], encoding="utf-8")
    row = {"asked": "Why?", "left": "So.", "right": "Because.", "won": "right", "judge": 7}
    rows = [row, row | {"won": "left"}]
    Path("arena.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    import_data.run(compose_config(["path=arena.jsonl", "out=imported", "format=arena.py:arena"], "import"))
    assert "import: arena.jsonl: arena.py:arena (asked for): 2 rows, 2 ranking" in capsys.readouterr().out
    with Path("arena.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | {"won": "both"}) + "\n" + json.dumps({"won": "left"}) + "\n")
    with pytest.raises(UserError) as raised:
        load_all("arena.jsonl", "arena.py:arena")
    assert "arena.jsonl:3: won: got 'both', want left or right" in str(raised.value)
    assert "arena.jsonl:4: asked: missing" in str(raised.value)
    records, info = load_all("imported")
    assert [record.ranking for record in records] == [[["right"], ["left"]], [["left"], ["right"]]]
    assert records[0].metadata["judge"] == 7 and info[0].format == "import"
    with pytest.raises(UserError, match=r"format arena\.py:none: cannot be imported"):
        load_all("arena.jsonl", "arena.py:none")

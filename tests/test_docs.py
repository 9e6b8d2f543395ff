"""The documentation names real places: every `name` that links to a file of code is defined there."""

import ast
import difflib
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf import cli
from rlhf.commands import pipeline
from rlhf.config import Config, PlanConfig
from rlhf.config.compose import SCHEMAS
from rlhf.config.removed import EQUIVALENTS
from rlhf.config.setting import settings_in
from rlhf.runs.metric_table import METRICS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("data/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(`?)([^\]`]+)`?\]\(([^)#\s]*)(?:#([^)]*))?\)")


def names_in(path: Path) -> set[str]:
    """Functions, classes and constants at the top of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def anchors_in(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", LINK.sub(r"\2", head).strip().lower())) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    for is_code, text, target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors_in(path), f"{page.name} links to {target}#{anchor}"
        if is_code and path.suffix == ".py" and text.isidentifier():
            assert text in names_in(path), f"{page.name} says that {text} is in {target}"


def test_a_page_on_ppo_names_its_parts_and_questions_are_two_clicks_from_the_first_page():
    links = [text for code, text, *_ in LINK.findall((ROOT / "docs" / "ppo.md").read_text(encoding="utf-8")) if code]
    assert {"one_update", "token_rewards", "gae", "whiten", "policy_loss", "value_loss", "AdaptiveKL"} <= set(links)
    # README is the site's first page. That the links lead to a page and a heading is checked above.
    links = [target for _, _, target, _ in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))]
    assert "docs/questions.md" in links
    rows = re.findall(r"^\| ([^|]+\?) \| (.+) \|$", (ROOT / "docs" / "questions.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 20 and all(LINK.search(answer) for _, answer in rows)


def test_invariants_and_files_that_pages_name_are_in_the_package():
    code = (ROOT / "rlhf" / "ppo" / "update.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "fix_a_run.md").read_text(encoding="utf-8")
    checked = set(re.findall(r"refuse\(\s*(\d)", code))
    assert checked == set(re.findall(r"^\| (\d): ", page, re.MULTILINE)) and len(checked) > 3
    # `rlhf/….py` in any text, but for the stage that docs/new_stage.md adds, and history.
    pages = [(page, page.read_text(encoding="utf-8")) for page in PAGES if page.name != "CHANGELOG.md"]
    named = [(page.name, path) for page, text in pages for path in re.findall(r"\brlhf/[\w\\/]+\.py\b", text)]
    missing = {(page, path) for page, path in named if not (ROOT / path.replace("\\", "")).is_file()}
    assert len(named) > 50 and missing == {("new_stage.md", "rlhf/stages/survey.py")}


def commands_in(page: Path) -> list[str]:
    """The `rlhf …` lines of a page's blocks and tables, continued lines joined, without comments."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^    rlhf \w", text, re.MULTILINE), f"{page.name}: a command is outside of a fenced block"
    blocks = "\n".join(code for language, code in FENCE.findall(text) if language in ("", "sh", "bash", "console"))
    assert not re.search(r"\\[ \t]+$", blocks, re.MULTILINE), f"{page.name}: a blank after a backslash"
    lines = blocks.replace("\\\n", " ").splitlines()
    lines += re.findall(r"^\|[^|]*\| `(rlhf [^`]+)` \|", text, re.MULTILINE)
    parts = [part.strip().removeprefix("$ ") for line in lines for part in re.split(r";|&&", line.partition(" #")[0])]
    return [part for part in parts if re.match(r"rlhf \w", part)]


# Each once.
COMMANDS_OF_PAGES = list(
    {line: (page, line) for page in PAGES if page.name != "CHANGELOG.md" for line in commands_in(page)}.values()
)
assert len(COMMANDS_OF_PAGES) > 60


@pytest.mark.parametrize(("page", "line"), COMMANDS_OF_PAGES, ids=[line[:60] for _, line in COMMANDS_OF_PAGES])
def test_a_documented_command_passes_the_command_lines_checks(page, line, monkeypatch):
    """Everything but the command itself runs: its module is replaced. `…` is the reader's own value, `$s` a number."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", line)
    assert not re.search(r"[\[\]{}*?]", bare), f"{page.name}: zsh would expand this: quote it: {line}"
    absent = re.compile("…|^&$|^plugins=")  # the reader's own values and files
    words = [re.sub(r"\$\w+", "1", word) for word in shlex.split(line)[1:] if not absent.search(word)]
    monkeypatch.setattr(cli, "module_of", lambda command: SimpleNamespace(run=lambda *_: None))
    monkeypatch.setattr(cli, "lend_parents", lambda config: None)  # the runs are not there
    monkeypatch.setattr(pipeline, "run_stage", lambda *_: 0)  # several processes
    cli._dispatch(words)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_settings_that_a_page_names_exist(page):
    """`group.name` outside of Python; the changelog names what is gone."""
    known = {key for schema in (Config, PlanConfig, *SCHEMAS.values()) for key in settings_in(schema)}
    text = re.sub(r"^```python\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"(?<![\w/.-])([a-z]+\.[a-z_]+)(?=[=`\s,\]])", text))
    groups = {key.partition(".")[0] for key in known if "." in key}
    files = ("json", "jsonl", "md", "py", "csv", "html", "yaml", "txt")
    unknown = {name for name in named - known if name.split(".")[0] in groups and name.split(".")[1] not in files}
    assert page.name == "CHANGELOG.md" or not unknown


SITE = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))


def test_the_reference_has_every_setting_and_metric_and_healthy_ranges_are_of_metrics():
    pages = SITE["reference_pages"]()
    settings = pages["reference/settings.md"]
    for key, one in settings_in(Config).items():
        assert f"`{key}` |" in settings and one.help.replace("|", "\\|").replace("<", "&lt;") in settings
    for metric in METRICS:
        assert f"`{metric.name}`".replace("<", "&lt;") in pages["reference/metrics.md"]
    ranges = SITE["healthy_ranges"]()
    assert len(ranges) > 8 and ranges.keys() <= {metric.name for metric in METRICS}
    assert all("[" not in what and what in pages["reference/metrics.md"] for what in ranges.values())


def test_every_page_is_in_the_navigation_and_short_and_every_module_on_a_page_of_the_api():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].partition("\nplugins:")[0]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(re.findall(r"[\w/]+\.md", text))
    lengths = {name: len((ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()) for name in pages}
    assert not [name for name, lines in lengths.items() if lines > 400]
    listed = {name for page in SITE["api_pages"]().values() for name in re.findall(r"^::: (.*)$", page, re.MULTILINE)}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "rlhf").rglob("*.py")}
    assert listed == {name.removesuffix(".__init__") for name in modules if not name.endswith("__main__")}


@pytest.mark.long
def test_the_site_has_no_broken_link(tmp_path):
    """Half a minute, for the API's pages."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "policy_loss" in (tmp_path / "site" / "api" / "rlhf.ops.html").read_text(encoding="utf-8")
    assert (tmp_path / "site" / "source" / "rlhf" / "ops" / "gae.py.html").is_file()


PAGE = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")


def test_every_equivalent_is_a_setting_and_named_as_the_messages_do():
    known = settings_in(Config)
    for name in EQUIVALENTS.values():
        assert (name if "." in name or name in known else f"ppo.{name}") in known, name
    rows = re.findall(r"^\| `(\w+)`[^|]*\| `(\w+)`[^|]*\| `([\w.]+)` \|", PAGE, re.M)
    assert len(rows) >= 12
    for trl, openrlhf, ours in rows:
        for theirs in (trl, openrlhf):
            assert theirs in ours or EQUIVALENTS.get(theirs, theirs) in (ours, ours.rpartition(".")[2]), (theirs, ours)


def test_the_ported_script_has_at_most_20_lines_that_are_not_in_the_other():
    before, after = ((ROOT / f"scripts/from_trl/{name}.py").read_text().splitlines() for name in ("before", "after"))
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 20, "\n".join(added)


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

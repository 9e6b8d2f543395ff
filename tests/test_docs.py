"""The documentation names real places: every `name` that links to a file of code is defined there."""

import ast
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("data/*.md")])
LINK = re.compile(r"\[(`?)([^\]`]+)`?\]\(([^)#\s]+)(?:#[^)]*)?\)")


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


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    for is_code, text, target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path = (page.parent / target).resolve()
        assert path.exists(), f"{page.name} links to {target}"
        if is_code and path.suffix == ".py" and text.isidentifier():
            assert text in names_in(path), f"{page.name} says that {text} is in {target}"


def test_a_page_on_ppo_names_its_parts():
    links = [text for code, text, _ in LINK.findall((ROOT / "docs" / "ppo.md").read_text(encoding="utf-8")) if code]
    assert {"one_update", "token_rewards", "gae", "whiten", "policy_loss", "value_loss", "AdaptiveKL"} <= set(links)


def test_every_file_of_the_package_that_is_named_exists():
    """`rlhf/….py` in any text, but for the stage that docs/contributing.md adds, and history."""
    pages = [(page, page.read_text(encoding="utf-8")) for page in PAGES if page.name != "CHANGELOG.md"]
    named = [(page.name, path) for page, text in pages for path in re.findall(r"\brlhf/[\w\\/]+\.py\b", text)]
    missing = {(page, path) for page, path in named if not (ROOT / path.replace("\\", "")).is_file()}
    assert len(named) > 50 and missing == {("contributing.md", "rlhf/stages/survey.py")}


def commands_in(page: Path) -> list[str]:
    """The `rlhf …` lines of a page's blocks and tables, continued lines joined, without comments."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert not re.search(r"\\[ \t]+$", blocks, re.MULTILINE), (
        f"{page.name}: a blank follows a backslash at a line's end"
    )
    lines = blocks.replace("\\\n", " ").splitlines() + re.findall(r"^\|[^|]*\| `(rlhf [^`]+)` \|", text, re.MULTILINE)
    parts = [part.strip().removeprefix("$ ") for line in lines for part in re.split(r";|&&", line.partition(" #")[0])]
    return [part for part in parts if re.match(r"rlhf \w", part)]


COMMANDS_OF_PAGES = [(page, line) for page in PAGES if page.name != "CHANGELOG.md" for line in commands_in(page)]


def test_pages_have_commands():
    assert len(COMMANDS_OF_PAGES) > 60


@pytest.mark.parametrize(("page", "line"), COMMANDS_OF_PAGES, ids=[line[:60] for _, line in COMMANDS_OF_PAGES])
def test_a_documented_command_passes_the_command_lines_checks(page, line, monkeypatch):
    """Everything but the command itself runs: its module is replaced. `…` is the reader's own value, `$s` a number."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", line)
    assert not re.search(r"[\[\]{}*?]", bare), f"{page.name}: zsh would expand this: quote it: {line}"
    words = [re.sub(r"\$\w+", "1", word) for word in shlex.split(line)[1:] if "…" not in word and word != "&"]
    monkeypatch.setattr(cli, "module_of", lambda command: SimpleNamespace(run=lambda *_: None))
    monkeypatch.setattr(cli, "lend_parents", lambda config: None)  # the runs are not there
    cli._dispatch(words)


def test_the_settings_of_the_lectures_page_exist():
    from rlhf.config import PlanConfig
    from rlhf.config.setting import settings_in

    text = (ROOT / "docs" / "lectures.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)(?:=[^`]*)?`", text))
    assert len(named) > 25 and named <= set(settings_in(PlanConfig)), named - set(settings_in(PlanConfig))
    presets = set(re.findall(r"`model=([\w.-]+)`", text))
    assert len(presets) >= 5 and all((ROOT / "conf" / "model" / f"{name}.yaml").is_file() for name in presets)

"""The documentation names real places: every `name` that links to a file of code is defined there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("data/*.md")])
LINK = re.compile(r"\[(`?)([^\]`]+)`?\]\(([^)#\s]+)(?:#[^)]*)?\)")


def names_in(path: Path) -> set[str]:
    """Functions, classes and constants at the top of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
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

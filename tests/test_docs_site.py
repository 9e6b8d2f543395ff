"""The documentation as a site: what the hook adds to docs/, and that a build finds no broken link (`make docs`)."""

import re
import runpy
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from rlhf.config import Config
from rlhf.config.setting import settings_in
from rlhf.runs.metric_table import METRICS

ROOT = Path(__file__).parents[1]
SITE = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("README.md", "index.md"),
        ("docs/ppo.md", "ppo.md"),
        ("data/README.md", "data/README.md"),
        ("rlhf/ops/gae.py", "source/rlhf/ops/gae.py.md"),
        ("rlhf/data/formats", "source/rlhf/data/formats.md"),
    ],
)
def test_every_linked_file_has_a_page(path, uri):
    assert str(SITE["site_path"](PurePosixPath(path))) == uri


def test_every_setting_and_every_metric_is_in_the_reference():
    pages = SITE["reference_pages"]()
    for key, one in settings_in(Config).items():
        assert (
            f"`{key}` |" in pages["reference/settings.md"]
            and one.help.replace("|", "\\|").replace("<", "&lt;") in pages["reference/settings.md"]
        )
    for metric in METRICS:
        assert f"`{metric.name}`".replace("<", "&lt;") in pages["reference/metrics.md"]


def test_every_page_of_docs_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].partition("\nplugins:")[0]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(re.findall(r"[\w/]+\.md", text))


def test_healthy_ranges_are_of_metrics_that_exist():
    ranges, pages = SITE["healthy_ranges"](), SITE["reference_pages"]()
    assert len(ranges) > 8 and ranges.keys() <= {metric.name for metric in METRICS}
    assert all("[" not in what and what in pages["reference/metrics.md"] for what in ranges.values())


def test_a_notebook_becomes_a_page_with_its_outputs():
    page = SITE["notebook_page"](ROOT / "docs" / "notebooks" / "reading_a_run.ipynb")
    assert page.startswith("# Reading a run\n") and page.count("```python\n") > 5
    assert 'src="data:image/png;base64,' in page and "<table" in page and "<pre>" in page and "<style" not in page


def test_names_of_files_differ_on_every_disk():
    docs = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.*")]
    names = [
        *docs,
        *SITE["api_pages"](),
        *SITE["reference_pages"](),
        *(str(SITE["site_path"](PurePosixPath(n))) for n in SITE["PAGES"]),
    ]
    assert len({name.casefold() for name in names}) == len(names)


def test_no_page_has_more_than_400_lines():
    long = [
        str(path) for path in (ROOT / "docs").rglob("*.md") if len(path.read_text(encoding="utf-8").splitlines()) > 400
    ]
    assert not long


def test_every_module_is_on_a_page_of_the_api():
    listed = {
        line[4:] for page in SITE["api_pages"]().values() for line in page.splitlines() if line.startswith("::: ")
    }
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "rlhf").rglob("*.py")}
    assert listed == {name.removesuffix(".__init__") for name in modules if not name.endswith("__main__")}


@pytest.mark.long
def test_the_site_has_no_broken_link(tmp_path):
    """Half a minute, for the API's pages."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "policy_loss" in (tmp_path / "site" / "api" / "rlhf.ops" / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "site" / "source" / "rlhf" / "ops" / "gae.py" / "index.html").is_file()

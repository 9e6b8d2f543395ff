"""A hook of mkdocs that adds pages to those of docs/. `make docs` runs it.

- The Markdown pages outside docs/ (README.md becomes the first page).
- A page with the text of every other file or folder of the repository that a page links to.
- A page for every folder of rlhf, made by mkdocstrings from its docstrings.
- Pages of all settings and all metrics, from the fields and the table that the program reads; healthy ranges from docs/curves.md.
- A page for every notebook, with its outputs.

Links to files of the repository are rewritten to lead to these pages.
"""

import html
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from rlhf.config import Config
from rlhf.config.setting import Setting, settings_in
from rlhf.runs.metric_table import METRICS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "data/README.md")
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")
LINKED = re.compile(r"\[([^\]]+)\]\([^)]+\)")
LANGUAGE = {"py": "python", "sh": "bash", "yml": "yaml"} | {name: name for name in ("yaml", "toml", "json", "html")}


def site_path(path: PurePosixPath) -> PurePosixPath:
    """The path in the site of a file of the repository."""
    if path.parts[0] == "docs":
        return path.relative_to("docs").with_suffix(".md" if path.suffix == ".ipynb" else path.suffix)
    if str(path) == "README.md":
        return PurePosixPath("index.md")
    return path if str(path) in PAGES else PurePosixPath("source") / f"{path}.md"


def repository_path(uri: str) -> PurePosixPath:
    """The inverse, for pages: the file of the repository from which a page of the site is made."""
    if uri == "index.md":
        return PurePosixPath("README.md")
    page = PurePosixPath(uri) if uri in PAGES else PurePosixPath("docs") / uri
    return page.with_suffix(".ipynb") if page.parts[:2] == ("docs", "notebooks") else page


def linked(target: str, page: PurePosixPath) -> PurePosixPath | None:
    """The file or folder of the repository that a link on a page leads to; None if it leads elsewhere or nowhere."""
    if re.match(r"[a-z]+:", target):
        return None
    path = (ROOT / page.parent / target).resolve()
    return PurePosixPath(path.relative_to(ROOT).as_posix()) if path.exists() and path.is_relative_to(ROOT) else None


def source_page(path: PurePosixPath) -> str:
    """A file's text in a block of code, or the names in a folder."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(entry.name for entry in place.iterdir() if not entry.name.startswith((".", "__")))
        return f"# {path}/\n\n" + "".join(f"- `{name}`\n" for name in names)
    return f"# {path}\n\n````{LANGUAGE.get(place.suffix[1:], 'text')}\n{place.read_text(encoding='utf-8').rstrip()}\n````\n"


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: texts, code, and outputs (streams and values as text, tables as HTML, pictures as data)."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            found = {kind: "".join(text) for kind, text in data.items()}
            if "image/png" in found:
                shown = f'<img alt="{found["text/plain"]}" src="data:image/png;base64,{found["image/png"].strip()}">'
            elif "text/html" in found:
                shown = re.sub(r"<style.*?</style>|\n\s*", "", found["text/html"], flags=re.DOTALL)
            else:
                shown = f"<pre>{html.escape(found['text/plain'].rstrip())}</pre>"
            parts.append(f'<div class="output">{shown}</div>')
    return "\n\n".join(parts) + "\n"


def healthy_ranges() -> dict[str, str]:
    """metric: what is healthy, from the table of docs/curves.md."""
    text = (ROOT / "docs" / "curves.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/<>]+)` \| ([^|]+) \|", text, re.MULTILINE)
    return {name: LINKED.sub(r"\1", what) for name, what in rows}


def api_pages() -> dict[str, str]:
    """A page for every folder of modules, each module by its docstrings."""
    pages = {}
    for folder in sorted({path.parent for path in (ROOT / "rlhf").rglob("*.py")}):
        package = ".".join(folder.relative_to(ROOT).parts)
        modules = [f"{package}.{path.stem}" for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__")]
        if (folder / "__init__.py").exists():
            modules.insert(0, package)
        pages[f"api/{package}.md"] = f"# {package}\n\n" + "".join(f"::: {module}\n\n" for module in modules)
    return pages


def table(head: str, rows: Sequence[tuple[object, ...]]) -> str:
    """A Markdown table; head: the names of its columns, with | between them."""

    def line(cells: tuple[object, ...]) -> str:
        return " | ".join(str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in cells)

    return "\n".join([head, "|".join("---" for _ in head.split("|")), *map(line, rows)]) + "\n"


def wanted(one: Setting) -> str:
    """The range of a setting, with the kinds of value for which the field states none."""
    if one.choices is None and one.kind is None:
        if isinstance(one.default, bool):
            return "true or false"
        if one.min is one.above is one.max is one.below is None and not isinstance(one.default, int | float):
            return "text"
    return one.wanted()


def reference_pages() -> dict[str, str]:
    """The settings by group, and the metrics."""
    groups: dict[str, list[tuple[object, ...]]] = {}
    for key, one in settings_in(Config).items():
        default = {"None": "null", "True": "true", "False": "false"}.get(str(one.default), one.default)
        row = (f"`{key}`", f"`{default}`", wanted(one), one.help, one.changes)
        groups.setdefault(key.rpartition(".")[0] or "of every command", []).append(row)
    intro = "Defaults without a preset. The last column: what another value changes, the result, only its rounding, or nothing.\n"
    head = "setting | default | range | meaning | changes"
    settings = [f"## {name}\n\n" + table(head, rows) for name, rows in groups.items()]
    ranges = healthy_ranges()
    metrics = [(f"`{m.name}`", m.unit or "-", ranges.get(m.name, ""), m.meaning, m.mask, m.reduction) for m in METRICS]
    head = "metric | unit | healthy | meaning | over | reduction"
    return {
        "reference/settings.md": "\n".join(["# All settings\n", intro, *settings]),
        "reference/metrics.md": "---\nhide: [toc]\n---\n\n# All metrics\n\n[Read the curves](../curves.md) says which to read first.\n\n"
        + table(head, metrics),
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in PAGES:
        uri = str(site_path(PurePosixPath(name)))
        files.append(File.generated(config, uri, content=(ROOT / name).read_text("utf-8")))
    paths = (ROOT / "docs" / "notebooks").glob("*.ipynb")
    notebooks = {f"notebooks/{path.stem}.md": notebook_page(path) for path in paths}
    for uri, content in (api_pages() | reference_pages() | notebooks).items():
        files.append(File.generated(config, uri, content=content))
    for file in list(files.documentation_pages()):
        if file.src_uri.startswith(("api/", "reference/")):
            continue
        page = repository_path(file.src_uri)
        for target, _ in LINK.findall(file.content_string):
            path = linked(target, page)
            if path is None or files.get_file_from_path(str(site_path(path))):
                continue
            uri = str(site_path(path))
            files.append(File.generated(config, uri, content=source_page(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    if uri.startswith(("api/", "reference/", "source/")):
        return markdown

    def rewrite(match: re.Match) -> str:
        path = linked(match[1], repository_path(uri))
        if path is None:
            return match[0]
        return os.path.relpath(site_path(path), PurePosixPath(uri).parent) + (match[2] or "")

    return LINK.sub(rewrite, markdown)

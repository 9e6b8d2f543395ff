"""Download the packages that a GPU machine without network lacks as wheels, and install them there.

    python scripts/gpu/wheels.py download .whl     # here, with the project installed: exact versions of constraints.txt
    python scripts/gpu/wheels.py install .whl .venv-gpu    # there: environments next to the machine's own packages

`.whl/project` contains the project's dependencies; `.whl/peer` contains TRL 1.12.0, which replaces the project's TRL in a separate
environment. Packages that the machine has (PRESENT) are not downloaded, and neither are their dependencies.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEER = "trl-1.12.0"
LIMIT = 64 * 2**20  # bytes that travel in a call, this repository's files among them
EXTRAS = ("gguf", "sentiment")
TESTS = ("hypothesis", "pytest", "pytest-timeout")
# What such a machine has, at versions that pyproject.toml allows: torch, transformers, their dependencies, and large packages.
PRESENT = frozenset((
    "accelerate", "anyio", "certifi", "click", "contourpy", "cycler", "filelock", "fonttools", "formulaic", "fsspec", "hf-xet",
    "httpcore", "httpx", "huggingface-hub", "hypothesis", "idna", "jinja2", "kiwisolver", "markupsafe", "matplotlib",
    "numpy", "packaging", "pandas", "patsy", "peft", "pillow", "protobuf", "psutil", "pyarrow", "pytest",
    "pytest-timeout", "python-dateutil", "pyyaml", "regex", "requests", "rich", "safetensors", "scipy", "setuptools",
    "six", "sortedcontainers", "statsmodels", "tokenizers", "torch", "tqdm", "transformers", "typing-extensions",
    "urllib3", "xxhash",
))  # fmt: skip
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)  # manylinux tags, which pip takes literally


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(python: str) -> list[str]:
    """The project's dependencies, direct and indirect, that the machine lacks; read from the packages installed here."""
    from packaging.markers import default_environment
    from packaging.requirements import Requirement

    machine: dict[str, Any] = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    machine |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "extra": ""}

    def required(lines: list[str]) -> list[str]:
        requirements = map(Requirement, lines)
        return [plain(r.name) for r in requirements if not r.marker or r.marker.evaluate(machine)]

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    todo = [*TESTS, *required(project["dependencies"])]
    for extra in EXTRAS:
        todo += required(project["optional-dependencies"][extra])
    done: set[str] = set()
    while todo:
        name = todo.pop()
        if name in done or name in PRESENT:
            continue
        done.add(name)
        todo += required(importlib.metadata.requires(name) or [])
    return sorted(done)


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {plain(line.split("==")[0]): line for line in lines if "==" in line and not line.startswith("#")}


def download(folder: Path, python: str) -> None:
    """Download the wheels of exact versions; build those that exist only as source, which must be pure Python."""
    known = pins()
    names = needed(python)
    if missing := [name for name in names if name not in known]:
        sys.exit(f"wheels: constraints.txt has no version of {', '.join(missing)}: add them there")
    for part in ("project", "peer"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for old in (folder / part).glob("*.whl"):
            old.unlink()
    for name in names:
        fetch(known[name], folder / "project", python)
    fetch(PEER.replace("-", "=="), folder / "peer", python)
    if foreign := [f.name for f in folder.glob("*/*.whl") if "macosx" in f.name or "win" in f.name.split("-")[-1]]:
        sys.exit(f"wheels: {', '.join(foreign)}: not for Linux")
    total = sum(table(folder).values())
    print(f"{total / 2**20:.1f} MiB of the {LIMIT / 2**20:.0f} that one call carries, the repository's files included")
    if total > LIMIT:
        sys.exit("wheels: too large for one call: add what the machine has to PRESENT")


def fetch(pin: str, folder: Path, python: str) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    platforms = [argument for tag in tags for argument in ("--platform", tag)]
    only_wheels = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    binary = subprocess.run([*pip, "download", *only_wheels, "-d", str(folder), pin], capture_output=True, text=True)
    if not binary.returncode:
        return
    built = subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), pin], capture_output=True, text=True)
    if built.returncode or not list(folder.glob(f"{pin.split('==')[0].replace('-', '_')}-*-none-any.whl")):
        sys.exit(f"wheels: {pin}: neither a wheel nor pure Python source: {(binary.stderr + built.stderr)[-600:]}")


def table(folder: Path) -> dict[str, int]:
    """Print each wheel's size, largest first; returns them in bytes."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.glob("*/*.whl")}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size / 2**20:8.2f} MiB  {name}")
    return sizes


def install(folder: Path, home: Path) -> None:
    """Make two environments that can import this machine's packages: `home` itself, and the peer's below it."""
    wheels = sorted(folder.glob("project/*.whl"))
    if not wheels:
        sys.exit(f"{folder}/project: contains no wheels: run `wheels.py download` on a machine with network")
    peer = sorted(folder.glob("peer/*.whl"))
    make(home, wheels)
    if peer:
        make(home / "peers" / PEER, [*(w for w in wheels if not w.name.startswith("trl-")), *peer])
    print(f"{home}: {len(wheels)} wheels" + (f"; {home}/peers/{PEER}" if peer else "; no wheel of the peer"))


def make(home: Path, wheels: list[Path]) -> None:
    """An environment with these wheels and, behind them, the packages of the Python that runs this."""
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([str(python), "-c", purelib], check=True, text=True, capture_output=True).stdout.strip()
    # the machine's Python may itself be an environment, which --system-site-packages would ignore
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)]
    Path(site, "machine.pth").write_text("".join(f"{path}\n" for path in paths))
    options = ["-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", site, *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr[-400:])
        sys.exit(
            f"{home}: pip refused the wheels: {reason.strip()}: download them for Python {platform.python_version()}"
        )
    checked = "import datasets, torch, transformers, trl, rlhf; print(torch.__version__, transformers.__version__, trl.__version__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(python), "-c", checked], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{home}: the packages do not load: {done.stderr.strip().splitlines()[-1]}")
    print(f"{home}: torch, transformers, trl {done.stdout.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("download", help="fetch the wheels into a folder")
    one.add_argument("folder", type=Path)
    one.add_argument("--python", default="3.12", help="the machine's Python")
    two = parts.add_parser("install", help="install them into an environment")
    two.add_argument("folder", type=Path)
    two.add_argument("home", type=Path)
    options = parser.parse_args()
    if options.part == "download":
        download(options.folder, options.python)
    else:
        install(options.folder, options.home)


if __name__ == "__main__":
    main()

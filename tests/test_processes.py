"""Ranks are known in one module, which costs nothing to import."""

import re
import subprocess
import sys
from pathlib import Path

import rlhf
from rlhf.processes import LAUNCHER_VARIABLES, is_first, launch_environment, rank

HOME = Path(rlhf.__file__).parent


def test_one_module_reads_what_a_launcher_sets():
    said = re.compile("|".join(rf"""["']{name}["']""" for name in LAUNCHER_VARIABLES))
    asking = {path.name for path in HOME.rglob("*.py") if said.search(path.read_text(encoding="utf-8"))}
    assert asking == {"processes.py"}


def test_it_is_imported_without_torch():
    code = "import sys, rlhf.processes as p; assert not p.disconnect() and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_launch_and_a_process_of_its_own(monkeypatch):
    for name, value in launch_environment(1, 3, "127.0.0.1", 4567).items():
        monkeypatch.setenv(name, value)
    assert (rank(), is_first()) == (1, False)

"""scripts/kill_ranks.py in short."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_killed_ranks_leave_nothing_and_the_losses_are_the_same(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "kill_ranks.py"),
        str(tmp_path / "kills"),
        "only=reward zero2",
        "kills=4",
    ]
    done = subprocess.run(
        command, timeout=1200, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "kills" / "kills.json").read_text())
    assert len(found["reward zero2 seed 0"]["kills"]) == 2 and not found["reward zero2 seed 0"]["differences"]

"""scripts/kill_ranks.py in short, and what a rank that was killed while it compiled leaves behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.training.engine import compiling

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("depth", ["deepspeed_shm_comm", "py311_cpu/deepspeed_shm_comm"])
def test_a_lock_whose_owner_was_killed_is_removed_and_a_held_one_is_not(tmp_path, monkeypatch, capsys, depth):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / depth
    folder.mkdir(parents=True)
    take = (
        "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('taken', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", take, str(folder / "lock")], stdout=subprocess.PIPE)
    assert owner.stdout.readline()
    with compiling(0.05):
        time.sleep(1.0)
        assert (folder / "lock").exists() and capsys.readouterr().err == ""
        owner.kill()
        owner.wait()
        until = time.monotonic() + 30
        while (folder / "lock").exists() and time.monotonic() < until:
            time.sleep(0.05)
    assert not (folder / "lock").exists()
    assert "lock: removed, since the process that compiled there was killed" in capsys.readouterr().err


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

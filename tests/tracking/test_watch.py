"""`rlhf watch`: a run followed by another process: what is new, what is left to do, and when it has ended."""

import fcntl
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf.commands.watch import follow, look
from rlhf.errors import UserError
from rlhf.system.files import is_locked, lock_of


def write_stage(run: Path, name: str, status: str, logged: int = 0, **record: Any) -> Path:
    folder = run / name
    folder.mkdir(parents=True, exist_ok=True)
    needed = {"run": run.name, "settings": {}, "parents": {}, "data": {}, "versions": {}, "files": {}, "hash": "0" * 64}
    (folder / "stage.json").write_text(json.dumps({"stage": name, "status": status} | needed | record))
    rows = [
        {"progress/step": i, "time/elapsed_s": 3.0 * i, "objective/scores": 0.1 * i, "objective/kl": 0.5 * i,
         "rollout/response_len": 20.0}
        for i in range(1, logged + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with lock_of(folder).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_line_tells_step_time_left_and_figures(tmp_path: Path) -> None:
    folder = write_stage(tmp_path, "ppo", "running", logged=4)
    with locked(folder):
        assert is_locked(folder)
        (stage,) = look(tmp_path)
        assert str(stage) == "ppo: running  update 4  reward 0.4  KL 2  length 20", "no guess without a known length"
        write_stage(tmp_path, "ppo", "running", logged=4, steps=10)
        (stage,) = look(tmp_path)
        # 6 of 10 updates left at 3 s each.
        assert str(stage) == "ppo: running  update 4/10 (40%)  18 s left  reward 0.4  KL 2  length 20"
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"progress/step": 5, "objective/kl": 3}\n{"progress/step": 6, "obj')  # half a line
        assert look(tmp_path)[0].files.last_step == 5
    assert str(look(tmp_path)[0]).startswith("ppo: stopped")


def test_a_finished_run_is_told_and_left_at_once_and_one_that_stopped_is_an_error(tmp_path):
    write_stage(tmp_path, "sft", "complete", logged=3, seconds=75.0)
    write_stage(tmp_path, "ppo", "complete", logged=10, seconds=30.0)
    (tmp_path / "pipeline.json").write_text("{}")
    out = io.StringIO()
    started = time.monotonic()
    follow(tmp_path, 0.05, True, out)
    assert time.monotonic() - started < 2
    ended = "ppo: complete  update 10  30 s  reward 1  KL 5  length 20"
    assert out.getvalue().splitlines() == ["sft: complete  step 3  1:15 min", ended]
    write_stage(tmp_path, "ppo", "running", logged=4)
    with pytest.raises(UserError, match="ppo stopped at step 4 and no process works on it"):
        follow(tmp_path, 0.02, True, io.StringIO(), patience=0.1)
    with pytest.raises(UserError, match="ppo stopped at step 4"):
        follow(tmp_path, 0.02, False, io.StringIO())  # a look, no waiting


@pytest.mark.parametrize("interrupted", [False, True])
def test_it_follows_a_run_from_another_process_to_its_end_or_an_interrupt(tmp_path: Path, interrupted: bool) -> None:
    run = tmp_path / "x"
    folder = write_stage(run, "ppo", "running", logged=1)
    with locked(folder):
        command = [sys.executable, "-m", "rlhf", "watch", "run=x", f"runs_dir={tmp_path}", "watch.every_seconds=0.05"]
        # who runs the tests in the background has SIGINT ignored, which children inherit
        restore = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": Path(__file__).parents[2]}
        watcher = subprocess.Popen(command, text=True, preexec_fn=restore, **pipes)
        assert watcher.stdout is not None
        assert watcher.stdout.readline().startswith("ppo: running  update 1")
        if interrupted:
            watcher.send_signal(signal.SIGINT)
        else:
            write_stage(run, "ppo", "complete", logged=10, seconds=30.0)
    (run / "pipeline.json").write_text("{}")
    told, complaint = watcher.communicate(timeout=20)
    assert watcher.returncode == 0 and complaint == ""
    assert interrupted or "ppo: complete  update 10" in told

"""`rlhf watch`: a run followed by another process: what is new, what is left to do, and when it has ended."""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf.commands.watch import follow_live, follow_plain
from rlhf.errors import UserError
from rlhf.report.watching import Tail, Watch, is_locked, line, screen, sparkline

CONFIG = {"ppo": {"episodes": 640, "episodes_per_update": 64}}


def write_stage(run: Path, name: str, status: str, steps: int = 0, **record: Any) -> Path:
    folder = run / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stage.json").write_text(json.dumps({"stage": name, "status": status, "config": CONFIG} | record))
    rows = [
        {
            "progress/step": i,
            "time/elapsed_s": 3.0 * i,
            "objective/scores": 0.1 * i,
            "objective/kl": 0.5 * i,
            "rollout/response_len": 20.0,
        }
        for i in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """As a stage that runs holds it."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_tail_reads_on_and_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert not tail.look()
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert tail.look() and tail.rows == [{"a": 1}, {"a": 2}]
    assert not tail.look()
    with path.open("a") as file:
        file.write(": 3}\nnot json\n")
    assert tail.look() and tail.rows == [{"a": 1}, {"a": 2}, {"a": 3}]
    path.with_name("new").write_text('{"a": 9}\n' * 9)  # a resumed stage replaces the file
    os.replace(path.with_name("new"), path)
    assert tail.look() and tail.rows == [{"a": 9}] * 9
    path.unlink()
    assert tail.look() and tail.rows == []


def test_a_line_tells_step_time_left_and_figures(tmp_path: Path) -> None:
    folder = write_stage(tmp_path, "ppo", "running", steps=4)
    watch = Watch(tmp_path)
    with locked(folder):
        assert is_locked(folder / ".lock")
        watch.look()
        stage = watch.current
        assert stage is not None
        # 640 / 64 = 10 updates, 6 of them left at 3 s each.
        assert line(stage) == "ppo: running  update 4/10 (40%)  18 s left  reward 0.4  KL 2  length 20"
        shown = screen(watch, 60)
        assert "◐ ppo" in shown[0] and any(text.startswith("━" * 22 + "─") for text in shown)  # 40% of 56
        assert any(text.startswith("KL") and "▁" in text and "0.5 → 2" in text for text in shown)
        assert max(map(len, shown)) <= 60
    watch.look()
    assert line(stage).startswith("ppo: stopped")


def test_stages_without_a_known_length_have_no_guess(tmp_path: Path) -> None:
    folder = write_stage(tmp_path, "sft", "running", steps=3)
    with locked(folder):
        watch = Watch(tmp_path)
        watch.look()
        assert line(watch.stages[3]) == "sft: running  step 3"


def test_a_sparkline_by_hand() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 3.0, 0.0, 8.0], 2) == "▁█"  # means 2 and 4
    assert sparkline([5.0, 5.0], 10) == "▁▁"


def test_a_finished_run_is_told_and_left_at_once(tmp_path: Path) -> None:
    write_stage(tmp_path, "sft", "complete", steps=3, seconds=75.0)
    write_stage(tmp_path, "ppo", "complete", steps=10, seconds=30.0)
    (tmp_path / "pipeline.json").write_text("{}")
    out = io.StringIO()
    started = time.monotonic()
    follow_plain(tmp_path, 0.05, True, out)
    assert time.monotonic() - started < 2
    assert out.getvalue().splitlines() == [
        "sft: complete  step 3  1:15 min",
        "ppo: complete  update 10/10 (100%)  30 s  reward 1  KL 5  length 20",
    ]


def test_a_stage_that_says_how_many_steps_it_takes_has_a_time_left(tmp_path: Path) -> None:
    folder = write_stage(tmp_path, "sft", "running", steps=4)
    record = json.loads((folder / "stage.json").read_text())
    watch = Watch(tmp_path)
    with locked(folder):
        watch.look()
        assert watch.current is not None and line(watch.current) == "sft: running  step 4", "it depends on the data"
        (folder / "stage.json").write_text(json.dumps(record | {"steps": 8}))
        watch.look()
        assert line(watch.current) == "sft: running  step 4/8 (50%)  12 s left"  # 4 steps at 3 s each


def test_a_run_that_stopped_is_an_error_that_says_so(tmp_path: Path) -> None:
    write_stage(tmp_path, "ppo", "running", steps=4)
    with pytest.raises(UserError, match="ppo stopped at step 4 and no process works on it"):
        follow_plain(tmp_path, 0.02, True, io.StringIO(), patience=0.1)
    follow_plain(tmp_path, 0.02, False, io.StringIO())  # a look, no waiting


def test_the_live_view_is_drawn_over_itself_and_gives_the_cursor_back(tmp_path: Path) -> None:
    write_stage(tmp_path, "ppo", "complete", steps=10, seconds=30.0)
    out = io.StringIO()
    follow_live(tmp_path, 0.02, True, out, patience=0.1)
    assert out.getvalue().startswith("\x1b[?25l") and out.getvalue().endswith("\x1b[?25h")
    assert "\x1b[6A" in out.getvalue(), "the six lines are written again over the first ones"


RUN = "import sys; from rlhf.cli import main; main(sys.argv[1:])"


def test_it_follows_a_run_to_its_end_from_another_process(tmp_path: Path) -> None:
    run = tmp_path / "x"
    folder = write_stage(run, "ppo", "running", steps=1)
    with locked(folder):
        watcher = subprocess.Popen(
            [sys.executable, "-c", RUN, "watch", "run=x", f"runs_dir={tmp_path}", "watch.every_seconds=0.05"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert watcher.stdout is not None
        assert watcher.stdout.readline().startswith("ppo: running  update 1/10")
        write_stage(run, "ppo", "complete", steps=10, seconds=30.0)
    (run / "pipeline.json").write_text("{}")
    told, _ = watcher.communicate(timeout=20)
    assert watcher.returncode == 0 and "ppo: complete  update 10/10" in told


def test_an_interrupt_is_clean(tmp_path: Path) -> None:
    folder = write_stage(tmp_path / "x", "ppo", "running", steps=1)
    with locked(folder):
        watcher = subprocess.Popen(
            [sys.executable, "-c", RUN, "watch", "run=x", f"runs_dir={tmp_path}", "watch.every_seconds=0.05"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            # who runs the tests in the background has SIGINT ignored, which children inherit
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert watcher.stdout is not None
        watcher.stdout.readline()
        watcher.send_signal(signal.SIGINT)
        _, complaint = watcher.communicate(timeout=20)
    assert watcher.returncode == 0 and complaint == ""


def test_labelling_rounds_before_the_last_are_followed_too(tmp_path: Path) -> None:
    write_stage(tmp_path / "x", "sft", "complete", seconds=9.0)
    watch = Watch(tmp_path / "x")
    watch.look()
    assert [stage.title for stage in watch.begun] == ["sft"] and not watch.running
    write_stage(tmp_path / "x-round-1", "label", "complete", seconds=4.0)
    ppo = write_stage(tmp_path / "x-round-1", "ppo", "running", steps=5)
    (tmp_path / "x-round-two").mkdir()
    with locked(ppo):
        assert watch.look() and watch.running and watch.current is not None
        assert line(watch.current).startswith("x-round-1/ppo: running  update 5/10 (50%)  15 s left")
        assert screen(watch, 100)[0] == "x  ● sft → ● x-round-1/label → ◐ x-round-1/ppo"
    write_stage(tmp_path / "x", "label", "complete", seconds=4.0)
    watch.look()
    assert [stage.title for stage in watch.begun] == ["sft", "x-round-1/label", "x-round-1/ppo", "label"]
    assert watch.stages[-1].title == "evaluate"

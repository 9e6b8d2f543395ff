"""Ctrl-C, SIGTERM, SIGHUP: the first asks a loop to end after its step, the second ends the process, the exit code is 130."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.system.exits import SIGNALS, finish_step, stop_requested

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals as they were before each test, and Ctrl-C as on a terminal: a job in the background ignores it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_loop_decides(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    steps = 0
    with pytest.raises(KeyboardInterrupt), finish_step("ppo"):
        assert not stop_requested()
        for _ in range(100):
            steps += 1
            if steps == 3:
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), number)  # the same one, from the terminal and from the parent
            if stop_requested():
                break
    assert steps == 3 and signal.getsignal(number) is before
    told = capfd.readouterr().err
    assert told.count("ppo: stopping after this step, with a checkpoint") == 1


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with finish_step("sft"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert not stop_requested()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


LOOP = """
import time
from rlhf.system import exits
exits.SAME_SECONDS = 0.1
with exits.finish_step("ppo"):
    print("begun", flush=True)
    time.sleep(60)
"""


SLOW_END = """
import sys, time
import rlhf.commands.watch
from rlhf.cli import main
from rlhf.system import exits
exits.SAME_SECONDS = 0.1
seconds = float(sys.argv[1])
def run(config):
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        time.sleep(seconds)  # closing what is open takes a while
rlhf.commands.watch.run = run
main(["watch", "run=x"])
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    command, pipes = [sys.executable, "-c", code, *arguments], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    listening = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    process = subprocess.Popen(command, text=True, cwd=ROOT, preexec_fn=listening, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_outside_of_a_loop_a_command_ends_with_130(number: int) -> None:
    process = start(SLOW_END, "0")
    process.send_signal(number)
    _, told = process.communicate(timeout=10)
    assert process.returncode == 130
    assert told == "\nrlhf: interrupted\n", "there is nothing that watching could resume"


@pytest.mark.parametrize(("code", "number", "said"), [
    (LOOP, signal.SIGTERM, ("stopping after this step", "stopped; the same command resumes")), (SLOW_END, signal.SIGINT, ()),
])  # fmt: skip
def test_a_second_signal_ends_at_once(code: str, number: int, said: tuple[str, ...]) -> None:
    process = start(code, "30")
    process.send_signal(number)
    time.sleep(0.3)  # longer than SAME_SECONDS above, within which two signals are one
    assert process.poll() is None
    process.send_signal(number)
    _, told = process.communicate(timeout=5)
    assert process.returncode == 130 and all(part in told for part in said) and bool(told) == bool(said)


IMPORTING = """
import os, signal, sys
wanted = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, *_):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)
from rlhf.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["rlhf.cli", "rlhf.config", "rlhf.commands.watch"])
def test_ctrl_c_within_an_import_is_one_line(module: str) -> None:
    command = [sys.executable, "-c", IMPORTING, module, "watch", "run=x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\nrlhf: interrupted\n")


HANGUP = """
import os, signal, sys, time
from rlhf.system.exits import finish_step, stop_requested
with finish_step("ppo"):
    print("begun", flush=True)
    while not stop_requested():
        time.sleep(0.01)
    print("the step's own line, on a terminal that is gone", flush=True)
    print("progress", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write("checkpoint")
"""


def test_a_terminal_that_is_closed_does_not_keep_a_loop_from_its_checkpoint(tmp_path: Path) -> None:
    """A pseudo-terminal whose other end goes away, as when a window is closed or a connection breaks: SIGHUP."""
    main, child = os.openpty()
    command, streams = (
        [sys.executable, "-c", HANGUP, str(tmp_path / "step-1")],
        dict.fromkeys(("stdin", "stdout", "stderr"), child),
    )
    takes_it = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=takes_it, **streams)
    os.close(child)
    assert os.read(main, 100).startswith(b"begun")
    os.close(main)
    assert process.wait(timeout=20) != 0
    assert (tmp_path / "step-1").read_text() == "checkpoint"


@pytest.mark.long
def test_killed_ranks_leave_nothing_and_the_losses_are_the_same(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "kill_ranks.py", tmp_path / "kills", "only=reward zero2", "kills=4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, timeout=1200, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "kills" / "kills.json").read_text())
    assert len(found["reward zero2 seed 0"]["kills"]) == 2 and not found["reward zero2 seed 0"]["differences"]

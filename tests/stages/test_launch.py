"""Several processes for a stage: how they are started, distinguished, and ended together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.commands.launch import environments, run_processes
from rlhf.runs.checkpoints import checkpoints
from rlhf.runs.folders import is_complete

from ..snippet import run_two, start_two
from .conftest import Run


def test_each_process_knows_its_place_and_the_first_failure_ends_all(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    code = f"import os; open('{tmp_path}/' + os.environ['RANK'], 'w').write(' '.join(os.environ[n] for n in {names}))"
    assert run_processes([code], 3, module="tests.snippet") == 0
    threads = max(1, (os.cpu_count() or 1) // 3)
    for i in range(3):
        assert (tmp_path / str(i)).read_text().split() == [str(i), str(i), "3", "3", "127.0.0.1", str(threads)]
    ports = {environment["MASTER_PORT"] for environment in environments(2, 0)}
    assert len(ports) == 1 and 1024 <= int(ports.pop()) < 65536
    assert "RANK" not in environments(1, 0)[0], "a process that runs alone is started plainly"
    assert environments(2, 5)[0].get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS"), "the setting decides"
    started = time.monotonic()
    code = f"import os, time; os.environ['RANK'] == '1' and exit(3); time.sleep(60); open('{tmp_path}/late', 'w')"
    assert run_processes([code], 2, module="tests.snippet") == 3
    assert time.monotonic() - started < 10 and not (tmp_path / "late").exists()


def test_a_killed_process_is_named(capfd):
    code = "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(60)"
    assert run_processes([code], 2, module="tests.snippet") == 137
    assert capfd.readouterr().err.strip() == "rlhf: process 1 of 2 was killed by signal 9; the others are stopped too"


def wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stage_of_two_processes_reports_a_mistake_once():
    code, told = run_two("rlhf", "pretrain", "pretrain.lr=-1")
    assert code == 2 and told == ["rlhf: error: pretrain.lr=-1.0: want more than 0 and at most 10"]
    assert run_two("rlhf", "--version") == (0, [])


STOPS = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
def stop(*signal):
    (folder / f"done-{rank}").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
(folder / f"ready-{rank}").write_text("ready")
time.sleep(60)
"""


def test_a_signal_reaches_all(tmp_path):
    """Each ends with a checkpoint and exit code 130, as does what started them."""
    parent = start_two("tests.snippet", STOPS, str(tmp_path))
    wait_for([tmp_path / f"ready-{i}" for i in range(2)])
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(timeout=30) == 130
    assert all((tmp_path / f"done-{i}").exists() for i in range(2))


def stage_words(run: Run, *more: str) -> list[str]:
    settings = ["pretrain.optimizer=adamw", "pretrain.warmup_tokens=0", "checkpoints.every_seconds=0"]
    return ["pretrain", "--shared-settings", *run.words(*settings, *more)]


NOT_FINITE = """
import sys
from rlhf.model.fused_loss import NextToken
forward = NextToken.forward
NextToken.forward = lambda self, *given, **named: forward(self, *given, **named) * float("nan")
from rlhf.cli import main; main(sys.argv[1:])
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["none", "zero2", "zero3"])
def test_a_gradient_that_is_not_finite_stops_all_processes(copy_until, way):
    run = copy_until("pretrain")
    code, told = run_two("tests.snippet", NOT_FINITE, *stage_words(run, f"deepspeed={way}"))
    told = [line for line in told if line.startswith("rlhf: ")]
    assert code == 2 and len(told) == 1 and "not finite" in told[0]
    folder = run.folder / "pretrain"
    assert not is_complete(folder) and (folder / "offending_batch.safetensors").exists()
    for path in checkpoints(folder / "checkpoints"):
        weights = load_file(path / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in weights.values()), path


@pytest.mark.long
def test_a_process_killed_in_training_ends_the_others_with_one_line(copy_until):
    run = copy_until("pretrain")
    dies = (
        "import os, signal, sys; from rlhf.training.loop import TrainingLoop\n"
        "if os.environ['RANK'] == '1':\n"
        "    TrainingLoop.save = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from rlhf.cli import main; main(sys.argv[1:])"
    )
    code, told = run_two("tests.snippet", dies, *stage_words(run, "deepspeed=zero2"))
    assert code == 137 and any("process 1 of 2 was killed by signal 9" in line for line in told)
    assert not any("Traceback" in line for line in told)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
def test_no_file_of_the_working_directory_is_taken_for_a_module(tmp_path):
    """The server that forks imports what this process would, not a user's hydra.py."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "hydra.py").write_text("raise RuntimeError('taken for the library')\n")
    command = tmp_path / "command.py"  # like bin/rlhf, whose own folder comes first
    command.write_text(
        "from rlhf.commands.launch import *\n"
        "if __name__ == '__main__':\n"
        "    import_once(['hydra'])\n"
        "    raise SystemExit(run_processes(['--version']))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, command], cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "taken for the library" not in done.stderr, done.stderr

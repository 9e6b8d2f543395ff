"""Real stages that are told to stop: a checkpoint after the step under way, exit code 130, and the same end as undisturbed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.runs.checkpoints import checkpoint_step, checkpoints, latest_checkpoint
from rlhf.runs.run_files import read_jsonl
from rlhf.stages import ppo
from rlhf.training import batches
from tests.stages.conftest import SHORT, Run, stopped_in_second
from tests.stages.test_resume import assert_same_weights

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("stage", "metric"), [("sft", "sft/loss"), ("ppo", "objective/scores")])
def test_a_loop_stops_after_its_step_and_goes_on(copy_until, undisturbed, capfd, stage, metric) -> None:
    whole, stopped = undisturbed(stage), copy_until(stage)
    module, step = (ppo, "one_update") if stage == "ppo" else (batches, "train_step")
    with stopped_in_second(module, step):
        stopped.stage(stage, *SHORT[stage])
    folder = stopped.folder / stage
    assert [checkpoint_step(path) for path in checkpoints(folder / "checkpoints")] == [2]
    assert latest_checkpoint(folder / "checkpoints") is not None, "a whole one"
    assert [step for step, _ in stopped.values(stage, metric)][-2:] == [1, 2]
    assert "stopping after this step, with a checkpoint" in capfd.readouterr().err
    stopped.stage(stage, *SHORT[stage])
    assert_same_weights(whole.folder / stage, folder, "model/model.safetensors")
    assert stopped.values(stage, metric) == whole.values(stage, metric)


def start_pipeline(run: Run, **how: Any) -> subprocess.Popen[str]:
    """A pipeline to SFT in a process of its own, whose SFT has taken two steps."""
    full = [sys.executable, "-m", "rlhf", "pipeline", *run.words("stages=sft")]
    process = subprocess.Popen(full, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, **how)
    until = time.monotonic() + 120
    while len(list(read_jsonl(run.folder / "sft" / "metrics.jsonl"))) < 2:
        assert process.poll() is None and time.monotonic() < until, "it never trained"
        time.sleep(0.01)
    return process


def assert_ends_as(run: Run, gold_run: Run) -> None:
    run.stage("sft")
    assert_same_weights(run.folder / "sft", gold_run.folder / "sft", "model/model.safetensors")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_pipeline_passes_signals_on(copy_until: Callable[..., Run], gold_run: Run, number: int) -> None:
    """The signal goes to the pipeline's process alone; the stage writes a checkpoint, both end, one prints how to resume."""
    run = copy_until("sft")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    process = start_pipeline(run, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    folder = run.folder / "sft"
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.count("run the same command again, it resumes") == 1 and "Traceback" not in told
    assert "mend what it says" not in told
    newest = latest_checkpoint(folder / "checkpoints")
    assert newest is not None
    assert checkpoint_step(newest) == run.values("sft", "sft/loss")[-1][0], "only the step under way was lost"
    assert_ends_as(run, gold_run)


def test_a_stage_ends_with_the_pipeline_that_started_it(copy_until: Callable[..., Run], gold_run: Run) -> None:
    """The pipeline is killed and can pass on no signal; its stage still ends and releases the folder."""
    run = copy_until("sft")
    process = start_pipeline(run, stdout=subprocess.DEVNULL)
    process.kill()
    process.wait()
    time.sleep(1)
    assert_ends_as(run, gold_run)  # SFT is refused while another process holds the folder

"""Resuming Trainer stages on other processes than wrote the checkpoint: DeepSpeed's universal checkpoints.

Under ZeRO each process writes its slice. Where their number or the ZeRO stage differs now, the slices are first put
together by DeepSpeed's own converter. Plain checkpoints hold whole tensors and fit any number of processes. Not here:
checkpoints of our own loops, which are whole (`engine.py`).
"""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.files import read_json, write_json
from rlhf.processes import environment_alone, on_first_rank, process_count
from rlhf.runs.folders import Stage
from rlhf.training.zero import STAGES, zero_stage

NOTES = "launch.json"  # of a checkpoint: what wrote it


def note_launch(folder: Path, stage: Stage) -> None:
    """Say in a checkpoint which launch wrote it."""
    write_json(folder / NOTES, {"processes": process_count(), "deepspeed": stage.config.deepspeed})


@contextlib.contextmanager
def fitting_checkpoint(stage: Stage, resume: Path | None, arguments: Any) -> Iterator[Path | None]:
    """The checkpoint in a form that this launch reads: itself, or for its time put together for other processes.

    arguments: the Trainer's, whose DeepSpeed settings are told that the checkpoint is universal.

    Raises: UserError for a checkpoint of a launch with ZeRO where there is none now, or the reverse.
    """
    if resume is None:
        yield None
        return
    written = read_json(resume / NOTES) or {"processes": 1, "deepspeed": "none"}
    before, now = STAGES[written["deepspeed"]], zero_stage(stage.config)
    if bool(before) != bool(now):
        raise UserError(
            f"{resume}: was written with deepspeed={written['deepspeed']}, asked for is deepspeed={stage.config.deepspeed}: "
            "resume with ZeRO what was begun with ZeRO and plainly what was begun plainly, or add overwrite=true"
        )
    if not now or (before == now and written["processes"] == process_count()):
        yield resume
        return
    stage.say(
        f"the checkpoint is of {written['processes']} process(es) with {written['deepspeed']}: put together for "
        f"{process_count()} with {stage.config.deepspeed}"
    )
    folder = stage.folder / "resharded" / resume.name
    on_first_rank(lambda: convert(resume, folder))
    checkpoint = arguments.hf_deepspeed_config.config.setdefault("checkpoint", {})
    checkpoint["load_universal"] = True
    try:
        yield folder
    finally:
        if stage.writes:
            shutil.rmtree(folder.parent, ignore_errors=True)


def convert(checkpoint: Path, folder: Path) -> None:
    """Put the slices of a Trainer's checkpoint together in another folder; the rest of it is linked.

    Raises: UserError where DeepSpeed's converter fails.
    """
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    tag = (checkpoint / "latest").read_text().strip()
    for path in checkpoint.iterdir():
        if path.name not in (tag, "latest"):
            (folder / path.name).symlink_to(path.resolve())
    (folder / tag).mkdir()  # what the Trainer looks for; the universal folder beside it is read
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(checkpoint / tag),
               "--output_folder", str(folder / f"{tag}_universal"), "--num_extract_workers", "1", "--num_merge_workers",
               "1", "--inject_missing_state"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment_alone() | {"DS_ACCELERATOR": "cpu"})
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{checkpoint}: DeepSpeed cannot put it together for other processes ({reason}): resume on as many "
                        "processes as wrote it")  # fmt: skip

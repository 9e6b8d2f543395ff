"""Stages that train nothing: each writes one small file. For tests of run folders."""

import contextlib
from copy import deepcopy
from pathlib import Path

from rlhf.config import Config
from rlhf.runs.folders import hash_of, stage_folder
from rlhf.runs.stage import open_stage
from rlhf.system.files import write_json

from .test_files import checkpoint


def changed(config: Config, **settings: object) -> Config:
    """A copy with other values; `sft__lr` stands for sft.lr."""
    copy = deepcopy(config)
    for name, value in settings.items():
        *groups, last = name.split("__")
        place = copy
        for group in groups:
            place = getattr(place, group)
        setattr(place, last, value)
    return copy


def run_stage(config: Config, name: str, text: str = "weights", **kwargs) -> Path:
    """A stage from beginning to end, whose output is one small file; returns its folder."""
    with open_stage(config, name, **kwargs) as stage:
        stage.model.mkdir(exist_ok=True)
        (stage.model / "weights.txt").write_text(text)
        stage.finish({"loss": 1.5})
    return stage.folder


def write_record(folder: Path, **changes: object) -> None:
    """The record of a finished SFT stage in its folder; `changes` replace parts of it."""
    record = {
        "stage": "sft", "status": "complete", "settings": {}, "parents": {}, "data": {}, "run": "x", "versions": {},
        "seconds": 1.0,
    }  # fmt: skip
    record |= {"files": {}} | changes
    write_json(folder / "stage.json", record | {"hash": hash_of(record)})


class Killed(BaseException):
    pass


def interrupt(config: Config, name: str, **kwargs) -> Path:
    with contextlib.suppress(Killed), open_stage(config, name, **kwargs) as stage:
        stage.seconds_before = 100.0
        checkpoint(stage.checkpoints, 1)
        stage.note_progress()
        raise Killed
    return stage_folder(config, name)


def chain(config: Config, *names: str) -> dict[str, Path]:
    return {name: run_stage(config, name) for name in names}

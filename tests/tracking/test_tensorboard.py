"""TensorBoard: every number is in the event files, and a resumed stage has the repeated steps dropped."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.trackers import make_tracker


def tracker(folder: Path, resume_step: int = 0) -> Any:
    return make_tracker("tensorboard", folder=folder, run="r", stage="ppo", config={"seed": 1}, resume_step=resume_step)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_numbers_and_text_are_in_the_event_files(tmp_path: Path) -> None:
    with tracker(tmp_path) as writer:
        for step in range(1, 7):
            writer.log({"objective/kl": 0.5 * step}, step=step, episodes=64 * step)
        writer.samples(6, [{"id": "p", "prompt": "a", "response": "<script>alert(1)</script>"}])
        writer.table("calibration", ["gap"], [[0.5]])
        writer.summary({"objective/kl": 3.0})
    with tracker(tmp_path, resume_step=4) as writer:
        for step in range(5, 9):
            writer.log({"objective/kl": 0.5 * step}, step=step)
    found = scalars(tmp_path)
    assert found["objective/kl"] == [(step, 0.5 * step) for step in range(1, 9)]
    assert found["progress/episodes"][0] == (1, 64.0)
    content = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"    <script>alert(1)</script>" in content, "as a block of code"
    assert [row["progress/step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, 9))


def test_a_fresh_start_leaves_nothing_of_the_old_run(tmp_path: Path) -> None:
    for steps in (5, 2):
        with tracker(tmp_path) as writer:
            for step in range(1, steps + 1):
                writer.log({"objective/kl": 1.0}, step=step)
    assert len(scalars(tmp_path)["objective/kl"]) == 2


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tensorboard is not installed: run pip install 'rlhf-recipe\[tensorboard\]'"):
        tracker(tmp_path)

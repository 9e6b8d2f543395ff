import json
import logging
import math
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf.config import Config, TrackingConfig
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.stage import Stage
from rlhf.runs.trackers import Background, Tracker

SAMPLE = {"id": "p", "prompt": "a", "response": "b"}


def tracker(folder: Path, kind: str = "jsonl", resume_step: int = 0, writes: bool = True) -> Any:
    config = Config(run="r", tracking=TrackingConfig(kind))
    return Tracker(Stage(config, "ppo", folder, {}, {}, writes=writes), resume_step)


def lines(path: Path) -> list[dict[str, Any]]:
    """Strict reading: every line must be JSON without NaN."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"not JSON: {constant}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_have_the_axes_and_are_there_at_once(tmp_path: Path) -> None:
    with tracker(tmp_path) as writer:
        writer.log({"objective/kl": 2.25}, step=3, episodes=96, tokens=4096)
        (row,) = lines(tmp_path / "metrics.jsonl")  # before finish: flushed
        writer.log({"eval/dev/loss": 1.0}, step=3)
        writer.log({"objective/kl": -0.01}, step=4)
        writer.log({"objective/kl": math.nan}, step=5)
    assert row.pop("time/elapsed_s") >= 0
    axes = {"progress/step": 3, "progress/episodes": 96, "progress/tokens": 4096}
    assert row == axes | {"objective/kl": 2.25, "objective/sqrt_kl": 1.5}
    _, second, negative, missing = lines(tmp_path / "metrics.jsonl")
    assert second == axes | {"eval/dev/loss": 1.0, "time/elapsed_s": second["time/elapsed_s"]}
    assert "progress/episodes" not in negative, "another step"
    assert [row["objective/sqrt_kl"] for row in (negative, missing)] == [0.0, None], "no root of a negative estimate"


def test_an_unknown_name_is_refused_values_that_are_not_finite_become_null_and_text_stays(tmp_path, caplog):
    with tracker(tmp_path) as writer, pytest.raises(ValueError, match=r"unknown metric 'objective/klx'"):
        writer.log({"objective/kl": 1.0, "objective/klx": 1.0}, step=1)
    assert list(read_jsonl(tmp_path / "metrics.jsonl")) == []
    text = "naïve\nline \u2028 <script> \ud800 end"  # a lone surrogate has no UTF-8 form
    whole = SAMPLE | {"prompt": text, "response": text, "score": 1, "gold": {"total": 0.5}, "parts": {"a": 1.5}}
    with caplog.at_level(logging.WARNING), tracker(tmp_path) as writer:
        for step, value in enumerate((math.nan, math.inf)):
            writer.log({"loss/policy_avg": value, "objective/kl": 1.0}, step=step)
        writer.samples(2, [SAMPLE | {"score": math.nan, "parts": {"a": math.nan}}])
        writer.samples(4, [whole])
    rows = lines(tmp_path / "metrics.jsonl")
    assert [(row["loss/policy_avg"], row["objective/kl"]) for row in rows] == [(None, 1.0)] * 2
    row, kept = read_jsonl(tmp_path / "samples.jsonl")
    assert (row["score"], row["parts"]) == (None, {"a": None}) and kept == {"step": 4, "kl": None} | whole
    assert sum("loss/policy_avg" in record.getMessage() for record in caplog.records) == 1


def test_resume_repeats_no_step_and_loses_none(tmp_path: Path) -> None:
    for _ in range(2):  # a fresh start leaves nothing of the run before
        with tracker(tmp_path) as writer:
            for step in range(6):
                writer.log({"objective/kl": float(step)}, step=step)
                writer.samples(step, [SAMPLE | {"response": str(step)}])
    for name in ("metrics.jsonl", "samples.jsonl"):
        text = re.sub(r'("time/elapsed_s": )[\d.]+', r"\g<1>500.0", (tmp_path / name).read_text())
        (tmp_path / name).write_text(text + '{"progress/step": 6, "step": 6, "objec')  # died in the middle of a line
    with tracker(tmp_path, resume_step=3) as writer:
        for step in range(4, 7):
            writer.log({"objective/kl": 10.0 + step}, step=step)
            writer.samples(step, [SAMPLE | {"response": "again"}])
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["progress/step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["objective/kl"] for row in rows] == [0, 1, 2, 3, 14, 15, 16]
    assert min(row["time/elapsed_s"] for row in rows[4:]) >= 500.0, "the clock continues"
    assert [row["response"] for row in lines(tmp_path / "samples.jsonl")] == list("0123") + ["again"] * 3


def test_off_writes_numbers_alone_and_another_rank_nothing(tmp_path: Path) -> None:
    for name, writes in (("off", True), ("silent", False)):
        with tracker(tmp_path / name, "off", writes=writes) as writer:
            writer.log({"objective/kl": 0.5}, step=0)
            writer.samples(0, [SAMPLE])
    assert [path.name for path in tmp_path.glob("*/*")] == ["metrics.jsonl"] and not (tmp_path / "silent").exists()


class Recorder:
    """A sink that notes its calls; a name in `fails` raises."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            if name in self.fails:
                raise ConnectionError("broken\npipe")
            self.calls.append((name, *arguments))

        return call


def feed(view: Background, steps: int) -> None:
    for step in range(steps):
        view.call("samples", [{}], step)
        view.call("table", "t", [], [])
        view.call("log", {"a": 1.0}, step)
    view.finish(False)


@pytest.mark.parametrize("fails", ["", "samples", "log"])
def test_calls_are_in_order_and_what_fails_is_reported_once(caplog: pytest.LogCaptureFixture, fails: str) -> None:
    sink = Recorder(fails=(fails,))
    feed(Background(lambda: sink, 5.0), 2)
    done = [call[0] for call in sink.calls]
    assert done == [call for call in ("samples", "table", "log") * 2 + ("finish",) if call != fails]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(fails)
    wanted = f"Weights & Biases could not {fails} (ConnectionError: broken pipe): continuing"
    assert all(text.startswith(wanted) for text in told)


def test_nothing_waits_for_a_start_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def start() -> Recorder:
        release.wait(20)
        raise RuntimeError("too late to be told")

    view = Background(start, 0.3)
    started = time.monotonic()
    for step in range(1000):
        view.call("log", {"a": 1.0}, step)
    assert time.monotonic() - started < 0.2
    view.finish(False)
    assert 0.25 < time.monotonic() - started < 3
    release.set()
    view._thread.join(5)
    remedy = "continuing without it, metrics.jsonl and samples.jsonl have everything"
    assert [record.getMessage() for record in caplog.records] == [f"Weights & Biases did not finish in 0 s: {remedy}"]

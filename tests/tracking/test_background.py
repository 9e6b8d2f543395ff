"""The thread between training and a service: order, failures, and limits on how long anything may take."""

import logging
import threading
import time
from typing import Any

import pytest

from rlhf.runs import trackers
from rlhf.runs.trackers import Background


class Recorder:
    """A sink that notes its calls; what stands in `fails` raises, and `gate` makes `log` wait."""

    def __init__(self, fails: tuple[str, ...] = (), gate: threading.Event | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails, self.gate = fails, gate

    def _call(self, *call: Any) -> None:
        if call[0] in self.fails:
            raise ConnectionError("broken\npipe")
        self.calls.append(call)

    def log(self, row: Any, step: int) -> None:
        if self.gate is not None:
            self.gate.wait(10)
        self._call("log", dict(row), step)

    def samples(self, rows: Any, step: int) -> None:
        self._call("samples", rows, step)

    def table(self, name: str, columns: Any, rows: Any) -> None:
        self._call("table", name)

    def summary(self, values: Any) -> None:
        self._call("summary", dict(values))

    def finish(self, failed: bool) -> None:
        self._call("finish", failed)


def test_calls_are_made_in_their_order() -> None:
    sink = Recorder()
    view = Background("View", lambda: sink, 5.0)
    view.call("log", {"a": 1.0}, 1)
    view.call("samples", [{}], 1)
    view.call("summary", {"a": 1.0})
    view.finish(True)
    assert sink.calls == [("log", {"a": 1.0}, 1), ("samples", [{}], 1), ("summary", {"a": 1.0}), ("finish", True)]


def test_a_table_that_fails_costs_no_number(caplog: pytest.LogCaptureFixture) -> None:
    sink = Recorder(fails=("samples",))
    view = Background("View", lambda: sink, 5.0)
    for step in range(3):
        view.call("samples", [{}], step)
        view.call("table", "t", [], [])
        view.call("log", {"a": 1.0}, step)
    view.finish(False)
    assert [call[0] for call in sink.calls] == ["log"] * 3 + ["finish"]
    (told,) = [record.getMessage() for record in caplog.records]
    assert "View could not show samples (ConnectionError: broken pipe): continuing without its tables" in told


def test_a_number_that_fails_ends_it_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    view = Background("View", lambda: Recorder(fails=("log",)), 5.0)
    for step in range(3):
        view.call("log", {"a": 1.0}, step)
    view.finish(False)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "View could not log (ConnectionError: broken pipe)" in told


def test_nothing_waits_for_a_start_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def start() -> Recorder:
        release.wait(20)
        raise RuntimeError("too late to be told")

    view = Background("View", start, 0.3)
    started = time.monotonic()
    for step in range(1000):
        view.call("log", {"a": 1.0}, step)
    assert time.monotonic() - started < 0.2
    view.finish(False)
    assert 0.25 < time.monotonic() - started < 3
    release.set()
    time.sleep(0.2)
    assert [record.getMessage() for record in caplog.records] == [
        "View did not finish in 0 s: continuing without it, metrics.jsonl has everything"
    ]


def test_a_service_that_does_not_keep_up_costs_no_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "QUEUE_CALLS", 10)
    gate = threading.Event()
    sink = Recorder(gate=gate)
    with caplog.at_level(logging.WARNING):
        view = Background("View", lambda: sink, 5.0)
        for step in range(100):
            view.call("log", {"a": 1.0}, step)
    threading.Timer(0.3, gate.set).start()
    view.finish(False)  # the queue is full now: the end waits for its place
    assert sink.calls[-1] == ("finish", False)
    assert 10 <= len(sink.calls) - 1 <= 12
    assert sum("does not keep up" in record.getMessage() for record in caplog.records) == 1

import sys
from types import SimpleNamespace

import pytest
import torch

from rlhf.cpu import machine as threads
from rlhf.cpu.machine import ThreadCount, adapting_threads

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's clocks")


class Machine:
    """Two cores: per second this process takes `own`, and `idle` is left."""

    def __init__(self):
        self.time = self.own_seconds = self.idle_seconds = 0.0
        self.used: list[int] = []

    def run(self, count: ThreadCount, seconds: float, own: float, idle: float) -> None:
        """Steps of a quarter of a second."""
        for _ in range(int(seconds * 4)):
            self.time += 0.25
            self.own_seconds += 0.25 * own
            self.idle_seconds += 0.25 * idle
            count.look()


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def count(machine, monkeypatch) -> ThreadCount:
    monkeypatch.setattr(threads, "processor_seconds", lambda: machine.own_seconds + machine.idle_seconds)
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: machine.time))
    monkeypatch.setattr(torch, "set_num_threads", machine.used.append)
    return ThreadCount(2)


@pytest.mark.parametrize(
    ("available", "most", "fitting"),
    [(2.0, 2, 2), (1.8, 2, 2), (1.33, 2, 1), (0.4, 2, 1), (7.5, 8, 7), (9.0, 8, 8), (0.0, 8, 1)],
)
def test_as_many_threads_as_there_are_whole_cores(machine, count, available, most, fitting):
    count.most = most
    machine.run(count, 1, own=available, idle=0.0)
    assert count.fitting == fitting


def test_an_idle_machine_keeps_all_threads(machine, count):
    machine.run(count, 60, own=1.9, idle=0.05)
    machine.run(count, 5, own=0.1, idle=1.85)  # it waits for a disk
    assert machine.used == []


def test_other_work_leaves_one_thread_until_it_is_gone(machine, count):
    machine.run(count, 1, own=1.0, idle=0.0)  # two busy loops, each on a core with one of the two threads
    assert machine.used == [1]
    machine.run(count, 30, own=0.7, idle=0.0)  # one thread beside them
    assert machine.used == [1]
    machine.run(count, 1, own=1.0, idle=1.0)
    assert machine.used == [1], "one window may be a pause"
    machine.run(count, 1, own=1.0, idle=1.0)
    assert machine.used == [1, 2]


@linux
def test_a_number_that_was_set_stays(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert adapting_threads(2, cpu, 1) is None and adapting_threads(0, cpu, 2) is None
    assert adapting_threads(0, torch.device("cuda"), 1) is None
    assert adapting_threads(0, cpu, 1) is not None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert adapting_threads(0, cpu, 1) is None

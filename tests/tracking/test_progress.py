"""The progress line: plain lines in a log, quiet when off, rates of this process alone."""

import io

import pytest

from rlhf.runs import progress as module
from rlhf.runs.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        import pty

        self.ends = pty.openpty()
        return self.ends[1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.delenv("RLHF_PROGRESS", raising=False)
    return now


def test_plain_lines_are_few_and_tell_the_time_left(clock: list[float]) -> None:
    out = io.StringIO()
    with progress(10, "ppo", unit="update", initial=4, stream=out) as bar:
        for number in range(6):
            clock[0] += 4.0
            bar.update(kl=0.5 * number)
    lines = out.getvalue().splitlines()
    # Updates at 4, 8, 12, 16, 20, 24 s: told at the first, 12 s later than that, and at the end.
    assert lines == [
        "ppo: update 5/10 (50%)  20 s left  4 s/update  kl 0",
        "ppo: update 8/10 (80%)  8 s left  4 s/update  kl 1.5",
        "ppo: update 10/10 (100%)  24 s taken  4 s/update  kl 2.5",
    ]


def test_off_is_silent_even_on_a_terminal(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_PROGRESS", "off")
    out = Terminal()
    with progress(3, "sft", stream=out) as bar:
        bar.update(2, loss=1.0)
    assert out.getvalue() == "" and bar.done == 2


def test_a_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with progress(3, "sft", stream=out) as bar:
        for _ in range(3):
            bar.update(loss=1.25)
    last = out.getvalue().split("\r")[-1]
    assert "3/3" in last and "loss 1.25" in last and "100%" in last
    assert out.getvalue().count("\n") == 1  # the one at the end

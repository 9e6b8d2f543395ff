import contextlib
import io
import math

import pytest

from rlhf.runs import progress as module
from rlhf.runs.metric_table import METRICS, REDUCTIONS, Sums, check_names, find
from rlhf.runs.progress import Progress


def test_the_table_is_well_formed_and_other_names_are_refused():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.reduction in REDUCTIONS and metric.mask and metric.meaning, metric.name
    for name in ("eval/heldout/bpb", "eval/dev/accuracy", "gold/correct", "eval/heldout_labelers/accuracy", "time/mfu"):
        assert find(name) is not None
    pattern = find("eval/dev/gold/polite")
    assert pattern is not None and pattern.name == "eval/<split>/gold/<part>"
    assert find("objective/scores/function_1/a/B") is find("objective/scores/length")
    for name in ("", "objective/KL", "objective/kl ", "kl", "eval/loss", "eval//loss", "eval/dev/nonsense", "eval/a/b/loss",
                 "gold/", "eval/<split>/loss", "train/loss", "objective/kl\n"):  # fmt: skip
        assert find(name) is None, name
        with pytest.raises(ValueError, match="unknown metric"):
            check_names(["objective/kl", name])


def test_means_are_global_not_means_of_means() -> None:
    # 3 sequences with KL 1 each, then 1 with KL 5: (3 + 5) / 4 = 2, where a mean of means is 3.
    sums = Sums()
    sums.add("objective/kl", 3.0, 3)
    other = Sums()
    other.add("objective/kl", 5.0, 1)
    sums.merge(other.state())
    assert sums.reduce() == {"objective/kl": 2.0}


def test_std_explained_variance_max_and_last() -> None:
    sums = Sums()
    # 1, 2, 3, 4: mean 2.5, mean of squares 7.5, variance 1.25.
    sums.add("reward/std", 3.0, 5.0, 2)
    sums.add("reward/std", 7.0, 25.0, 2)
    # Errors 1, -1 (variance 1), returns 2, 6 (mean 4, squares 40, variance 4): 1 - 1/4.
    sums.add("val/explained_var", 0.0, 2.0, 8.0, 40.0, 2)
    sums.add("policy/ratio_max", 1.5)
    sums.add("policy/ratio_max", 1.2)
    sums.add("optim/lr", 0.1)
    sums.add("optim/lr", 0.05)
    reduced = sums.reduce()
    assert reduced["reward/std"] == pytest.approx(math.sqrt(1.25), abs=1e-12)
    assert reduced["val/explained_var"] == pytest.approx(0.75, abs=1e-12)
    assert reduced["policy/ratio_max"] == 1.5
    assert reduced["optim/lr"] == 0.05


def test_a_maximum_keeps_nan_and_nothing_counted_is_left_out():
    for values in ([1.0, math.nan, 2.0], [math.nan, 1.0]):
        sums = Sums()
        for value in values:
            sums.add("policy/ratio_max", value)
        assert math.isnan(sums.reduce()["policy/ratio_max"])
    sums = Sums()
    sums.add("loss/ptx_avg", 0.0, 0)
    sums.add("val/explained_var", 0.0, 0.0, 4.0, 8.0, 2)  # returns 2, 2: no variance to explain
    assert sums.reduce() == {}


def test_wrong_sums_are_refused() -> None:
    with pytest.raises(ValueError, match=r"objective/kl: reduction 'mean' takes \(total, count\), got 1"):
        Sums().add("objective/kl", 2.0)
    with pytest.raises(ValueError, match="unknown metric"):
        Sums().add("objective/nothing", 2.0, 1)


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
    with contextlib.redirect_stderr(out), Progress(10, "ppo", unit="update", initial=4) as bar:
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


def test_a_terminal_gets_one_live_line_unless_it_is_off(clock, monkeypatch):
    monkeypatch.setenv("RLHF_PROGRESS", "off")
    out = Terminal()
    with contextlib.redirect_stderr(out), Progress(3, "sft") as bar:
        bar.update(2, loss=1.0)
    assert out.getvalue() == "" and bar.done == 2
    monkeypatch.delenv("RLHF_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with contextlib.redirect_stderr(out), Progress(3, "sft") as bar:
        for _ in range(3):
            bar.update(loss=1.25)
    last = out.getvalue().split("\r")[-1]
    assert "3/3" in last and "loss 1.25" in last and "100%" in last
    assert out.getvalue().count("\n") == 1  # the one at the end

"""The table of names: complete, well-formed, and sums that join over batches and ranks."""

import math

import pytest

from rlhf.runs.metric_table import METRICS, REDUCTIONS, Sums, check_names, find


def test_the_table_is_well_formed() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.reduction in REDUCTIONS and metric.mask and metric.meaning, metric.name
    for name in ("eval/heldout/bpb", "eval/dev/accuracy", "gold/correct", "eval/heldout_labelers/accuracy", "time/mfu"):
        assert find(name) is not None
    pattern = find("eval/dev/gold/polite")
    assert pattern is not None and pattern.name == "eval/<split>/gold/<part>"


def test_other_names_are_refused_with_the_nearest() -> None:
    for name in ("", "objective/KL", "objective/kl ", "kl", "eval/loss", "eval//loss", "eval/dev/nonsense", "eval/a/b/loss",
                 "gold/", "gold/a/b", "eval/<split>/loss", "gold/<part>", "train/loss", "objective/kl\n"):  # fmt: skip
        assert find(name) is None, name
        with pytest.raises(ValueError, match="unknown metric"):
            check_names(["objective/kl", name])
    with pytest.raises(ValueError, match=r"'objective/klcoef' \(nearest: objective/kl_coef\)"):
        check_names(["objective/klcoef"])


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


def test_a_maximum_keeps_nan() -> None:
    for values in ([1.0, math.nan, 2.0], [math.nan, 1.0]):
        sums = Sums()
        for value in values:
            sums.add("policy/ratio_max", value)
        assert math.isnan(sums.reduce()["policy/ratio_max"])


def test_nothing_counted_is_left_out() -> None:
    sums = Sums()
    sums.add("loss/ptx_avg", 0.0, 0)
    sums.add("val/explained_var", 0.0, 0.0, 4.0, 8.0, 2)  # returns 2, 2: no variance to explain
    assert sums.reduce() == {}


def test_wrong_sums_are_refused() -> None:
    with pytest.raises(ValueError, match=r"objective/kl: reduction 'mean' takes \(total, count\), got 1"):
        Sums().add("objective/kl", 2.0)
    with pytest.raises(ValueError, match="unknown metric"):
        Sums().add("objective/nothing", 2.0, 1)

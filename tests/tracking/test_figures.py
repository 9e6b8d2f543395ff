"""Pictures: the averages by hand, thinning that keeps peaks, and SVG that a strict page can hold."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from rlhf.tracking.charts import Chart, expand, make_figure, make_frontier, make_stage_figures
from rlhf.tracking.figures import (
    MAX_HOVERS,
    Curve,
    Mark,
    Series,
    draw,
    format_value,
    is_noisy,
    is_number,
    moving_average,
    thin,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.03124, "0.03124"), (12.346, "12.35"), (1.5e-4, "1.5e-4"), (-2e-5, "-2e-5"),
     (12_000, "12k"), (2_560_000, "2.56M"), (1300.0, "1300")],
)  # fmt: skip
def test_values_are_short(value: float, text: str) -> None:
    assert format_value(value) == text


def test_numbers_that_can_be_shown() -> None:
    assert [is_number(v) for v in (1, 0.5, float("nan"), float("inf"), True, "1", None)] == [True] * 2 + [False] * 5


def test_moving_average_by_hand() -> None:
    # reach 1: (1+2+6)/3 = 3 and (2+6+4)/3 = 4 inside, and the ends alone: h = 0.
    assert moving_average([1.0, 2.0, 6.0, 4.0], reach=1) == [1.0, 3.0, 4.0, 4.0]


def test_moving_average_does_not_shift_a_slope() -> None:
    slope = [0.5 * i for i in range(100)]
    assert moving_average(slope, reach=3) == pytest.approx(slope, abs=1e-12)


def test_only_a_curve_that_zigzags_is_noisy() -> None:
    assert not is_noisy([0.1 * i for i in range(200)])
    assert is_noisy([float(i % 2) for i in range(200)])
    assert not is_noisy([float(i % 2) for i in range(10)])  # few points: show them


def test_thinning_keeps_peaks_and_order() -> None:
    ys = [0.0] * 10_000
    ys[4321], ys[8765] = 9.0, -7.0
    xs, thinned = thin(list(range(10_000)), ys, limit=100)
    assert len(xs) <= 100 and xs == sorted(xs)
    assert (xs[thinned.index(9.0)], xs[thinned.index(-7.0)]) == (4321, 8765)


def test_a_picture_is_wellformed_and_takes_the_pages_colours() -> None:
    xs = [float(x) for x in range(500)]
    noisy = Series("a <b>", xs, [x % 7 for x in xs])
    sparse = Series("dev", [0.0, 250.0, 499.0], [1.0, 2.0, 3.0], colour=1, dots=True)
    svg = draw(Curve([noisy, sparse], [Mark("ceiling & co", 5.0)]))
    root = ElementTree.fromstring(svg)
    assert not re.search(r"#[0-9a-f]{6}|url\(|href|<script|<style| id=|http", svg)
    assert "var(--s0)" in svg and "var(--s1)" in svg and "var(--grid)" in svg
    strips = root.findall("g[@class='at']")
    assert 10 < len(strips) <= MAX_HOVERS
    told = [strip.findtext("text") for strip in strips]
    assert "step 499  a <b> 2  dev 3" in told  # 499 mod 7 = 2; where most curves have a value is preferred
    # The strips tile the whole width: the pointer always finds one.
    widths = [float(strip.find("rect").get("width")) for strip in strips]  # type: ignore[union-attr,arg-type]
    assert sum(widths) == pytest.approx(380, abs=5)


def test_tick_labels_keep_their_digits() -> None:
    svg = draw(Curve([Series("lr", [0.0, 1.0], [0.0, 0.0025])]))
    labels = re.findall(r">([^<>]+)</text>", svg)
    assert "0.002" in labels


@pytest.mark.parametrize("ys", [[1.0], [2.0, 2.0], [0.0, 0.0], [1e-12, 1e-12], [-1e20, 1e20]])
def test_odd_ranges_can_be_drawn(ys: list[float]) -> None:
    ElementTree.fromstring(draw(Curve([Series("x", [float(i) for i in range(len(ys))], ys)])))


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        draw(Curve([Series("x", [], [])]))


POINTS = {
    "objective/kl": ([1.0, 2.0, 3.0], [0.5, 1.0, 1.5]),
    "objective/scores": ([1.0, 2.0, 3.0], [0.1, 0.2, 0.3]),
    "gold/total": ([1.0, 3.0], [0.7, 0.8]),
    "gold/polite": ([1.0, 3.0], [0.6, 0.9]),
    "eval/dev/loss": ([1.0], [0.4]),
    "eval/heldout/loss": ([1.0], [0.5]),
    "eval/dev/gold/total": ([1.0], [0.5]),
    "time/samples_per_s": ([1.0, 2.0], [3.0, 4.0]),
}


def test_names_expand_to_the_metrics_at_hand() -> None:
    assert expand("eval/*/loss", POINTS) == [("eval/dev/loss", "dev"), ("eval/heldout/loss", "held-out")]
    assert expand("eval/*/gold/total", POINTS) == [("eval/dev/gold/total", "dev")]
    assert expand("objective/kl=KL", POINTS) == [("objective/kl", "KL")]
    assert expand("sft/loss", POINTS) == []


def test_a_chart_leaves_out_what_it_is_told_to() -> None:
    figure = make_figure(Chart("Parts", ("gold/*", "-gold/total")), POINTS, [])
    assert figure is not None and "gold/polite" in figure["meaning"]
    assert "gold/total" not in figure["meaning"]
    assert make_figure(Chart("None", ("sft/loss",)), POINTS, []) is None


def test_scores_against_kl_join_by_step() -> None:
    titles = {figure["title"]: figure["svg"] for figure in make_frontier(POINTS)}
    assert set(titles) == {"Score against KL", "Gold score against KL"}
    assert "KL 1.5  0.8" in titles["Gold score against KL"]  # step 3, the second gold point
    assert list(make_frontier({})) == []


def test_no_metric_is_lost() -> None:
    figures = list(make_stage_figures("ppo", POINTS, {}))
    rest = [figure["title"] for figure in figures if figure.get("rest")]
    assert rest == ["time/samples_per_s"]  # one point alone, as eval/dev/loss here, is no curve

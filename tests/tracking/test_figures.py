"""Pictures: long and noisy curves, and SVG that a strict page can hold."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from rlhf.report.pictures import (
    Mark,
    Picture,
    Series,
    draw_svg,
    make_figure,
    make_frontier,
    make_stage_figures,
)
from rlhf.runs.metric_table import Chart


def test_a_long_curve_is_drawn_short_with_its_peaks() -> None:
    ys = [float(i % 2) for i in range(100_000)]
    ys[43_210], ys[87_650] = 9.0, -7.0
    svg = draw_svg(Picture("t", [Series("x", [float(i) for i in range(100_000)], ys)]))
    assert len(svg) < 60_000
    heights = [float(y) for d in re.findall(r' d="([^"]*)"', svg) for y in re.findall(r"[ML] ?[-\d.]+ ([-\d.]+)", d)]
    top, bottom = 20 + 170 * 0.07 / 1.14, 168 - 148 * 0.07 / 1.14  # the margins of the picture
    assert min(heights) < top and max(heights) > bottom - 2


def test_a_picture_is_wellformed_and_takes_the_pages_colours() -> None:
    xs = [float(x) for x in range(500)]
    noisy = Series("a <b>", xs, [x % 7 for x in xs])
    sparse = Series("dev", [0.0, 250.0, 499.0], [1.0, 2.0, 3.0], colour=1, dots=True)
    svg = draw_svg(Picture("t", [noisy, sparse], [Mark("ceiling & co", 5.0)]))
    root = ElementTree.fromstring(svg)
    assert not re.search(r"#[0-9a-f]{6}\b|url\(|<script|<style|http", svg)
    assert "var(--s0)" in svg and "var(--s1)" in svg and "var(--grid)" in svg
    assert len(root.findall(".//use")) == 3, "a dot per point of a sparse curve"


POINTS = {
    "objective/kl": ([1.0, 2.0, 3.0], [0.5, 1.0, 1.5]),
    "objective/scores": ([1.0, 2.0, 3.0], [0.1, 0.2, 0.3]),
    "gold/total": ([1.0, 3.0], [0.7, 0.8]),
    "gold/polite": ([1.0, 3.0], [0.6, 0.9]),
    "eval/dev/loss": ([1.0], [0.4]),
    "eval/heldout/loss": ([1.0], [0.5]),
    "eval/dev/gold/total": ([1.0], [0.5]),
    "optim/steps": ([1.0, 2.0], [3.0, 4.0]),
}


def test_names_expand_to_the_metrics_at_hand() -> None:
    assert Chart("", ("eval/*/loss",)).expand(POINTS) == [("eval/dev/loss", "dev"), ("eval/heldout/loss", "held-out")]
    assert Chart("", ("eval/*/gold/total",)).expand(POINTS) == [("eval/dev/gold/total", "dev")]
    assert Chart("", ("objective/kl=KL",)).expand(POINTS) == [("objective/kl", "KL")]
    assert Chart("", ("gold/*", "-gold/total")).expand(POINTS) == [("gold/polite", "polite")]
    assert make_figure(Chart("None", ("sft/loss",)), [("r", POINTS)], []) is None


def test_of_one_run_colours_are_curves_and_of_several_they_are_runs() -> None:
    chart = Chart("Reward", ("objective/scores=score", "objective/kl=KL"))
    one = make_figure(chart, [("a", POINTS)], [])
    assert one is not None
    assert [(s.label, s.colour, s.dash) for s in one.series] == [("score", 0, 0), ("KL", 1, 0)]
    other = {"objective/scores": ([1.0, 2.0], [0.0, 1.0])}
    two = make_figure(chart, [("a", POINTS), ("b", other)], [])
    assert two is not None
    drawn = [(s.label, s.colour, s.dash) for s in two.series]
    assert drawn == [("a score", 0, 0), ("b score", 1, 0), ("a KL", 0, 1)]
    ElementTree.fromstring(two.svg)


def test_scores_against_kl_join_by_step() -> None:
    pictures = {figure.title: figure for figure in make_frontier([("r", POINTS)])}
    assert set(pictures) == {"Reward against the root of KL", "Gold score against the root of KL"}
    (gold,) = pictures["Gold score against the root of KL"].series
    # Steps 1 and 3 have a gold score: KL 0.5 and 1.5, roots 0.7071 and 1.2247.
    assert gold.xs == pytest.approx([0.70711, 1.22474], abs=1e-4) and gold.ys == [0.7, 0.8]
    assert list(make_frontier([("r", {})])) == []


def test_no_metric_is_lost() -> None:
    figures = list(make_stage_figures("ppo", [("r", POINTS)], {}))
    rest = [figure.title for figure in figures if figure.rest]
    assert rest == ["optim/steps"]  # one point alone, as eval/dev/loss here, is no curve

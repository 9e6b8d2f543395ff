"""The report's pictures of the charts in `runs/charts.py`, of results and of studies. `figures.py` draws them.

For one run, colours distinguish the curves; for several, colours distinguish the runs and dashes the curves.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.report.figures import (
    BOTTOM,
    DASHES,
    HEIGHT,
    SERIES_COLOURS,
    WIDTH,
    Curve,
    Mark,
    Series,
    for_log,
    format_value,
    thin,
)
from rlhf.report.inline_svg import draw, interval_text
from rlhf.runs.charts import CHARTS, Chart
from rlhf.runs.metrics import find
from rlhf.runs.run_files import Points

Runs = Sequence[tuple[str, Points]]  # (run's name, its measurements)


# Shown elsewhere on the page.
NOT_DRAWN = ("time/elapsed_s",)
# A curve of at most this many points, such as occasional evaluations, gets a dot per point.
DOTS_UP_TO = 25
HALF_WIDTH, HALF_HEIGHT = 580.0, 230.0
TABLE_POINTS = 12


@dataclass(slots=True)
class Picture:
    """A curve with its texts; the template's `picture` macro shows it, and `--figures` saves it."""

    title: str
    curve: Curve
    stage: str = ""
    unit: str = ""
    meaning: str = ""
    note: str = ""
    half: bool = False
    rest: bool = False  # of a metric that no Chart names
    legend: list[dict[str, Any]] | None = None  # None: every curve by name

    def __post_init__(self) -> None:
        if self.legend is None:
            self.legend = make_legend(self.curve.series, named=True, last=False)

    @property
    def name(self) -> str:
        """A file name."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.stage} {self.title}".lower()).strip("-")

    def _size(self) -> tuple[float, float]:
        width, height = (HALF_WIDTH, HALF_HEIGHT) if self.half else (WIDTH, HEIGHT)
        return width, height + self.curve.bottom - BOTTOM

    @property
    def svg(self) -> str:
        return draw(self.curve, *self._size())

    @property
    def log_svg(self) -> str:
        """The same over a logarithmic axis; empty if that shows nothing."""
        curve = for_log(self.curve)
        return draw(curve, *self._size(), log=True) if curve is not None else ""

    @property
    def table(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """(curve, its points as text), for readers with a keyboard: few points that keep the peaks."""
        return [
            (
                one.label,
                [
                    (
                        self.curve.names[int(x)] if self.curve.names else format_value(x),
                        format_value(y) + interval_text(one, x, y),
                    )
                    for x, y in zip(*thin(one.xs, one.ys, max(TABLE_POINTS, len(self.curve.names))), strict=True)
                ],
            )
            for one in self.curve.series
        ]


def make_figure(chart: Chart, runs: Runs, marks: list[Mark], stage: str = "") -> Picture | None:
    """One picture; None if none of its metrics has two points in any run."""
    metrics, several = metrics_of(chart, runs), len(runs) > 1
    series = []
    for number, (metric, label) in enumerate(metrics):
        for place, (run, points) in enumerate(runs):
            if metric in points:
                name = (f"{run} {label}" if len(metrics) > 1 else run) if several else label
                colour, dash = (place, number % len(DASHES)) if several else (number, 0)
                xs, ys = points[metric]
                series.append(Series(name, xs, ys, colour, dots=len(xs) <= DOTS_UP_TO, dash=dash))
    if max((len(one.xs) for one in series), default=0) < 2:  # one point is no curve
        return None
    first = find(metrics[0][0])
    unit = first.unit if first and first.unit.lower() not in chart.title.lower() else ""
    label = f"{chart.title}: {', '.join(one.label for one in series)}"
    return Picture(
        chart.title,
        Curve(series, marks, label=label, y_name=first.unit if first else ""),
        stage,
        unit,
        "; ".join(f"{name}: {row.meaning}" for name, _ in metrics if (row := find(name))),
        half=chart.half,
        legend=make_legend(series, named=several or len(metrics) > 1),
    )


def metrics_of(chart: Chart, runs: Runs) -> list[tuple[str, str]]:
    """The (metric, label) pairs that the chart shows of these runs."""
    return chart.expand(dict.fromkeys(metric for _, points in runs for metric in points))


def make_legend(series: list[Series], named: bool, last: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "label": one.label if named else "",
            "colour": one.colour % SERIES_COLOURS,
            "dash": one.dash,
            "last": format_value(one.ys[-1]) if last else "",
        }
        for one in series
    ]


def make_stage_figures(stage: str, runs: Runs, marks: dict[str, list[Mark]]) -> Iterator[Picture]:
    """The pictures of a stage in the order of CHARTS, then one for every metric that no Chart names.

    marks: levels to draw, by the title of the Chart.
    """
    shown = {*NOT_DRAWN}
    for chart in CHARTS.get(stage, ()):
        shown |= dict(metrics_of(chart, runs)).keys()
        if chart.x:
            yield from make_frontier(runs)
            continue
        for part in split_chart(chart, runs):
            if figure := make_figure(part, runs, marks.get(chart.title, []), stage):
                yield figure
    for metric in dict.fromkeys(name for _, points in runs for name in points):
        if metric not in shown and (figure := make_figure(Chart(metric, (metric,)), runs, [], stage)):
            figure.rest = True
            yield figure


def split_chart(chart: Chart, runs: Runs) -> list[Chart]:
    """The chart, or one for each of its curves if several runs would need more kinds of dashes than there are."""
    metrics = metrics_of(chart, runs)
    if len(runs) == 1 or len(metrics) <= len(DASHES):
        return [chart]
    return [Chart(f"{chart.title}: {label}", (metric,)) for metric, label in metrics]


def make_frontier(runs: Runs) -> Iterator[Picture]:
    """Scores against sqrt(KL), which shows over-optimisation: the true score falls while the learned one rises.

    Held-out measurements if there are some, else the rollouts'. Source: Gao et al. 2022, figure 1.
    """
    splits = sorted({metric.split("/")[1] for metric, _ in metrics_of(Chart("KL", ("eval/*/kl",)), runs)})
    sources = [(f"eval/{s}/kl", f"eval/{s}/scores", f"eval/{s}/gold/total", s) for s in splits]
    sources.append(("objective/kl", "objective/scores", "gold/total", "rollouts"))
    for kl, scores, gold, source in sources:
        pictures = []
        for title, metric in (("Reward against the root of KL", scores), ("Gold score against the root of KL", gold)):
            series = []
            for place, (run, points) in enumerate(runs):
                pairs = [(math.sqrt(max(x, 0.0)), y) for x, y in _join(points, kl, metric)]  # in the order of training
                if len(pairs) >= 2:
                    xs, ys = [list(column) for column in zip(*pairs, strict=True)]
                    series.append(Series(run, xs, ys, colour=place, dots=True))
            if series:
                curve, unit = Curve(series, x_name="√KL", label=title), f"{source}, over √nats"
                meaning = f"{metric} against sqrt({kl}); each dot is one update"
                legend = make_legend(series, named=len(runs) > 1)
                pictures.append(Picture(title, curve, "ppo", unit, meaning, legend=legend))
        if pictures:
            yield from pictures
            return


def _join(points: Points, x_metric: str, y_metric: str) -> list[tuple[float, float]]:
    xs = dict(zip(*points.get(x_metric, ([], [])), strict=True))
    return [(xs[step], y) for step, y in zip(*points.get(y_metric, ([], [])), strict=True) if step in xs]


def make_calibration(runs: Sequence[tuple[str, list[tuple[float, float, float, float]]]]) -> Picture | None:
    """P(win | score gap), predicted and as labelers chose; for each run rows of (gap, predicted, observed, n)."""
    series, several = [], sum(bool(rows) for _, rows in runs) > 1
    for place, (run, rows) in enumerate(runs):
        if rows:
            gaps, predicted, observed, _ = [list(column) for column in zip(*rows, strict=True)]
            prefix, colours = (f"{run} ", (place, place)) if several else ("", (3, 0))
            series.append(Series(f"{prefix}predicted", gaps, predicted, colours[0], dash=1))
            series.append(Series(f"{prefix}observed", gaps, observed, colours[1], dots=True))
    if not series:
        return None
    label = "Calibration of the reward model: share of wins against score gap"
    curve = Curve(series, [Mark("chance", 0.5)], x_name="score gap", label=label, y_name="share of wins")
    note = "Share of pairs that the higher score wins, against the gap between the scores."
    return Picture("Calibration of the reward model", curve, "reward", note=note, half=True)


def make_histogram(runs: Sequence[tuple[str, dict[str, list[tuple[float, float]]]]]) -> Picture | None:
    """Reward-model scores of SFT and PPO; for each run {model: (middle of a bin, share of responses)}."""
    series, several = [], sum(bool(by_model) for _, by_model in runs) > 1
    for place, (run, by_model) in enumerate(runs):
        for number, (model, rows) in enumerate(by_model.items()):
            if rows:
                first = int(number == 0)  # SFT: the second colour of a single run, or dashes of several
                colour, dash = (place, first) if several else (first, 0)
                label = f"{run} {model}" if several else model
                series.append(Series(label, [x for x, _ in rows], [y for _, y in rows], colour, dash=dash))
    if not series:
        return None
    curve = Curve(series, x_name="score", label="Scores of SFT and PPO", y_name="share of responses", bars=True)
    note = "Share of responses to held-out prompts by the reward model's score."
    return Picture("Scores of SFT and PPO", curve, "reward", note=note, half=True)

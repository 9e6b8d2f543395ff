"""The report's pictures: the charts of `runs/metric_table.py` and those of an evaluation, drawn by matplotlib as inline SVG."""

import html
import io
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from rlhf.runs.metric_table import CHARTS, Chart, find
from rlhf.runs.progress import format_figure
from rlhf.runs.run_files import Points, RunFiles, entries, entry_at, number_at, rows_of, visible, with_interval

# A curve of at most this many points, such as occasional evaluations, gets a dot per point.
DOTS_UP_TO = 25
# Pixels of a picture, and of one of half the page's width; the page scales it to its column.
SIZE, HALF_SIZE = (380.0, 190.0), (580.0, 230.0)
LEFT, RIGHT, TOP, BOTTOM = 40.0, 8.0, 20.0, 22.0
# A noisy curve of at least this many points is drawn faint, with its moving average over it.
SMOOTH_FROM = 60
# The light page's colours. Inside the page each becomes the CSS variable --s0 … --s5 or of its own name, so that one picture
# serves light and dark pages.
SERIES = ("#2a5f99", "#c8641f", "#3f8257", "#8c5aa5", "#a8891c", "#b2455e")
GRID, AXIS, MUTED = "#ecece7", "#b9bcb8", "#6f7782"
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "axes.edgecolor": AXIS,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.xmargin": 0.0, "axes.ymargin": 0.07,
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in
       (("labelcolor", MUTED), ("labelsize", 10), ("major.size", 0), ("minor.size", 0), ("major.pad", 5))},
    "axes.axisbelow": True, "lines.solid_joinstyle": "round",
    "path.simplify": True, "path.simplify_threshold": 0.5,  # a long curve, as far as the eye cannot see it; its peaks stay
}  # fmt: skip
VARIABLES = {colour: f"s{i}" for i, colour in enumerate(SERIES)} | {GRID: "grid", AXIS: "axis", MUTED: "muted"}


@dataclass(slots=True)
class Series:
    """One curve: its points in the order of x (a frontier's in the order of training), without gaps."""

    label: str  # "" if the title says it all
    xs: list[float]
    ys: list[float]
    colour: int = 0
    dots: bool = False  # also a dot per point, for curves of few points
    lows: list[float] = field(default_factory=list)  # of a band; empty: none
    highs: list[float] = field(default_factory=list)

    def describe(self, i: int) -> str:
        """The value of a point, with its interval if that is wider than the point itself."""
        low, high = (self.lows[i], self.highs[i]) if self.lows else (0.0, 0.0)
        return format_figure(self.ys[i]) + (f" [{format_figure(low)}, {format_figure(high)}]" if low < high else "")


class Mark(NamedTuple):
    """A level to compare with, drawn as a dashed line across the picture."""

    label: str
    y: float


@dataclass(slots=True)
class Picture:
    """Series over one x axis, levels, and texts; the template's `picture` macro shows it, with its points as a table."""

    title: str
    series: list[Series]
    marks: Sequence[Mark] = ()
    x_name: str = "step"
    unit: str = ""
    meaning: str = ""
    note: str = ""
    half: bool = False  # half the width of the page instead of a third
    rest: bool = False  # of a metric that no Chart names
    last: bool = True  # whether the legend shows their last values


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the rows, evenly spread, first and last among them."""
    return [rows[i] for i in sorted({round(i * (len(rows) - 1) / (count - 1)) for i in range(count)})]


def make_matplotlib_figure(picture: Picture, width: float, height: float) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    share_wide, share_high = 1 - (LEFT + RIGHT) / width, 1 - (TOP + BOTTOM) / height
    axes: Any = figure.add_axes((LEFT / width, BOTTOM / height, share_wide, share_high))
    axes.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
    for mark in picture.marks:
        axes.axhline(mark.y, color=MUTED, linewidth=1, dashes=(3, 3), clip_on=False)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(mark.label, (1, mark.y), (0, 3), color=MUTED, fontsize=9, ha="right", **place)
    for one in picture.series:
        colour = SERIES[one.colour % len(SERIES)]
        style: dict[str, Any] = {"color": colour, "clip_on": False}
        strong = style | {"linewidth": 1.6, "label": one.label}
        if one.lows:
            axes.fill_between(one.xs, one.lows, one.highs, color=colour, alpha=0.14, linewidth=0, clip_on=False)
        # the trend of a curve is hard to see if its total variation is many times its range
        travelled = sum(abs(b - a) for a, b in itertools.pairwise(one.ys))
        ys: Any = one.ys
        if one.dots or len(one.xs) == 1:
            strong |= {"marker": "o", "markersize": 4.4, "markeredgewidth": 0}
        elif len(one.ys) >= SMOOTH_FROM and travelled > 5 * (max(one.ys) - min(one.ys)):
            import pandas as pd

            axes.plot(one.xs, one.ys, linewidth=1, alpha=0.3, **style)
            ys = pd.Series(ys).rolling(2 * (len(ys) // 40) + 1, center=True, min_periods=1).mean()
        axes.plot(one.xs, ys, **strong)
    whole, steps = all(float(x).is_integer() for one in picture.series for x in one.xs), [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole, steps=steps))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=steps))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_figure(0.0 if abs(value) < 1e-12 else value)))
    return figure


def draw_svg(picture: Picture) -> str:
    """The picture as an <svg> element for a page that defines the colour variables."""
    import matplotlib

    out, (width, height) = io.StringIO(), HALF_SIZE if picture.half else SIZE
    with matplotlib.rc_context(STYLE):
        make_matplotlib_figure(picture, width, height).savefig(out, format="svg", transparent=True)
    svg = out.getvalue()
    svg = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r' id="(?:figure|axes|patch|matplotlib\.axis|xtick|ytick|line2d|text)_\d+"', "", svg)
    svg = re.sub(r"font(-\w+)?: [^;\"]*; ?", "", svg)  # the page chooses the font
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"|<g/>', "", svg).replace("xlink:href", "href")
    rounded = partial(re.compile(r"-?\d+\.\d{2,}").sub, lambda number: f"{float(number[0]):.1f}".removesuffix(".0"))
    svg = re.sub(r'(?<= )(?:d|x|y|style)="[^"]*"', lambda attribute: rounded(attribute[0]), svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    label = ", ".join(filter(None, [picture.title, *(one.label for one in picture.series)]))
    box = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(label, quote=True)}"'
    return f"<svg {box}>{svg}</svg>"


def make_figure(chart: Chart, points: Points, marks: Sequence[Mark] = (), rest: bool = False) -> Picture | None:
    """One picture; None if none of its metrics has two points."""
    metrics = chart.expand(points)
    if max((len(points[metric][0]) for metric, _ in metrics), default=0) < 2:  # one point is no curve
        return None
    series = []
    for colour, (metric, label) in enumerate(metrics):
        xs, ys = points[metric]
        series.append(Series(label if len(metrics) > 1 else "", xs, ys, colour, dots=len(xs) <= DOTS_UP_TO))
    known = {metric: row for metric, _ in metrics if (row := find(metric))}
    unit = known[metrics[0][0]].unit if metrics[0][0] in known else ""
    unit = unit if unit.lower() not in chart.title.lower() else ""
    meaning = "; ".join(f"{metric}: {row.meaning}" for metric, row in known.items())
    return Picture(chart.title, series, marks, unit=unit, meaning=meaning, half=chart.half, rest=rest)


def make_stage_figures(stage: str, points: Points, marks: dict[str, list[Mark]]) -> Iterator[Picture]:
    """The pictures of a stage in the order of CHARTS, then one for every metric that no Chart names.

    marks: levels to draw, by the title of the Chart.
    """
    shown = {"time/elapsed_s"}  # elsewhere on the page
    for chart in CHARTS.get(stage, ()):
        shown |= dict(chart.expand(points)).keys()
        if chart.x:
            yield from make_frontier(points)
        elif figure := make_figure(chart, points, marks.get(chart.title, ())):
            yield figure
    for metric in points:
        if metric not in shown and (figure := make_figure(Chart(metric, (metric,)), points, rest=True)):
            yield figure


def make_frontier(points: Points) -> list[Picture]:
    """Scores against sqrt(KL), which shows over-optimisation: the true score falls while the learned one rises.

    Held-out measurements if there are some, else the rollouts'. Source: Gao et al. 2022, figure 1.
    """
    splits = sorted({metric.split("/")[1] for metric, _ in Chart("KL", ("eval/*/kl",)).expand(points)})
    sources = [(f"eval/{s}/kl", f"eval/{s}/scores", f"eval/{s}/gold/total", s) for s in splits]
    sources.append(("objective/kl", "objective/scores", "gold/total", "rollouts"))
    for kl, scores, gold, source in sources:
        pictures = []
        at = dict(zip(*points.get(kl, ([], [])), strict=True))
        for title, metric in (("Reward against the root of KL", scores), ("Gold score against the root of KL", gold)):
            steps = zip(*points.get(metric, ([], [])), strict=True)
            pairs = [(math.sqrt(max(at[step], 0.0)), y) for step, y in steps if step in at]  # in the order of training
            if len(pairs) >= 2:
                unit, meaning = f"{source}, over √nats", f"{metric} against sqrt({kl}); each dot is one update"
                series = [Series("", [x for x, _ in pairs], [y for _, y in pairs], dots=True)]
                pictures.append(Picture(title, series, x_name="√KL", unit=unit, meaning=meaning))
        if pictures:
            return pictures
    return []


def make_pictures(run: RunFiles) -> Iterator[Picture]:
    """Calibration, P(win | score gap), predicted and as labelers chose; and in-context learning (evaluate.shots),
    accuracy by examples in the prompt, a line per model with its 95% interval.
    """
    about: Any = {"half": True, "last": False}
    rows = rows_of(run.results, "reward_model", "calibration")
    points: list[list[Any]] = [[number_at(row, key) for key in ("gap", "predicted", "observed")] for row in rows]
    if whole := [point for point in points if None not in point]:
        gaps, predicted, observed = ([*column] for column in zip(*whole, strict=True))
        series = [Series("predicted", gaps, predicted, 3), Series("observed", gaps, observed, dots=True)]
        note = "Share of pairs that the higher score wins, against the gap between the scores."
        yield Picture("Calibration of the reward model", series, [Mark("chance", 0.5)], "score gap", note=note, **about)
    series, shots = [], run.evaluations.get("shots")
    for colour, (name, of_model) in enumerate(entries(shots, "models")):
        found = [(number_at(row, "shots"), *with_interval(entry_at(row, "accuracy"))) for row in rows_of(of_model)]
        if complete := [row for row in found if None not in row]:
            ks, values, lows, highs = ([*column] for column in zip(*complete, strict=True))
            series.append(Series(visible(name, 60), ks, values, colour, dots=True, lows=lows, highs=highs))
    if series:
        majority, x = number_at(shots, "majority"), "examples in the prompt"
        marks = [] if majority is None else [Mark("most frequent label", majority)]
        note = "The same held-out examples and draws for every model; 95% intervals."
        yield Picture("In-context learning", series, marks, x, f"accuracy, over {x}", note=note, **about)

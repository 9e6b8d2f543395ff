"""Curves drawn by matplotlib: the contents of a picture, smoothing and thinning, and pictures as separate files.

`charts.py` decides what is drawn; `inline_svg.py` draws pictures inside the page.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

# Pixels of a picture; the page scales it to its column.
WIDTH, HEIGHT = 380.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 8.0, 20.0, 22.0
NAMES_BOTTOM = 64.0  # room for slanted names below the axis
# A noisy curve of at least this many points is drawn faint, with its moving average over it.
SMOOTH_FROM = 60
MAX_POINTS = 400
SERIES_COLOURS = 6


class Palette(NamedTuple):
    """The colours of a picture."""

    series: tuple[str, ...]
    grid: str
    axis: str
    muted: str


# The light page's colours, for pictures in separate files.
PAPER = Palette(("#2a5f99", "#c8641f", "#3f8257", "#8c5aa5", "#a8891c", "#b2455e"), "#ecece7", "#b9bcb8", "#6f7782")
# The series of one colour: solid, dashed, dotted.
DASHES: tuple[Any, ...] = ("-", (0, (5, 2.5)), (0, (1.2, 2)))


@dataclass(slots=True)
class Series:
    """One curve: its points in the order of x, without gaps."""

    label: str
    xs: list[float]
    ys: list[float]
    colour: int = 0
    dots: bool = False  # also a dot per point, for curves of few points
    dash: int = 0  # of DASHES: differs between the curves of a run if the colour denotes the run
    line: bool = True  # false: only points
    lows: list[float] = field(default_factory=list)  # of a band, or of bars at lone points; empty: none
    highs: list[float] = field(default_factory=list)


Point = tuple[float, float, float, float]  # x, y, and the ends of y's interval


def with_intervals(label: str, points: Sequence[Point], colour: int = 0, dash: int = 0, line: bool = True) -> Series:
    """Few points, each with its interval."""
    xs, ys, lows, highs = [list(column) for column in zip(*points, strict=True)]
    return Series(label, xs, ys, colour, dots=True, dash=dash, line=line, lows=lows, highs=highs)


@dataclass(slots=True)
class Mark:
    """A level to compare with, drawn as a dashed line across the picture."""

    label: str
    y: float


@dataclass(slots=True)
class Curve:
    """A picture: series over one x axis, and levels."""

    series: list[Series]
    marks: list[Mark] = field(default_factory=list)
    x_name: str = "step"
    label: str = ""  # the text alternative of the picture
    y_name: str = ""  # shown in a separate picture
    bars: bool = False  # steps over the x axis, for histograms
    names: list[str] = field(default_factory=list)  # of x = 0, 1, …, where x counts choices

    @property
    def bottom(self) -> float:
        """Pixels below the x axis."""
        return NAMES_BOTTOM if self.names else BOTTOM

    def tell(self, x: float) -> str:
        """x as text."""
        return self.names[int(x)] if self.names else f"{self.x_name} {x:,.6g}"


def format_value(value: float) -> str:
    """At most four figures, short for axes: 0.0312, 12.35, 1.2e-5, 18k, 2.5M."""
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.4g}"


def moving_average(ys: Sequence[float], reach: int) -> list[float]:
    """Mean over `reach` neighbours on either side, equally many left and right, so that a slope is not shifted.

    average_i = mean(y_{i-h} … y_{i+h}), h = min(reach, i, n-1-i) but at least reach/4, cut at the ends.
    """
    sums = [0.0, *itertools.accumulate(ys)]
    averages = []
    for i in range(len(ys)):
        h = max(min(reach, i, len(ys) - 1 - i), reach // 4)
        low, high = max(i - h, 0), min(i + h + 1, len(ys))
        averages.append((sums[high] - sums[low]) / (high - low))
    return averages


def is_noisy(ys: Sequence[float]) -> bool:
    """Whether a curve's total variation is many times its range, so that its trend is hard to see."""
    travelled = sum(abs(b - a) for a, b in itertools.pairwise(ys))
    return len(ys) >= SMOOTH_FROM and travelled > 5 * (max(ys) - min(ys))


def thin(xs: Sequence[float], ys: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most `limit` points that keep every peak: the smallest and largest y of each stretch, in order."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    stretches = limit // 2
    chosen: list[int] = []
    for i in range(stretches):
        stretch = range(i * len(xs) // stretches, (i + 1) * len(xs) // stretches)
        low = min(stretch, key=lambda j: ys[j])
        high = max(stretch, key=lambda j: ys[j])
        chosen += sorted({low, high})
    return [xs[j] for j in chosen], [ys[j] for j in chosen]


def for_log(curve: Curve) -> Curve | None:
    """The picture's points above 0, for a logarithmic axis; None if most are not, or if they span too little."""
    if curve.names or curve.bars:
        return None
    series, all_ys = [], []
    for one in curve.series:
        above = [(x, y) for x, y in zip(one.xs, one.ys, strict=True) if y > 0]
        if len(above) < 0.8 * len(one.ys):
            return None
        xs, ys = [x for x, _ in above], [y for _, y in above]
        series.append(replace(one, xs=xs, ys=ys, lows=[], highs=[]))
        all_ys += ys
    if len(all_ys) < 2 or max(all_ys) / min(all_ys) < 1.05:
        return None
    marks = [mark for mark in curve.marks if mark.y > 0]
    return replace(curve, series=series, marks=marks, label=f"{curve.label}, logarithmic")


def save(curve: Curve, path: Path, title: str) -> Path:
    """Writes the picture with title, axes' names and legend as an SVG or PNG file, by the path's suffix.

    Raises: ValueError if no series has a point; OSError if the file cannot be written.
    """
    series = [one for one in curve.series if one.xs]
    figure, axes = make_figure_axes(curve, series, 640.0, 360.0, PAPER)
    bottom = 0.25 if curve.names else 0.14
    axes.set_position((0.1, bottom, 0.87, 0.86 - bottom))
    axes.set_title(title, loc="left", fontsize=13, color="#1c2127", pad=14)
    axes.set_xlabel(curve.x_name, color=PAPER.muted)
    axes.set_ylabel(curve.y_name, color=PAPER.muted)
    beside_axis: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
    for mark in curve.marks:
        axes.annotate(mark.label, (1, mark.y), color=PAPER.muted, fontsize=9, **beside_axis)
    for one in series:
        if one.dots or not one.line:
            colour = PAPER.series[one.colour % SERIES_COLOURS]
            axes.plot(one.xs, one.ys, "o", markersize=4, color=colour, label="" if one.line else one.label)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor="#1c2127")
    with drawing_settings():
        figure.savefig(path, format=path.suffix.removeprefix("."), dpi=144, facecolor="#ffffff", metadata={})
    return path


def drawing_settings() -> Any:
    import matplotlib

    options: Any = {"svg.fonttype": "none", "svg.hashsalt": "report", "path.simplify": True}
    return matplotlib.rc_context(options)


def make_figure_axes(
    curve: Curve, series: list[Series], width: float, height: float, palette: Palette, log: bool = False
) -> tuple[Any, Any]:
    """matplotlib's figure and axes with everything plotted."""
    if not series:
        raise ValueError("a picture needs at least one point")
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with drawing_settings():
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(figure)
        share_wide, share_high = 1 - (LEFT + RIGHT) / width, 1 - (TOP + curve.bottom) / height
        axes = figure.add_axes((LEFT / width, curve.bottom / height, share_wide, share_high))
        _set_axes(axes, series, curve, palette, log)
        for one in series:
            _plot(axes, one, palette.series[one.colour % SERIES_COLOURS], curve.bars)
    return figure, axes


def _set_axes(axes: Any, series: list[Series], curve: Curve, palette: Palette, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette.axis)
    axes.tick_params(length=0, labelsize=10, labelcolor=palette.muted, pad=5)
    axes.grid(axis="y", color=palette.grid, linewidth=1, clip_on=False)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    xs = [x for one in series for x in one.xs]
    ys = [y for one in series for y in (*one.ys, *one.lows, *one.highs)] + [mark.y for mark in curve.marks]
    ys += [0.0] if curve.bars else []
    axes.set_xlim(*_widen(min(xs), max(xs), 0.0 if len(set(xs)) > 1 else 0.5))
    whole = all(float(x).is_integer() for x in xs)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    if curve.names:
        axes.set_xlim(-0.5, len(curve.names) - 0.5)
    if log:
        low, high = _widen(math.log10(min(ys)), math.log10(max(ys)), 0.07)
        axes.set_yscale("log")
        axes.set_ylim(10**low, 10**high)
        few = high - low < 1.2
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 3, 5) if few else (1,), numticks=6 if not few else 12))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(*_widen(min(ys), max(ys), 0.07))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_value(0.0 if abs(value) < 1e-12 else value)))
    if curve.names:
        axes.set_xticks(range(len(curve.names)), curve.names, rotation=32, ha="right", rotation_mode="anchor")
    for mark in curve.marks:
        axes.axhline(mark.y, color=palette.muted, linewidth=1, dashes=(3, 3), clip_on=False)


def _widen(low: float, high: float, share: float) -> tuple[float, float]:
    span = high - low
    if span <= 1e-9 * max(abs(low), abs(high)):
        span = abs(high) or 1.0
        share = max(share, 0.5)
    return low - share * span, high + share * span


def _plot(axes: Any, one: Series, colour: str, bars: bool) -> None:
    dash = DASHES[one.dash % len(DASHES)]
    style: dict[str, Any] = {"color": colour, "solid_joinstyle": "round", "clip_on": False, "linestyle": dash}
    if not one.line:
        if one.lows:
            axes.vlines(one.xs, one.lows, one.highs, color=colour, linewidth=2.2, alpha=0.45, clip_on=False)
        return  # `draw` and `save` add the dots
    if one.lows:
        axes.fill_between(one.xs, one.lows, one.highs, color=colour, alpha=0.14, linewidth=0, clip_on=False)
    if bars:
        axes.plot(one.xs, one.ys, linewidth=1.6, drawstyle="steps-mid", label=one.label, **style)
        axes.fill_between(one.xs, one.ys, step="mid", color=colour, alpha=0.14, linewidth=0)
        return
    xs, ys = thin(one.xs, one.ys)
    if one.dots or not is_noisy(one.ys):
        axes.plot(xs, ys, linewidth=1.6, label=one.label, **style)
    else:
        axes.plot(xs, ys, linewidth=1, alpha=0.3, **style | {"linestyle": "-"})
        average = moving_average(one.ys, reach=len(one.ys) // 40)
        axes.plot(*thin(one.xs, average), linewidth=1.6, label=one.label, **style)

"""Curves drawn by matplotlib as inline SVG pictures, which take their colours from the page.

`pictures.py` decides what is drawn.
"""

import html
import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Pixels of a picture, and of one of half the page's width; the page scales it to its column.
SIZE, HALF_SIZE = (380.0, 190.0), (580.0, 230.0)
LEFT, RIGHT, TOP, BOTTOM = 40.0, 8.0, 20.0, 22.0
# A noisy curve of at least this many points is drawn faint, with its moving average over it.
SMOOTH_FROM = 60
TABLE_POINTS = 12
# The series of one colour: solid, dashed, dotted.
DASHES: tuple[Any, ...] = ("-", (0, (5, 2.5)), (0, (1.2, 2)))
# The light page's colours. Inside the page each becomes the CSS variable --s0 … --s5 or of its own name, so that one picture
# serves light and dark pages.
SERIES = ("#2a5f99", "#c8641f", "#3f8257", "#8c5aa5", "#a8891c", "#b2455e")
GRID, AXIS, MUTED = "#ecece7", "#b9bcb8", "#6f7782"
VARIABLES = {colour: f"s{i}" for i, colour in enumerate(SERIES)} | {GRID: "grid", AXIS: "axis", MUTED: "muted"}
SERIES_COLOURS = len(SERIES)


@dataclass(slots=True)
class Series:
    """One curve: its points in the order of x (a frontier's in the order of training), without gaps."""

    label: str
    xs: list[float]
    ys: list[float]
    colour: int = 0
    dots: bool = False  # also a dot per point, for curves of few points
    dash: int = 0  # of DASHES: differs between the curves of a run if the colour denotes the run
    lows: list[float] = field(default_factory=list)  # of a band; empty: none
    highs: list[float] = field(default_factory=list)

    def describe(self, i: int) -> str:
        """The value of a point, with its interval if that is wider than the point itself."""
        low, high = (self.lows[i], self.highs[i]) if self.lows else (0.0, 0.0)
        return format_value(self.ys[i]) + (f" [{format_value(low)}, {format_value(high)}]" if low < high else "")


class Mark(NamedTuple):
    """A level to compare with, drawn as a dashed line across the picture."""

    label: str
    y: float


@dataclass(slots=True)
class Picture:
    """Series over one x axis, levels, and texts; the template's `picture` macro shows it."""

    title: str
    series: list[Series]
    marks: list[Mark] = field(default_factory=list)
    x_name: str = "step"
    bars: bool = False  # steps over the x axis, for histograms
    stage: str = ""
    unit: str = ""
    meaning: str = ""
    note: str = ""
    half: bool = False  # half the width of the page instead of a third
    rest: bool = False  # of a metric that no Chart names
    named: bool = True  # whether the legend names the curves
    last: bool = True  # whether the legend shows their last values

    @property
    def svg(self) -> str:
        return draw_svg(self)

    @property
    def log_svg(self) -> str:
        """The same over a logarithmic axis; empty if most points are not above 0, or span too little."""
        ys = [y for one in self.series for y in one.ys]
        above = [y for y in ys if y > 0]
        shown = not self.bars and len(above) > 1 and len(above) >= 0.8 * len(ys) and max(above) >= 1.05 * min(above)
        return draw_svg(self, log=True) if shown else ""

    @property
    def legend(self) -> list[tuple[str, int, int, str]]:
        """(label, colour, dash, last value) of each curve; empty texts for what is not shown."""
        return [
            (one.label * self.named, one.colour % SERIES_COLOURS, one.dash, format_value(one.ys[-1]) * self.last)
            for one in self.series
        ]

    @property
    def table(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """(curve, some of its points as text), for readers with a keyboard."""
        return [
            (one.label, [(format_value(one.xs[i]), one.describe(i)) for i in spread(range(len(one.xs)), TABLE_POINTS)])
            for one in self.series
        ]


def format_value(value: float) -> str:
    """At most four figures, short for axes: 0.0312, 12.35, 1.2e-5, 18k, 2.5M."""
    size = abs(value)
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if size >= 1e4 else f"{value + 0.0:.4g}"


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the rows, evenly spread, first and last among them."""
    last = len(rows) - 1
    return [rows[i] for i in sorted({round(i * last / (count - 1)) for i in range(count)})]


def is_noisy(ys: Sequence[float]) -> bool:
    """Whether a curve's total variation is many times its range, so that its trend is hard to see."""
    travelled = sum(abs(b - a) for a, b in itertools.pairwise(ys))
    return len(ys) >= SMOOTH_FROM and travelled > 5 * (max(ys) - min(ys))


# --- matplotlib's figure ------------------------------------------------------------------------------------


def drawing_settings() -> Any:
    import matplotlib

    # a long curve is simplified as far as the eye cannot see it; its peaks stay
    options: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
        "path.simplify": True,
        "path.simplify_threshold": 0.5,
    }
    return matplotlib.rc_context(options)


def make_axes(picture: Picture, width: float, height: float, log: bool = False) -> tuple[Any, Any]:
    """matplotlib's figure and axes. Raises: ValueError if no series has a point."""
    series = [one for one in picture.series if one.xs]
    if not series:
        raise ValueError("a picture needs at least one point")
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasSVG(figure)
    share_wide, share_high = 1 - (LEFT + RIGHT) / width, 1 - (TOP + BOTTOM) / height
    axes: Any = figure.add_axes((LEFT / width, BOTTOM / height, share_wide, share_high))
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(AXIS)
    axes.tick_params(length=0, labelsize=10, labelcolor=MUTED, pad=5)
    axes.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    axes.margins(0.0, 0.07)
    for mark in (mark for mark in picture.marks if mark.y > 0 or not log):
        axes.axhline(mark.y, color=MUTED, linewidth=1, dashes=(3, 3), clip_on=False)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(mark.label, (1, mark.y), (0, 3), color=MUTED, fontsize=9, ha="right", **place)
    for one in series:
        _plot(axes, one, picture.bars, bands=not log)
    whole, steps = all(float(x).is_integer() for one in series for x in one.xs), [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole, steps=steps))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=steps))
    if log:
        axes.set_yscale("log", nonpositive="mask")
        low, high = axes.get_ylim()
        few = high < 16 * low
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 3, 5) if few else (1,), numticks=12 if few else 6))
        axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_value(0.0 if abs(value) < 1e-12 else value)))
    return figure, axes


def _plot(axes: Any, one: Series, bars: bool, bands: bool) -> None:
    colour = SERIES[one.colour % SERIES_COLOURS]
    style: dict[str, Any] = {"color": colour, "solid_joinstyle": "round", "clip_on": False}
    strong = style | {"linestyle": DASHES[one.dash % len(DASHES)], "linewidth": 1.6, "label": one.label}
    if one.lows and bands:
        axes.fill_between(one.xs, one.lows, one.highs, color=colour, alpha=0.14, linewidth=0, clip_on=False)
    if bars:
        axes.plot(one.xs, one.ys, drawstyle="steps-mid", **strong)
        axes.fill_between(one.xs, one.ys, step="mid", color=colour, alpha=0.14, linewidth=0)
    elif one.dots or len(one.xs) == 1:
        axes.plot(one.xs, one.ys, marker="o", markersize=4.4, markeredgewidth=0, **strong)
    elif not is_noisy(one.ys):
        axes.plot(one.xs, one.ys, **strong)
    else:
        import pandas as pd

        window = pd.Series(one.ys).rolling(2 * (len(one.ys) // 40) + 1, center=True, min_periods=1)
        axes.plot(one.xs, one.ys, linewidth=1, alpha=0.3, **style)
        axes.plot(one.xs, window.mean(), **strong)


def draw_svg(picture: Picture, log: bool = False) -> str:
    """The picture as an <svg> element for a page that defines the colour variables. Raises: ValueError without a point."""
    out, (width, height) = io.StringIO(), HALF_SIZE if picture.half else SIZE
    with drawing_settings():
        figure, _ = make_axes(picture, width, height, log)
        figure.savefig(out, format="svg", transparent=True)
    svg = out.getvalue()
    svg = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r' id="(?:figure|axes|patch|matplotlib\.axis|xtick|ytick|line2d|text)_\d+"', "", svg)
    svg = re.sub(r"font(-\w+)?: [^;\"]*; ?", "", svg)  # the page chooses the font
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"|<g/>', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(?<= )(?:d|x|y|style)="[^"]*"', lambda found: _round(found.group()), svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    label = f"{picture.title}: {', '.join(one.label for one in picture.series)}{', logarithmic' if log else ''}"
    box = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(label, quote=True)}"'
    return f"<svg {box}>{svg}</svg>"


def _round(attribute: str) -> str:
    return re.sub(r"-?\d+\.\d{2,}", lambda found: f"{float(found.group()):.1f}".removesuffix(".0"), attribute)

"""A curve as a small inline SVG picture that takes its colours from the page and shows values on hover, without a script.

matplotlib draws it (`figures.py`); its stand-in colours become CSS variables, so that one picture serves light and dark
pages, and vertical strips over it show the values under the pointer.
"""

import bisect
import html
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from rlhf.report.figures import (
    HEIGHT,
    RIGHT,
    SERIES_COLOURS,
    TOP,
    WIDTH,
    Curve,
    Mark,
    Palette,
    Series,
    drawing_settings,
    format_value,
    make_figure_axes,
    thin,
)

MAX_HOVERS = 48
# Colours that occur nowhere else in a picture, each replaced by a CSS variable of the page.
STAND_INS = Palette(tuple(f"#0000{i + 1:02x}" for i in range(SERIES_COLOURS)), "#000010", "#000011", "#000012")
HOVER_LINE = 13.0  # pixels from one value to the next

Place = Callable[[float, float], tuple[float, float]]  # data to pixels


def draw(curve: Curve, width: float = WIDTH, height: float = HEIGHT, log: bool = False) -> str:
    """The picture as an <svg> element, for use inside an HTML page that defines the colour variables.

    log: a logarithmic y axis; pass the result of `for_log`.
    Raises: ValueError if no series has a point.
    """
    series = [one for one in curve.series if one.xs]
    figure, axes = make_figure_axes(curve, series, width, height, STAND_INS, log)
    out = io.StringIO()
    with drawing_settings():
        figure.savefig(out, format="svg", transparent=True)
    place = axes.transData.transform

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        across, up = place((x, y))
        return float(across), height - float(up)

    body = _inline(out.getvalue())
    level = series[0].ys[0]  # a y that is on every scale
    parts = _dots(series, to_pixels) + _mark_labels(curve.marks, to_pixels, width, series[0].xs[0])
    parts += _hovers(series, curve, to_pixels, width, height, level)
    label = html.escape(curve.label or ", ".join(one.label for one in series), quote=True)
    box = f'viewBox="0 0 {width:g} {height:g}"'
    return f'<svg {box} role="img" aria-label="{label}">{body}{"".join(parts)}</svg>'


def _inline(svg: str) -> str:
    """The content of matplotlib's document without ids, metadata and comments."""
    svg = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r' id="(?:figure|axes|patch|matplotlib\.axis|xtick|ytick|line2d|text)_\d+"', "", svg)
    svg = re.sub(r"font(-\w+)?: [^;\"]*; ?", "", svg)  # the page chooses the font
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"|<g/>', "", svg)
    svg = re.sub(r'(?<= )(?:d|x|y|style)="[^"]*"', lambda found: _round(found.group()), svg)
    for i, colour in enumerate(STAND_INS.series):
        svg = svg.replace(colour, f"var(--s{i})")
    for name in ("grid", "axis", "muted"):
        svg = svg.replace(getattr(STAND_INS, name), f"var(--{name})")
    return re.sub(r"\s*\n\s*", " ", svg)


def _round(attribute: str) -> str:
    return re.sub(r"-?\d+\.\d{2,}", lambda found: f"{float(found.group()):.1f}".removesuffix(".0"), attribute)


def _dots(series: list[Series], to_pixels: Place) -> list[str]:
    return [
        _circle(to_pixels(x, y), one, 2.2 if one.line else 3.2)
        for one in series
        if one.dots or len(one.xs) == 1
        for x, y in zip(*thin(one.xs, one.ys, MAX_HOVERS), strict=True)
    ]


def _circle(place: tuple[float, float], one: Series, radius: float) -> str:
    colour = f"var(--s{one.colour % SERIES_COLOURS})"
    return f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="{radius:g}" fill="{colour}"/>'


def _mark_labels(marks: list[Mark], to_pixels: Place, width: float, some_x: float) -> list[str]:
    x = f"{width - RIGHT:g}"
    return [
        f'<text class="mark" x="{x}" y="{to_pixels(some_x, mark.y)[1] - 4:.1f}">{html.escape(mark.label)}</text>'
        for mark in marks
    ]


def _hovers(
    series: list[Series], curve: Curve, to_pixels: Place, width: float, height: float, level: float
) -> list[str]:
    """Upright strips that tile the picture; the one under the pointer shows its x and the values there."""
    counts = Counter(x for one in series for x in one.xs)
    xs = _choose(sorted(counts), counts)
    places = [to_pixels(x, level)[0] for x in xs]
    edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(places)), width]
    middles = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(xs)), math.inf]
    ordered = [(one, *_sorted(one)) for one in series]
    strips = []
    for i, x in enumerate(xs):
        at = [
            (one, found)
            for one, its_xs, its_ys in ordered
            if (found := nearest(its_xs, its_ys, x)) is not None and middles[i] <= found[0] <= middles[i + 1]
        ]
        strip = f'x="{edges[i]:.1f}" width="{edges[i + 1] - edges[i]:.1f}"'
        dots = "".join(_circle(to_pixels(*found), one, 3.2) for one, found in at)
        # The text is on the side of the strip that has space.
        left = places[i] > width / 2
        where = f'x="{places[i] + (-6 if left else 6):.1f}"'
        texts = [(curve.tell(x), "")]
        texts += [
            (
                (f"{one.label} " if len(series) > 1 else "") + format_value(y) + interval_text(one, point, y),
                f"c{one.colour % SERIES_COLOURS}",
            )
            for one, (point, y) in at
        ]
        words = "".join(
            f'<text class="{"l" if left else "r"} {colour if len(series) > 1 else ""}" {where} '
            f'y="{12 + HOVER_LINE * number:g}">{html.escape(text)}</text>'
            for number, (text, colour) in enumerate(texts)
        )
        strips.append(
            f'<g class="at"><rect {strip} height="{height:g}"/>'
            f'<path d="M{places[i]:.1f} {TOP:g}V{height - curve.bottom:g}"/>{dots}{words}</g>'
        )
    return strips


def interval_text(one: Series, x: float, y: float) -> str:
    """The interval at a point as text, with a space before it; empty if it is no wider than the point itself."""
    if not one.lows:
        return ""
    rows = zip(one.xs, one.ys, one.lows, one.highs, strict=True)
    low, high = next(((low, high) for at, value, low, high in rows if (at, value) == (x, y)), (y, y))
    return f" [{format_value(low)}, {format_value(high)}]" if low < high else ""


def _sorted(one: Series) -> tuple[list[float], list[float]]:
    pairs = sorted(zip(one.xs, one.ys, strict=True), key=lambda pair: pair[0])
    return [x for x, _ in pairs], [y for _, y in pairs]


def nearest(xs: Sequence[float], ys: Sequence[float], x: float) -> tuple[float, float] | None:
    """The point of a curve, sorted by x, that is nearest to x; of several at the same x the last."""
    if not xs:
        return None
    place = bisect.bisect_right(xs, x)
    around = [i for i in (place - 1, place) if 0 <= i < len(xs)]
    best = min(around, key=lambda i: abs(xs[i] - x))
    return xs[best], ys[best]


def _choose(xs: list[float], counts: dict[float, int]) -> list[float]:
    """At most MAX_HOVERS of the sorted xs, evenly spread; of each stretch the last x that most curves have."""
    if len(xs) <= MAX_HOVERS:
        return xs
    low, span = xs[0], xs[-1] - xs[0]
    best: dict[int, float] = {}
    for x in xs:
        stretch = min(int(MAX_HOVERS * (x - low) / span), MAX_HOVERS - 1)
        if stretch not in best or counts[x] >= counts[best[stretch]]:
            best[stretch] = x
    return [best[stretch] for stretch in sorted(best)]

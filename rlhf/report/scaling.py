"""The report's picture of a study of scaling: loss at equal compute."""

import math
from typing import Any

from rlhf.report.charts import Picture, make_legend
from rlhf.report.figures import Curve, Series
from rlhf.report.overview import interval
from rlhf.tracking.jsonl import is_number
from rlhf.tracking.run_files import get, number


def make_isoflops(study: dict[str, Any], title: str) -> Picture | None:
    """IsoFLOP curves over log10 N: of each budget a dot per size with its interval, and the parabola through them.

    Source: Hoffmann et al. 2022, figure 3.
    """
    curves = get(study, "isoflop", "all parameters")
    series = []
    for colour, curve in enumerate(curves if isinstance(curves, list) else []):
        budget, points = number(curve, "budget"), _points(get(curve, "points"))
        if budget is None or not points:
            continue
        xs, ys, lows, highs = [list(column) for column in zip(*points, strict=True)]
        told = f"{budget:.3g} FLOPs"
        series.append(Series(told, xs, ys, colour, dots=True, line=False, lows=lows, highs=highs))
        parabola = get(curve, "parabola")
        if isinstance(parabola, list) and len(parabola) == 3 and all(map(is_number, parabola)):
            c2, c1, c0 = parabola
            steps = [xs[0] + (xs[-1] - xs[0]) * i / 40 for i in range(41)]
            logs = [x * math.log(10) for x in steps]
            series.append(Series(f"{told}, parabola", steps, [(c2 * z + c1) * z + c0 for z in logs], colour))
    if not series:
        return None
    return Picture(
        title,
        Curve(series, x_name="log10 of parameters", label=title, y_name="nats per held-out token"),
        "study",
        "nats per held-out token, over log10 of parameters",
        note="One dot per size, a mean over seeds with its 95% interval; the lines are parabolas in the logarithm of the size.",
        half=True,
        legend=make_legend([one for one in series if one.dots], True, last=False),
    )


def _points(listed: Any) -> list[tuple[float, float, float, float]]:
    """(log10 N, loss and its interval) of each size; if there is no interval, the loss itself."""
    found = []
    for point in listed if isinstance(listed, list) else []:
        size, (loss, low, high) = number(point, "parameters"), interval(get(point, "loss"))
        if size is not None and size > 0 and loss is not None:
            found.append((math.log10(size), loss, loss if low is None else low, loss if high is None else high))
    return found

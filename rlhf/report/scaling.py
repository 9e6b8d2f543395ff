"""The report's picture of a study of scaling: loss at equal compute."""

import math
from typing import Any

from rlhf.report.charts import Picture, make_legend
from rlhf.report.figures import Curve, Point, Series, with_intervals
from rlhf.tracking.jsonl import is_number
from rlhf.tracking.run_files import estimate, get, number, rows_of


def make_isoflops(study: dict[str, Any], title: str) -> Picture | None:
    """IsoFLOP curves over log10 N: of each budget a dot per size with its interval, and the parabola through them.

    Source: Hoffmann et al. 2022, figure 3.
    """
    series = []
    for colour, curve in enumerate(rows_of(study, "isoflop", "all parameters")):
        budget, points = number(curve, "budget"), _points(curve)
        if budget is None or not points:
            continue
        label = f"{budget:.3g} FLOPs"
        series.append(with_intervals(label, points, colour, line=False))
        parabola = get(curve, "parabola")
        if isinstance(parabola, list) and len(parabola) == 3 and all(map(is_number, parabola)):
            c2, c1, c0 = parabola
            first, last = points[0][0], points[-1][0]
            steps = [first + (last - first) * i / 40 for i in range(41)]
            logs = [x * math.log(10) for x in steps]
            series.append(Series("", steps, [(c2 * z + c1) * z + c0 for z in logs], colour))
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


def _points(curve: dict[str, Any]) -> list[Point]:
    """(log10 N, loss and its interval) of each size."""
    points = []
    for row in rows_of(curve, "points"):
        size, loss = number(row, "parameters"), estimate(get(row, "loss"))
        if size is not None and size > 0 and loss is not None:
            points.append((math.log10(size), *loss))
    return points

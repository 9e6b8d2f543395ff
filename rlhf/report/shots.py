"""The report's picture of in-context learning, from evaluations/shots.json."""

from collections.abc import Iterator
from typing import Any

from rlhf.report.charts import Picture, make_legend
from rlhf.report.figures import Curve, Mark, Series
from rlhf.report.overview import interval
from rlhf.tracking.run_files import get, number, visible

Row = tuple[float, float, float, float]


def shot_rows(found: Any) -> Iterator[tuple[str, list[tuple[dict[str, Any], Row]]]]:
    """(model, (row, (K, accuracy and its interval)) of each K) from evaluate.shots."""
    models = get(found, "models")
    for name, listed in models.items() if isinstance(models, dict) else []:
        rows = []
        for row in listed if isinstance(listed, list) else []:
            count, (value, low, high) = number(row, "shots"), interval(get(row, "accuracy"))
            if count is not None and value is not None and low is not None and high is not None:
                rows.append((row, (count, value, low, high)))
        if rows:
            yield visible(str(name), 60), rows


def make_shots(found: Any, title: str) -> Picture | None:
    """Accuracy by examples in the prompt, a line per model with its 95% interval."""
    series = []
    for colour, (name, rows) in enumerate(shot_rows(found)):
        xs, ys, lows, highs = [list(column) for column in zip(*(point for _, point in rows), strict=True)]
        series.append(Series(name, xs, ys, colour, dots=True, lows=lows, highs=highs))
    if not series:
        return None
    majority = number(found, "majority")
    marks = [] if majority is None else [Mark("most frequent label", majority)]
    curve = Curve(series, marks, x_name="examples in the prompt", label=title, y_name="accuracy")
    return Picture(
        title,
        curve,
        "evaluate",
        "accuracy, over examples in the prompt",
        note="The same held-out examples and draws for every model; 95% intervals.",
        half=True,
        legend=make_legend(series, True, last=False),
    )

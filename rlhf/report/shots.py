"""The report's picture of in-context learning, from evaluations/shots.json."""

from collections.abc import Iterator
from typing import Any

from rlhf.report.charts import Picture
from rlhf.report.figures import Curve, Mark, Point, with_intervals
from rlhf.tracking.run_files import entries, estimate, get, number, rows_of, visible


def shot_rows(results: Any) -> Iterator[tuple[str, list[tuple[dict[str, Any], Point]]]]:
    """(model, (row, (K, accuracy and its interval)) of each K) from evaluate.shots."""
    for name, of_model in entries(results, "models"):
        rows = []
        for row in rows_of(of_model):
            count, accuracy = number(row, "shots"), estimate(get(row, "accuracy"))
            if count is not None and accuracy is not None:
                rows.append((row, (count, *accuracy)))
        if rows:
            yield visible(str(name), 60), rows


def make_shots(results: Any, title: str) -> Picture | None:
    """Accuracy by examples in the prompt, a line per model with its 95% interval."""
    series = [
        with_intervals(name, [point for _, point in rows], colour)
        for colour, (name, rows) in enumerate(shot_rows(results))
    ]
    if not series:
        return None
    majority = number(results, "majority")
    marks = [] if majority is None else [Mark("most frequent label", majority)]
    curve = Curve(series, marks, x_name="examples in the prompt", label=title, y_name="accuracy")
    note = "The same held-out examples and draws for every model; 95% intervals."
    return Picture(title, curve, "evaluate", "accuracy, over examples in the prompt", note=note, half=True)

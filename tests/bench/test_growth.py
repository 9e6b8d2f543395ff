"""The script that measures how cost grows: its arithmetic, and one small point of each kind of data."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
growth = importlib.import_module("growth")


def test_cost_is_time_per_unit_of_work_over_that_of_the_first_point():
    points = [
        {"x": 1, "work": 4.0, "seconds": 2.0, "peak_mb": 5.0},
        {"x": 2, "work": 12.0, "seconds": 9.0, "peak_mb": 6.0},
    ]
    # 2 / 4 = 0.5 s per unit, then 9 / 12 = 0.75: 1.5 times as much for three times the work
    assert [(one["growth"], one["cost"]) for one in growth.with_cost(points)] == [(1.0, 1.0), (3.0, 1.5)]


def test_a_point_of_labels_counts_its_bytes_time_and_memory(tmp_path):
    clock = growth.Clock()
    size = growth.labels(clock, 0.01, tmp_path)
    assert size == (tmp_path / "labels.jsonl").stat().st_size >= 10_000 and clock.seconds > 0 and clock.peak >= 0

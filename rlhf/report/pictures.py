"""The report's pictures: the charts of `runs/metric_table.py`, and those of an evaluation. `drawing.py` draws them.

For one run, colours distinguish the curves; for several, colours distinguish the runs and dashes the curves.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlhf.report.drawing import DASHES, Mark, Picture, Series
from rlhf.runs.metric_table import CHARTS, Chart, find
from rlhf.runs.run_files import (
    Points,
    RunFiles,
    entries,
    entry_at,
    histogram,
    number_at,
    rows_of,
    visible,
    with_interval,
)

Runs = Sequence[tuple[str, Points]]  # (run's name, its measurements)

# Shown elsewhere on the page.
NOT_DRAWN = ("time/elapsed_s",)
# A curve of at most this many points, such as occasional evaluations, gets a dot per point.
DOTS_UP_TO = 25


def make_figure(chart: Chart, runs: Runs, marks: list[Mark], stage: str = "") -> Picture | None:
    """One picture; None if none of its metrics has two points in any run."""
    metrics, several = metrics_of(chart, runs), len(runs) > 1
    series = []
    for i, (metric, label) in enumerate(metrics):
        for place, (run, points) in enumerate(runs):
            if metric in points:
                name = (f"{run} {label}" if len(metrics) > 1 else run) if several else label
                colour, dash = (place, i % len(DASHES)) if several else (i, 0)
                xs, ys = points[metric]
                series.append(Series(name, xs, ys, colour, dots=len(xs) <= DOTS_UP_TO, dash=dash))
    if max((len(one.xs) for one in series), default=0) < 2:  # one point is no curve
        return None
    first = find(metrics[0][0])
    unit = first.unit if first else ""
    return Picture(
        chart.title,
        series,
        marks,
        stage=stage,
        unit=unit if unit.lower() not in chart.title.lower() else "",
        meaning="; ".join(f"{name}: {row.meaning}" for name, _ in metrics if (row := find(name))),
        half=chart.half,
        named=several or len(metrics) > 1,
    )


def metrics_of(chart: Chart, runs: Runs) -> list[tuple[str, str]]:
    """The (metric, label) pairs that the chart shows of these runs."""
    return chart.expand(dict.fromkeys(metric for _, points in runs for metric in points))


def make_stage_figures(stage: str, runs: Runs, marks: dict[str, list[Mark]]) -> Iterator[Picture]:
    """The pictures of a stage in the order of CHARTS, then one for every metric that no Chart names.

    marks: levels to draw, by the title of the Chart.
    """
    shown = {*NOT_DRAWN}
    for chart in CHARTS.get(stage, ()):
        metrics = metrics_of(chart, runs)
        shown |= dict(metrics).keys()
        parts = [chart]
        if len(runs) > 1 and len(metrics) > len(DASHES):  # more curves than kinds of dashes: one picture per curve
            parts = [Chart(f"{chart.title}: {label}", (metric,)) for metric, label in metrics]
        if chart.x:
            yield from make_frontier(runs)
        else:
            figures = (make_figure(part, runs, marks.get(chart.title, []), stage) for part in parts)
            yield from (figure for figure in figures if figure is not None)
    for metric in dict.fromkeys(name for _, points in runs for name in points):
        if metric not in shown and (figure := make_figure(Chart(metric, (metric,)), runs, [], stage)):
            yield replace(figure, rest=True)


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
                at = dict(zip(*points.get(kl, ([], [])), strict=True))
                steps = zip(*points.get(metric, ([], [])), strict=True)
                # in the order of training
                pairs = [(math.sqrt(max(at[step], 0.0)), y) for step, y in steps if step in at]
                if len(pairs) >= 2:
                    series.append(Series(run, [x for x, _ in pairs], [y for _, y in pairs], colour=place, dots=True))
            if series:
                unit, meaning = f"{source}, over √nats", f"{metric} against sqrt({kl}); each dot is one update"
                texts: Any = {"stage": "ppo", "unit": unit, "meaning": meaning}
                pictures.append(Picture(title, series, x_name="√KL", named=len(runs) > 1, **texts))
        if pictures:
            yield from pictures
            return


# --- of an evaluation ---------------------------------------------------------------------------------------


def make_pictures(runs: list[RunFiles]) -> list[Picture]:
    """Calibration, histograms and in-context learning, the first two of all runs on the same axes."""
    pictures = [make_calibration(runs), make_histogram(runs)]
    for run in runs:
        pictures.append(make_shots(run.evaluations.get("shots"), f" ({run.name})" if len(runs) > 1 else ""))
    return [picture for picture in pictures if picture is not None]


def make_calibration(runs: list[RunFiles]) -> Picture | None:
    """P(win | score gap), predicted and as labelers chose."""
    by_run = []
    for place, run in enumerate(runs):
        rows = rows_of(run.results, "reward_model", "calibration")
        points: list[list[Any]] = [[number_at(row, key) for key in ("gap", "predicted", "observed")] for row in rows]
        if whole := [point for point in points if None not in point]:
            by_run.append((place, run.name, whole))
    series = []
    for place, name, found in by_run:
        gaps, predicted, observed = ([*column] for column in zip(*found, strict=True))
        prefix, colours = (f"{name} ", (place, place)) if len(by_run) > 1 else ("", (3, 0))
        series.append(Series(f"{prefix}predicted", gaps, predicted, colours[0], dash=1))
        series.append(Series(f"{prefix}observed", gaps, observed, colours[1], dots=True))
    note = "Share of pairs that the higher score wins, against the gap between the scores."
    axes: Any = {"x_name": "score gap", "marks": [Mark("chance", 0.5)]}
    return _picture("Calibration of the reward model", series, note, **axes)


def make_histogram(runs: list[RunFiles]) -> Picture | None:
    """Shares of SFT's and PPO's held-out responses by the reward model's score, over bins that all runs share."""
    scores = {
        (place, model): [value for row in run.samples if (value := number_at(row, "scores", model)) is not None]
        for place, run in enumerate(runs)
        for model in ("sft", "ppo")
    }
    if sum(map(len, scores.values())) < 10:
        return None
    several, series = len({place for (place, _), values in scores.items() if values}) > 1, []
    for (place, model), rows in histogram(scores).items():
        if rows:
            first = int(model == "sft")  # the second colour of a single run, or dashes of several
            colour, dash = (place, first) if several else (first, 0)
            label = f"{runs[place].name} {model}" if several else model
            series.append(Series(label, [x for x, _ in rows], [y for _, y in rows], colour, dash=dash))
    note = "Share of responses to held-out prompts by the reward model's score."
    return _picture("Scores of SFT and PPO", series, note, x_name="score", bars=True)


def shot_rows(results: Any) -> Iterator[tuple[str, list[tuple[dict[str, Any], tuple[float, float, float, float]]]]]:
    """(model, (row, (K, accuracy and its interval)) of each K) from evaluate.shots."""
    for name, of_model in entries(results, "models"):
        rows = []
        for row in rows_of(of_model):
            k, (value, low, high) = number_at(row, "shots"), with_interval(entry_at(row, "accuracy"))
            if k is not None and value is not None:
                rows.append((row, (k, value, value if low is None else low, value if high is None else high)))
        if rows:
            yield visible(str(name), 60), rows


def make_shots(results: Any, of_run: str) -> Picture | None:
    """Accuracy by examples in the prompt, a line per model with its 95% interval."""
    series = []
    for colour, (name, rows) in enumerate(shot_rows(results)):
        ks, values, lows, highs = ([*column] for column in zip(*(point for _, point in rows), strict=True))
        series.append(Series(name, ks, values, colour, dots=True, lows=lows, highs=highs))
    majority = number_at(results, "majority")
    marks = [] if majority is None else [Mark("most frequent label", majority)]
    note, x, y = (
        "The same held-out examples and draws for every model; 95% intervals.",
        "examples in the prompt",
        "accuracy",
    )
    about: Any = {"x_name": x, "unit": f"{y}, over {x}", "marks": marks, "stage": "evaluate"}
    return _picture(f"In-context learning{of_run}", series, note, **about)


def _picture(title: str, series: list[Series], note: str, **more: Any) -> Picture | None:
    """A picture of half the page's width with a note, without last values; None without a series."""
    about: Any = {"stage": "reward", "note": note, "half": True, "last": False} | more
    return Picture(title, series, **about) if series else None

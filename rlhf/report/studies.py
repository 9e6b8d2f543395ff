"""The report's pictures and tables of study/*.json, and its picture of in-context learning."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from rlhf.report.figures import Curve, Mark, Point, Series, format_value, with_intervals
from rlhf.report.pictures import Picture, make_legend
from rlhf.runs.run_files import RunFiles, entries, estimate, get, interval, is_number, number, rows_of, visible

# The figures that are drawn of a study with one row per choice.
CHOICE_FIGURES = (
    ("win_rate", "win rate over SFT"),
    ("gold", "true reward"),
    ("kl", "KL to SFT, nats"),
    ("bpb", "bits per byte of held-out text"),
    ("accuracy", "held-out accuracy"),
)


def spaced(name: Any, limit: int = 60) -> str:
    return visible(str(name).replace("_", " "), limit)


def study_title(study: dict[str, Any]) -> str:
    return visible(study.get("title") or study.get("file") or "study", 100)


def study_tables(run: RunFiles) -> Iterator[dict[str, Any]]:
    """Studies with one row per choice: {"title", "columns", "rows": (choice, figures)}, each figure with its interval."""
    for study in run.studies:
        rows = entries(study, "rows")
        columns = list(dict.fromkeys(key for _, row in rows for key, _ in entries(row) if key != "difference"))
        if rows:
            yield {
                "title": study_title(study),
                "columns": [spaced(column, 40) for column in columns],
                "rows": [(spaced(name), [interval(get(row, column)) for column in columns]) for name, row in rows],
            }


def make_study_pictures(study: dict[str, Any], of_run: str) -> Iterator[Picture | None]:
    """A study's frontiers: learned and true reward against KL, one path per choice, or one dot per policy if there is no path.

    of_run: the end of the pictures' titles.
    """
    if isinstance(study.get("sizes"), dict):
        yield make_by_size(study)
        return
    title = study_title(study)
    yield make_outcomes(study, f"{title}{of_run}")
    for measure, unit in (("score", "learned reward"), ("gold", "true reward"), ("win_rate", "win rate over SFT")):
        yield make_frontier(study, f"{title.partition(':')[0]}: {unit}{of_run}", measure, unit)
    for measure, unit in CHOICE_FIGURES:
        yield make_choices(study, f"{title}: {unit}{of_run}", measure, unit)
    yield make_isoflops(study, f"Loss at equal compute{of_run}")


def make_frontier(study: dict[str, Any], title: str, measure: str, unit: str) -> Picture | None:
    """The path of each choice over training against the root of KL, and that of best-of-n dashed.

    Best-of-n is drawn at the estimate of its KL if there is one, else at the upper bound.
    Source: Gao et al. 2022, figure 1.
    """
    curves = [(name, rows_of(curve, "mean")) for name, curve in entries(study, "curves")]
    paths: dict[str, list[Point]] = {}
    for name, rows in [*curves, ("best of n", rows_of(study, "best_of_n"))]:
        found = [
            (estimate(get(row, "kl_estimate")) or estimate(get(row, "kl")), estimate(get(row, measure))) for row in rows
        ]
        if path := [(math.sqrt(max(kl[0], 0.0)), *figure) for kl, figure in found if kl and figure]:
            paths[spaced(name)] = path
    if not paths:
        return make_points(study, title, measure, unit)
    series = [
        with_intervals(name, points, colour, dash=int(name == "best of n"))
        for colour, (name, points) in enumerate(paths.items())
        if len(points) > 1
    ]
    curve = Curve(series, x_name="√KL", label=title, y_name=unit)
    return Picture(title, curve, "study", f"over √nats; {unit}", half=True) if series else None


def make_points(study: dict[str, Any], title: str, measure: str, unit: str) -> Picture | None:
    """Each dot is one trained policy, the line joins those that no other one beats."""
    pairs = [(number(row, "kl"), number(row, measure)) for row in rows_of(study, "points")]
    rows = sorted((kl, value) for kl, value in pairs if kl is not None and value is not None)
    if len(rows) < 2:
        return None
    best = itertools.accumulate((value for _, value in rows), max, initial=-math.inf)
    front = [(kl, value) for (kl, value), before in zip(rows, best, strict=False) if value > before]
    dots = Series("policies", [x for x, _ in rows], [y for _, y in rows], colour=0, dots=True, line=False)
    line = Series("frontier", [x for x, _ in front], [y for _, y in front], colour=1)
    curve = Curve([line, dots], x_name="KL", label=title, y_name=unit)
    return Picture(title, curve, "study", f"{unit}; across: KL to SFT, nats", half=True)


def make_outcomes(study: dict[str, Any], title: str) -> Picture | None:
    """The true reward that the runs of an audit study gained against the mean share of flipped pairs, a colour per parent."""
    dots: dict[str, list[tuple[float, float]]] = {}
    for row in rows_of(study, "runs"):
        flips, gain = number(row, "figures", "mean_flips"), number(row, "gold_gain")
        if flips is not None and gain is not None:
            dots.setdefault(visible(row.get("parent"), 60), []).append((flips, gain))
    if sum(map(len, dots.values())) < 2:
        return None
    series = [
        Series(name, [x for x, _ in rows], [y for _, y in rows], colour, dots=True, line=False)
        for colour, (name, rows) in enumerate(dots.items())
    ]
    x_name, unit = "pairs flipped by the attacks", "true reward gained"
    curve = Curve(series, x_name=x_name, label=title, y_name=unit)
    return Picture(title, curve, "study", f"{unit}; across: {x_name}", half=True)


def make_by_size(study: dict[str, Any]) -> Picture | None:
    """Preference over one policy by model size, a line per policy that has a win rate at each size.

    Source: Ouyang et al. 2022, figure 1.
    """
    title = f"Preference over {visible(study.get('reference'), 60)}"
    sizes = sorted((value, name) for name, value in entries(study, "sizes") if is_number(value))
    lines: dict[str, list[Point]] = {}
    for place, (_, size) in enumerate(sizes):
        for name, row in entries(study, "rows"):
            win_rate = estimate(get(row, "win_rate"))
            if name.startswith(f"{size} ") and win_rate is not None:
                lines.setdefault(visible(name.removeprefix(f"{size} "), 60), []).append((float(place), *win_rate))
    series = [
        with_intervals(policy, points, colour)
        for colour, (policy, points) in enumerate(lines.items())
        if len(points) == len(sizes)
    ]
    names = [f"{format_value(parameters)} parameters" for parameters, _ in sizes]
    curve = Curve(series, [Mark("even", 0.5)], x_name="size", label=title, y_name="share preferred", names=names)
    note = "Bands are 95% intervals over prompts."
    return Picture(title, curve, "study", note=note, half=True) if series else None


def make_choices(study: dict[str, Any], title: str, measure: str, unit: str) -> Picture | None:
    """A dot with its interval for each choice of a study with one row per choice; the level is that of "default"."""
    found = {spaced(name, 24): estimate(get(row, measure)) for name, row in entries(study, "rows")}
    rows = {name: figure for name, figure in found.items() if figure is not None}
    if len(rows) < 2:
        return None
    dots = with_intervals(unit, [(float(i), *figure) for i, figure in enumerate(rows.values())], line=False)
    marks = [Mark("default", rows["default"][0])] if "default" in rows else []
    curve = Curve([dots], marks, x_name="choice", label=f"{title}: {', '.join(rows)}", y_name=unit, names=list(rows))
    note = "One dot per choice, with its 95% interval over seeds."
    return Picture(title, curve, "study", note=note, half=True, legend=[])


def make_isoflops(study: dict[str, Any], title: str) -> Picture | None:
    """IsoFLOP curves over log10 N: of each budget a dot per size with its interval, and the parabola through them.

    Source: Hoffmann et al. 2022, figure 3.
    """
    series = []
    for colour, curve in enumerate(rows_of(study, "isoflop", "all parameters")):
        budget = number(curve, "budget")
        points = [
            (math.log10(size), *loss)
            for row in rows_of(curve, "points")
            if (size := number(row, "parameters")) is not None and size > 0 and (loss := estimate(get(row, "loss")))
        ]
        if budget is None or not points:
            continue
        series.append(with_intervals(f"{budget:.3g} FLOPs", points, colour, line=False))
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


def shot_rows(results: Any) -> Iterator[tuple[str, list[tuple[dict[str, Any], Point]]]]:
    """(model, (row, (K, accuracy and its interval)) of each K) from evaluate.shots."""
    for name, of_model in entries(results, "models"):
        rows = [
            (row, (k, *accuracy))
            for row in rows_of(of_model)
            if (k := number(row, "shots")) is not None and (accuracy := estimate(get(row, "accuracy")))
        ]
        if rows:
            yield visible(str(name), 60), rows


def make_shots(results: Any, title: str) -> Picture | None:
    """Accuracy by examples in the prompt, a line per model with its 95% interval."""
    series = [
        with_intervals(name, [point for _, point in rows], colour)
        for colour, (name, rows) in enumerate(shot_rows(results))
    ]
    majority = number(results, "majority")
    marks = [] if majority is None else [Mark("most frequent label", majority)]
    curve = Curve(series, marks, x_name="examples in the prompt", label=title, y_name="accuracy")
    note = "The same held-out examples and draws for every model; 95% intervals."
    unit = "accuracy, over examples in the prompt"
    return Picture(title, curve, "evaluate", unit, note=note, half=True) if series else None

"""Which pictures the report shows of each stage, and what stands in each. `figures.py` draws them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rlhf.tracking.figures import HEIGHT, SERIES_COLOURS, WIDTH, Curve, Mark, Series, draw, format_value
from rlhf.tracking.metrics import find

Points = dict[str, tuple[list[float], list[float]]]  # metric name: xs, ys


class Chart(NamedTuple):
    """What one picture shows. A name may hold `*`, end in `=label`, or begin with `-`: not that one."""

    title: str
    names: tuple[str, ...]
    half: bool = False  # half the width of the page instead of a third


CHARTS: dict[str, tuple[Chart, ...]] = {
    "pretrain": (
        Chart("Loss", ("pretrain/loss=training", "eval/*/loss"), half=True),
        Chart("Bits per byte", ("pretrain/bpb=training", "eval/*/bpb"), half=True),
        Chart("Learning rate", ("optim/lr",)),
        Chart("Gradient norm", ("optim/grad_norm",)),
        Chart("Throughput", ("time/tokens_per_s",)),
    ),
    "sft": (
        Chart("Loss", ("sft/loss=training", "eval/*/loss")),
        Chart("Learning rate", ("optim/lr",)),
        Chart("Gradient norm", ("optim/grad_norm",)),
    ),
    "reward": (
        Chart("Loss", ("reward/loss=training", "eval/*/loss")),
        Chart("Pair accuracy", ("reward/accuracy=training", "eval/*/accuracy")),
        Chart("Margin between winner and loser", ("reward/margin=training", "eval/*/margin")),
        Chart("Scores", ("reward/mean=mean", "reward/std=standard deviation")),
        Chart("Learning rate", ("optim/lr",)),
        Chart("Gradient norm", ("optim/grad_norm",)),
    ),
    "ppo": (
        Chart("Reward", ("objective/scores=score", "objective/rlhf_reward=score less KL", "eval/*/scores"),
              half=True),
        Chart("KL to the SFT model", ("objective/kl=KL", "objective/kl_k3=k3 estimate", "eval/*/kl"),
              half=True),
        Chart("Gold score", ("gold/total=rollouts", "eval/*/gold/total")),
        Chart("Gold score by part", ("gold/*", "-gold/total")),
        Chart("KL coefficient", ("objective/kl_coef",)),
        Chart("Entropy of responses", ("objective/entropy",)),
        Chart("Entropy per token", ("policy/entropy_avg",)),
        Chart("Clipped tokens", ("policy/clipfrac_avg=policy", "val/clipfrac_avg=value")),
        Chart("Approximate KL of the update", ("policy/approxkl_avg",)),
        Chart("Largest policy ratio", ("policy/ratio_max",)),
        Chart("Explained variance of the critic", ("val/explained_var",)),
        Chart("Response length", ("rollout/response_len=rollouts", "eval/*/response_len")),
        Chart("Responses that ended", ("rollout/eos_fraction=rollouts", "eval/*/eos_fraction")),
        Chart("Policy loss", ("loss/policy_avg",)),
        Chart("Value loss", ("loss/value_avg",)),
        Chart("Learning rates", ("optim/lr=policy", "optim/critic_lr=critic")),
        Chart("Gradient norms", ("optim/grad_norm=both", "optim/policy_grad_norm=policy",
                                 "optim/critic_grad_norm=critic", "optim/ptx_grad_norm=pretraining term")),
        Chart("Seconds an update", ("time/rollout_s=sampling", "time/score_s=scoring",
                                    "time/update_s=update")),
    ),
}  # fmt: skip
# Told elsewhere on the page.
NOT_DRAWN = ("time/elapsed_s",)
# A curve of at most this many points, such as an evaluation now and then, gets a dot a point.
DOTS_UP_TO = 25
HALF_WIDTH, HALF_HEIGHT = 580.0, 230.0


def expand(pattern: str, points: Points) -> list[tuple[str, str]]:
    """The (metric, label) pairs that a name of a Chart stands for among the metrics at hand.

    A label is what follows `=`, else the split of an eval/ metric, else the last word of the name.
    """
    name, _, label = pattern.partition("=")
    head, star, tail = name.partition("*")
    found = []
    for metric in points:
        if metric == name or (
            star
            and metric.startswith(head)
            and metric.endswith(tail)
            and len(metric) >= len(head) + len(tail)
            and metric.count("/") == name.count("/")
        ):
            words = metric.split("/")
            own = words[1].replace("heldout", "held-out") if words[0] == "eval" else words[-1]
            found.append((metric, label or own.replace("_", " ")))
    return found


def make_figure(chart: Chart, points: Points, marks: list[Mark]) -> dict[str, Any] | None:
    """One picture for the template: title, unit, legend, svg; None where none of its metrics has a point."""
    metrics = [pair for pattern in chart.names for pair in expand(pattern, points) if f"-{pair[0]}" not in chart.names]
    if not metrics:
        return None
    series = [
        Series(label, *points[metric], colour=i, dots=len(points[metric][0]) <= DOTS_UP_TO)
        for i, (metric, label) in enumerate(metrics)
    ]
    first = find(metrics[0][0])
    curve = Curve(series, marks, label=f"{chart.title}: {', '.join(one.label for one in series)}")
    return {
        "title": chart.title,
        "unit": first.unit if first and first.unit.lower() not in chart.title.lower() else "",
        "meaning": "; ".join(f"{name}: {row.meaning}" for name, _ in metrics if (row := find(name))),
        "half": chart.half,
        "legend": [
            {
                "label": one.label if len(series) > 1 else "",
                "colour": one.colour % SERIES_COLOURS,
                "last": format_value(one.ys[-1]),
            }
            for one in series
        ],
        "svg": draw(curve, *((HALF_WIDTH, HALF_HEIGHT) if chart.half else (WIDTH, HEIGHT))),
    }


def make_stage_figures(stage: str, points: Points, marks: dict[str, list[Mark]]) -> Iterator[dict[str, Any]]:
    """The pictures of a stage in the order of CHARTS, then one for every metric that no Chart names.

    marks: levels to draw, by the title of the Chart.
    """
    shown: set[str] = set()
    for chart in CHARTS.get(stage, ()):
        shown |= {metric for pattern in chart.names for metric, _ in expand(pattern, points)}
        figure = make_figure(chart, points, marks.get(chart.title, []))
        if figure is not None:
            yield figure
        if chart.title.startswith("KL to"):
            yield from make_frontier(points)
    for metric in points:
        if metric not in shown and metric not in NOT_DRAWN:
            figure = make_figure(Chart(metric, (metric,)), points, [])
            if figure is not None and len(points[metric][0]) > 1:
                yield figure | {"rest": True}


def make_frontier(points: Points) -> Iterator[dict[str, Any]]:
    """Scores against KL, the picture of over-optimisation: the true score falls while the learned one rises.

    Held-out measurements where there are some, the rollouts' own otherwise.
    """
    splits = [metric.split("/")[1] for metric, _ in expand("eval/*/kl", points)]
    sources = [(f"eval/{s}/kl", f"eval/{s}/scores", f"eval/{s}/gold/total", s) for s in splits]
    sources.append(("objective/kl", "objective/scores", "gold/total", "rollouts"))
    for kl, scores, gold, source in sources:
        found = False
        for title, metric in (("Score against KL", scores), ("Gold score against KL", gold)):
            pairs = sorted(_join(points, kl, metric))
            if len(pairs) < 2:
                continue
            found = True
            xs, ys = [list(column) for column in zip(*pairs, strict=True)]
            yield {
                "title": title,
                "unit": f"{source}; across: KL in nats",
                "meaning": f"{metric} against {kl}; each dot is one step of training",
                "half": False,
                "legend": [],
                "svg": draw(Curve([Series(title, xs, ys, dots=True)], x_name="KL", label=title)),
            }
        if found:
            return


def _join(points: Points, x_metric: str, y_metric: str) -> list[tuple[float, float]]:
    xs = dict(zip(*points.get(x_metric, ([], [])), strict=True))
    return [(xs[step], y) for step, y in zip(*points.get(y_metric, ([], [])), strict=True) if step in xs]


def make_calibration(rows: list[tuple[float, float, float, float]]) -> str | None:
    """P(win | score gap), predicted and as labelers chose; rows of (gap, predicted, observed, n)."""
    if not rows:
        return None
    gaps = [row[0] for row in rows]
    curve = Curve(
        [
            Series("predicted", gaps, [row[1] for row in rows], 3),
            Series("observed", gaps, [row[2] for row in rows], 0, dots=True),
        ],
        [Mark("chance", 0.5)],
        x_name="score gap",
        label="Calibration of the reward model: share of wins against score gap",
    )
    return draw(curve, 480.0, 260.0)

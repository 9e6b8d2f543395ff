"""The dashboard: W&B's own objects, and a server that does not take it."""

import re

from rlhf.commands.dashboard import SECTIONS, STEP_AXIS, make_workspace
from rlhf.runs.metric_table import CHARTS, COST, METRICS, TABLES, X_AXES, metric_pattern

# Logged, and in no panel on purpose.
NOT_SHOWN = {
    "optim/steps": "a constant; in the report",
    "custom/<part>": "of the user's own functions; in the report, one picture each",
    "time/elapsed_s": "W&B's own runtime; in the report's table of stages",
    "calibration/gain": "one number a run, in its summary",
    "calibration/shift": "one number a run, in its summary",
    "progress/step": "an x axis",
    "progress/episodes": "an x axis",
    "progress/tokens": "an x axis",
}


def panel_metrics() -> set[str]:
    """Every metric that a panel draws or that is its axis."""
    charts = [(stage, chart) for stage in SECTIONS for chart in CHARTS[stage]]
    axes = {chart.x or X_AXES.get(stage, STEP_AXIS) for stage, chart in charts}
    return axes | {name for _, chart in charts for name in chart.metrics}


def test_wandbs_own_objects_take_every_chart_and_table() -> None:
    workspace = make_workspace("p", "me")
    assert CHARTS.keys() - {"judge"} == SECTIONS.keys()
    assert [section.name for section in workspace.sections] == [*SECTIONS.values(), "Cost"]
    assert set(NOT_SHOWN) <= {metric.name for metric in METRICS}
    plots = {getattr(panel, "title", None): panel for section in workspace.sections for panel in section.panels}
    assert plots["KL to the SFT model"].metric_regex == "^(objective/kl|objective/kl_k3|eval/[^/]+/kl)$"
    assert plots["KL coefficient"].y == ["objective/kl_coef"] and plots["KL coefficient"].x == "progress/episodes"
    assert plots["Reward against the root of KL"].x == "objective/sqrt_kl"
    drawn = sum(chart not in COST for stage in SECTIONS for chart in CHARTS[stage]) + len(COST) + len(TABLES)
    assert sum(len(section.panels) for section in workspace.sections) == drawn
    for section in workspace.sections:  # no panel covers another one
        places = [panel.layout for panel in section.panels]
        cells = [(p.x + i, p.y + j) for p in places for i in range(p.w) for j in range(p.h)]
        assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_a_pattern_is_exact() -> None:
    pattern = metric_pattern(("gold/*", "eval/*/kl"))
    assert re.search(pattern, "gold/total") and re.search(pattern, "eval/dev/kl")
    assert not re.search(pattern, "eval/dev/kl_k3") and not re.search(pattern, "eval/dev/gold/total")

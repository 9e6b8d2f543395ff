"""The W&B dashboard as code: runs/charts.py as a specification, and as a workspace of `wandb_workspaces`.

The specification is plain JSON that needs neither network nor account. Sending it needs a key; `rlhf dashboard`
is the command.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.runs.charts import CHARTS, COST, TABLE_PANELS, TABLES, Chart, TablePanel, metric_pattern
from rlhf.runs.metrics import X_AXES, find
from rlhf.system.files import read_json

NAME = "RLHF: reward and KL"
# Grid units of W&B's page: 24 across.
HEIGHT, TABLE_HEIGHT = 8, 14
SMOOTHING = 0.0  # curves are not smoothed; the user can smooth each panel
STEP = "progress/step"
NAMES = {
    "ppo": "PPO", "reward": "Reward model", "dpo": "DPO", "classify": "Labelled tasks", "sft": "SFT", "pretrain": "Pretraining",
}  # fmt: skip


def sections() -> Iterator[tuple[str, str, tuple[Chart | TablePanel, ...]]]:
    """(name, x axis, panels) of each section: one per stage, and one of the cost of all."""
    for stage, name in NAMES.items():
        charts = [chart for chart in CHARTS[stage] if chart not in COST]
        yield name, X_AXES.get(stage, STEP), (*charts, *TABLE_PANELS.get(stage, ()))
    yield "Cost", STEP, COST


def width(panel: Chart | TablePanel) -> int:
    """Columns of W&B's grid."""
    if isinstance(panel, Chart):
        return 12 if panel.half else 8
    return 8 if panel.chart else 24


def make_specification(project: str, entity: str | None = None) -> dict[str, Any]:
    """The dashboard as JSON: sections, panels, metrics with unit and meaning, axes."""
    return {
        "name": NAME,
        "project": project,
        "entity": entity,
        "sections": [
            {"name": name, "panels": [_panel_specification(panel, x) for panel in panels]}
            for name, x, panels in sections()
        ],
    }


def _panel_specification(panel: Chart | TablePanel, x: str) -> dict[str, Any]:
    specification: dict[str, Any] = {"title": panel.title, "width": width(panel)}
    if isinstance(panel, TablePanel):
        specification |= {"kind": "chart of a table" if panel.chart else "table", "table": panel.table}
        specification["columns"] = list(TABLES[panel.table])
        return specification | ({"chart": panel.chart, "fields": dict(panel.fields)} if panel.chart else {})
    metrics = []
    for name in panel.metrics:
        metric = find(name.replace("*", "word"))
        assert metric is not None
        metrics.append({"name": name, "unit": metric.unit, "meaning": metric.meaning})
    return specification | {"kind": "lines", "x": panel.x or x, "log_y": panel.log_y, "metrics": metrics}


def make_workspace(project: str, entity: str) -> Any:
    """The dashboard as a `wandb_workspaces.workspaces.Workspace`; nothing is sent."""
    import wandb_workspaces.workspaces as ws

    made = []
    for number, (name, x, panels) in enumerate(sections()):
        places = flow([width(panel) for panel in panels])
        made.append(
            ws.Section(
                name=name,
                panels=[make_panel(panel, place, x) for panel, place in zip(panels, places, strict=True)],
                is_open=number < 2,
                layout_settings=ws.SectionLayoutSettings(columns=3, rows=3),
            )
        )
    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=made,
        settings=ws.WorkspaceSettings(x_axis=STEP, remove_legends_from_panels=False),
    )


def flow(widths: list[int]) -> list[tuple[int, int]]:
    """(x, y) of panels placed in rows of 24 columns, like words in lines."""
    places, x, y = [], 0, 0
    for width in widths:
        if x + width > 24:
            x, y = 0, y + HEIGHT
        places.append((x, y))
        x += width
    return places


def make_panel(panel: Chart | TablePanel, place: tuple[int, int], x: str) -> Any:
    import wandb_workspaces.reports.v2 as wr

    tall = isinstance(panel, TablePanel) and not panel.chart
    layout = wr.Layout(x=place[0], y=place[1], w=width(panel), h=TABLE_HEIGHT if tall else HEIGHT)
    if isinstance(panel, TablePanel):
        if not panel.chart:
            return wr.WeavePanelSummaryTable(table_name=panel.table, layout=layout)
        return wr.CustomChart(
            query={"summaryTable": {"tableKey": panel.table}},
            chart_name=panel.chart,
            chart_fields=dict(panel.fields),
            chart_strings={"title": panel.title},
            layout=layout,
        )
    plot: dict[str, Any] = {
        "title": panel.title,
        "x": panel.x or x,
        "log_y": panel.log_y,
        "layout": layout,
        "smoothing_factor": SMOOTHING,
        "smoothing_show_original": True,
    }
    if any("*" in name for name in panel.metrics):
        return wr.LinePlot(metric_regex=metric_pattern(panel.metrics), **plot)
    return wr.LinePlot(y=list(panel.metrics), **plot)


def send(project: str, entity: str, remembered: Path) -> str:
    """Create the dashboard in a W&B project, or update the one at the address `remembered`; returns its address.

    Raises: wandb's errors if the server does not answer.
    """
    import wandb_workspaces.workspaces as ws

    workspace = make_workspace(project, entity)
    address = read_json(remembered).get("url")
    if isinstance(address, str):
        there = ws.Workspace.from_url(address)
        there.name, there.sections, there.settings = workspace.name, workspace.sections, workspace.settings
        workspace = there
    workspace.save()
    return str(workspace.url)

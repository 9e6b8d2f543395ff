"""The W&B dashboard as code: runs/charts.py as a specification in JSON, and as a workspace of `wandb_workspaces`.

The specification needs neither network nor account. Sending the workspace needs a key; `rlhf dashboard` is the command.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.runs.charts import CHARTS, COST, TABLE_PANELS, TABLES, Chart, TablePanel, metric_pattern
from rlhf.runs.metric_table import X_AXES, find
from rlhf.system.files import read_json

WORKSPACE_NAME = "RLHF: reward and KL"
# Grid units of W&B's page: 24 across.
COLUMNS, PANEL_HEIGHT, TABLE_HEIGHT = 24, 8, 14
STEP_AXIS = "progress/step"
NAMES = {
    "ppo": "PPO", "reward": "Reward model", "dpo": "DPO", "classify": "Labelled tasks", "sft": "SFT", "pretrain": "Pretraining",
}  # fmt: skip


def sections() -> Iterator[tuple[str, str, tuple[Chart | TablePanel, ...]]]:
    """(name, x axis, panels) of each section: one per stage, and one of the cost of all."""
    for stage, name in NAMES.items():
        charts = [chart for chart in CHARTS[stage] if chart not in COST]
        yield name, X_AXES.get(stage, STEP_AXIS), (*charts, *TABLE_PANELS.get(stage, ()))
    yield "Cost", STEP_AXIS, COST


def width_of(panel: Chart | TablePanel) -> int:
    """Columns of W&B's grid."""
    if isinstance(panel, Chart):
        return 12 if panel.half else 8
    return 8 if panel.chart else COLUMNS


def make_specification(project: str, entity: str | None = None) -> dict[str, Any]:
    """The dashboard as JSON: sections, panels, metrics with unit and meaning, axes."""

    def specify(panel: Chart | TablePanel, x: str) -> dict[str, Any]:
        both = {"title": panel.title, "width": width_of(panel)}
        if isinstance(panel, TablePanel):
            kind = {"kind": "chart of a table" if panel.chart else "table", "table": panel.table}
            chart = {"chart": panel.chart, "fields": dict(panel.fields)} if panel.chart else {}
            return both | kind | {"columns": list(TABLES[panel.table])} | chart
        metrics = []
        for name in panel.metrics:
            metric = find(name.replace("*", "word"))
            assert metric is not None
            metrics.append({"name": name, "unit": metric.unit, "meaning": metric.meaning})
        return both | {"kind": "lines", "x": panel.x or x, "log_y": panel.log_y, "metrics": metrics}

    shown = [{"name": name, "panels": [specify(panel, x) for panel in panels]} for name, x, panels in sections()]
    return {"name": WORKSPACE_NAME, "project": project, "entity": entity, "sections": shown}


def make_workspace(project: str, entity: str) -> Any:
    """The dashboard as a `wandb_workspaces.workspaces.Workspace`; nothing is sent."""
    import wandb_workspaces.workspaces as ws

    made: list[Any] = []
    for name, x, panels in sections():
        places = flow([width_of(panel) for panel in panels])
        shown = [make_panel(panel, place, x) for panel, place in zip(panels, places, strict=True)]
        layout = ws.SectionLayoutSettings(columns=3, rows=3)
        made.append(ws.Section(name=name, panels=shown, is_open=len(made) < 2, layout_settings=layout))
    settings = ws.WorkspaceSettings(x_axis=STEP_AXIS, remove_legends_from_panels=False)
    return ws.Workspace(entity=entity, project=project, name=WORKSPACE_NAME, sections=made, settings=settings)


def flow(widths: list[int]) -> list[tuple[int, int]]:
    """(x, y) of panels placed in rows of 24 columns, like words in lines."""
    places, x, y = [], 0, 0
    for width in widths:
        if x + width > COLUMNS:
            x, y = 0, y + PANEL_HEIGHT
        places.append((x, y))
        x += width
    return places


def make_panel(panel: Chart | TablePanel, place: tuple[int, int], x: str) -> Any:
    """One of W&B's own panels."""
    import wandb_workspaces.reports.v2 as wr

    tall = isinstance(panel, TablePanel) and not panel.chart
    layout = wr.Layout(x=place[0], y=place[1], w=width_of(panel), h=TABLE_HEIGHT if tall else PANEL_HEIGHT)
    if isinstance(panel, Chart):
        pattern = any("*" in name for name in panel.metrics)
        names: dict[str, Any] = (
            {"metric_regex": metric_pattern(panel.metrics)} if pattern else {"y": list(panel.metrics)}
        )
        axes: dict[str, Any] = {"title": panel.title, "x": panel.x or x, "log_y": panel.log_y}
        return wr.LinePlot(**names, **axes, layout=layout, smoothing_factor=0.0, smoothing_show_original=True)
    if not panel.chart:
        return wr.WeavePanelSummaryTable(table_name=panel.table, layout=layout)
    return wr.CustomChart(
        query={"summaryTable": {"tableKey": panel.table}},
        chart_name=panel.chart,
        chart_fields=dict(panel.fields),
        chart_strings={"title": panel.title},
        layout=layout,
    )


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

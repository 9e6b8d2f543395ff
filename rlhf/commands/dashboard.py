"""`rlhf dashboard`: the W&B dashboard from the table of charts. With a key it is created or updated; without one only its
specification is written, which needs neither network nor account.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.runs.metric_table import CHARTS, COST, TABLES, X_AXES, Chart, find, metric_pattern
from rlhf.system.files import read_json, write_json, writing
from rlhf.system.terminal import say

# Seconds after which a server that does not answer is given up.
SEND_TIMEOUT = 60.0
WORKSPACE = "RLHF: reward and KL"
# Grid units of W&B's page: 24 across.
COLUMNS, PANEL_HEIGHT, TABLE_HEIGHT = 24, 8, 14
STEP_AXIS = "progress/step"
SECTIONS = {
    "ppo": "PPO", "reward": "Reward model", "dpo": "DPO", "classify": "Labelled tasks", "sft": "SFT", "pretrain": "Pretraining",
}  # fmt: skip
Panel = dict[str, Any]


def run(config: Config) -> None:
    """Write runs_dir/dashboard.json and, if WANDB_API_KEY is set, the dashboard of the project.

    Raises: UserError if the folder cannot be written or the server refuses or does not answer.
    """
    path = Path(config.runs_dir) / "dashboard.json"
    project, entity = os.environ.get("WANDB_PROJECT", config.tracking.project), config.tracking.entity
    before = read_json(path)
    specification = make_specification(project, entity)
    same_place = before.get("project") == project and before.get("entity") == entity
    if same_place and isinstance(before.get("url"), str):
        specification["url"] = before["url"]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, specification)
    panels = sum(len(section["panels"]) for section in specification["sections"])
    say(f"dashboard: {panels} panels in {len(specification['sections'])} sections -> {path}")
    if not os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        say("dashboard: offline: set WANDB_API_KEY and run it again to create or update it in the project")
        return
    specification["url"] = send_within(SEND_TIMEOUT, specification, path)
    write_json(path, specification)
    say(f"dashboard: {specification['url']}")


def make_specification(project: str, entity: str | None = None) -> dict[str, Any]:
    """The dashboard as JSON: a section per stage and one of the cost of all; panels, metrics with unit and meaning, axes."""
    tables = {
        "ppo": [table_panel("The same held-out prompts over time", "samples")],
        "reward": [
            table_panel("Calibration: wins against score gap", "calibration", step="gap", lineKey="curve", lineVal="share"),
            table_panel("Scores of SFT and PPO", "score_histogram", step="score", lineKey="model", lineVal="share"),
        ],
    }  # fmt: skip
    panels = {
        name: [lines_panel(chart, X_AXES.get(stage, STEP_AXIS)) for chart in CHARTS[stage] if chart not in COST]
        + tables.get(stage, [])
        for stage, name in SECTIONS.items()
    }
    panels["Cost"] = [lines_panel(chart, STEP_AXIS) for chart in COST]
    sections = [{"name": name, "panels": shown} for name, shown in panels.items()]
    return {"name": WORKSPACE, "project": project, "entity": entity, "sections": sections}


def lines_panel(chart: Chart, x: str) -> Panel:
    metrics = []
    for name in chart.metrics:
        metric = find(name.replace("*", "word"))
        assert metric is not None
        metrics.append({"name": name, "unit": metric.unit, "meaning": metric.meaning})
    size = {"title": chart.title, "width": 12 if chart.half else 8}
    return size | {"kind": "lines", "x": chart.x or x, "log_y": chart.log_y, "metrics": metrics}


def table_panel(title: str, table: str, **axes: str) -> Panel:
    """A table that stages log; or a chart of it, of W&B's preset for lines, whose axes are columns of the table."""
    kind = {"kind": "chart of a table", "chart": "wandb/lineseries/v0", "fields": axes} if axes else {"kind": "table"}
    return {"title": title, "width": 8 if axes else COLUMNS, "table": table, "columns": list(TABLES[table])} | kind


def make_workspace(specification: dict[str, Any], entity: str) -> Any:
    """The dashboard as a `wandb_workspaces.workspaces.Workspace`; nothing is sent."""
    import wandb_workspaces.workspaces as ws

    made: list[Any] = []
    for section in specification["sections"]:
        panels, x, y = [], 0, 0
        for panel in section["panels"]:
            if x + panel["width"] > COLUMNS:  # rows of panels, like words in lines
                x, y = 0, y + PANEL_HEIGHT
            panels.append(make_panel(panel, x, y))
            x += panel["width"]
        layout = ws.SectionLayoutSettings(columns=3, rows=3)
        made.append(ws.Section(name=section["name"], panels=panels, is_open=len(made) < 2, layout_settings=layout))
    settings = ws.WorkspaceSettings(x_axis=STEP_AXIS, remove_legends_from_panels=False)
    return ws.Workspace(
        entity=entity, project=specification["project"], name=WORKSPACE, sections=made, settings=settings
    )


def make_panel(panel: Panel, x: int, y: int) -> Any:
    """One of W&B's own panels at a place of the grid."""
    import wandb_workspaces.reports.v2 as wr

    height = TABLE_HEIGHT if panel["kind"] == "table" else PANEL_HEIGHT
    layout = wr.Layout(x=x, y=y, w=panel["width"], h=height)
    if panel["kind"] == "table":
        return wr.WeavePanelSummaryTable(table_name=panel["table"], layout=layout)
    if panel["kind"] == "chart of a table":
        return wr.CustomChart(
            query={"summaryTable": {"tableKey": panel["table"]}},
            chart_name=panel["chart"],
            chart_fields=panel["fields"],
            chart_strings={"title": panel["title"]},
            layout=layout,
        )
    names = tuple(metric["name"] for metric in panel["metrics"])
    shown: dict[str, Any] = {"metric_regex": metric_pattern(names)} if "*" in "".join(names) else {"y": list(names)}
    axes = {"title": panel["title"], "x": panel["x"], "log_y": panel["log_y"]}
    return wr.LinePlot(**shown, **axes, layout=layout, smoothing_factor=0.0, smoothing_show_original=True)


def send_within(seconds: float, specification: dict[str, Any], path: Path) -> str:
    """Create the dashboard, or update the one at the specification's address, and return its address; in a thread, since W&B's own
    retries last for minutes.

    Raises: UserError if the server refuses or does not answer in time.
    """
    answer: dict[str, str] = {}

    def work() -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
            import wandb_workspaces.workspaces as ws

            owner = specification["entity"] or wandb.Api(timeout=int(seconds)).default_entity
            if not owner:
                raise ValueError("the key has no default entity: set tracking.entity")
            workspace = make_workspace(specification, owner)
            if "url" in specification:
                there = ws.Workspace.from_url(specification["url"])
                there.name, there.sections, there.settings = workspace.name, workspace.sections, workspace.settings
                workspace = there
            workspace.save()
            answer["url"] = str(workspace.url)
        except Exception as error:
            answer["reason"] = " ".join(str(error).split())[:300]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if "url" in answer:
        return answer["url"]
    reason = answer.get("reason", f"no answer within {seconds:.0f} s")
    raise UserError(
        f"dashboard: W&B did not take it ({reason}): check WANDB_API_KEY, WANDB_BASE_URL and "
        f"tracking.entity; the specification is in {json.dumps(str(path))}"
    )

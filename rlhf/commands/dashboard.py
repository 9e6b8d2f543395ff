"""`rlhf dashboard`: creates the W&B dashboard from the table of charts in the project, or updates the one it created there."""

import os
import threading
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.runs.metric_table import CHARTS, COST, X_AXES, Chart, metric_pattern
from rlhf.runs.trackers import project_of
from rlhf.system.files import read_json, write_json
from rlhf.system.terminal import say

SEND_TIMEOUT = 60.0  # seconds after which a server that does not answer is given up
WORKSPACE = "RLHF: reward and KL"
STEP_AXIS = "progress/step"
SECTIONS = {
    "ppo": "PPO", "reward": "Reward model", "dpo": "DPO", "classify": "Labelled tasks", "sft": "SFT", "pretrain": "Pretraining",
    "distill": "Distillation",
}  # fmt: skip


def run(config: Config) -> None:
    """Create or update the dashboard; its address is in runs_dir/dashboard.json."""
    if not os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        raise UserError("dashboard: W&B is offline: set WANDB_API_KEY, and send offline runs with `wandb sync`")
    path = Path(config.runs_dir) / "dashboard.json"
    place = {"project": project_of(config.tracking.project), "entity": config.tracking.entity}
    before = read_json(path)
    known = before.get("url") if before | place == before else None
    answer: dict[str, str] = {}

    def work() -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
            import wandb_workspaces.workspaces as ws

            owner = place["entity"] or wandb.Api(timeout=int(SEND_TIMEOUT)).default_entity
            if not owner:
                raise ValueError("the key has no default entity: set tracking.entity")
            workspace = made = make_workspace(str(place["project"]), owner)
            if known is not None:
                workspace = ws.Workspace.from_url(known)
                workspace.name, workspace.sections, workspace.settings = made.name, made.sections, made.settings
            workspace.save()
            answer["url"] = str(workspace.url)
        except Exception as error:
            answer["reason"] = " ".join(str(error).split())[:300]

    thread = threading.Thread(target=work, daemon=True)  # since W&B's own retries last for minutes
    thread.start()
    thread.join(SEND_TIMEOUT)
    if "url" not in answer:
        refused = f"W&B did not take it ({answer.get('reason', f'no answer within {SEND_TIMEOUT:.0f} s')})"
        raise UserError(f"dashboard: {refused}: check WANDB_API_KEY, WANDB_BASE_URL and tracking.entity")
    write_json(path, place | {"url": answer["url"]})
    say(f"dashboard: {answer['url']}")


def make_workspace(project: str, entity: str) -> Any:
    """The dashboard as a `wandb_workspaces.workspaces.Workspace`: a section per stage, and one of the cost of all."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    panels: dict[str, list[Any]] = {
        name: [line_plot(chart, X_AXES.get(stage, STEP_AXIS)) for chart in CHARTS[stage] if chart not in COST]
        for stage, name in SECTIONS.items()
    }
    panels["PPO"].append(wr.WeavePanelSummaryTable(table_name="samples"))
    panels["Cost"] = [line_plot(chart, STEP_AXIS) for chart in COST]
    layout = ws.SectionLayoutSettings(columns=3, rows=3)  # W&B places the panels
    sections = [
        ws.Section(name=name, panels=shown, is_open=i < 2, layout_settings=layout)
        for i, (name, shown) in enumerate(panels.items())
    ]
    settings = ws.WorkspaceSettings(x_axis=STEP_AXIS, remove_legends_from_panels=False)
    return ws.Workspace(entity=entity, project=project, name=WORKSPACE, sections=sections, settings=settings)


def line_plot(chart: Chart, x: str) -> Any:
    import wandb_workspaces.reports.v2 as wr

    names = chart.metrics
    shown: dict[str, Any] = {"metric_regex": metric_pattern(names)} if "*" in "".join(names) else {"y": list(names)}
    shown |= {"title": chart.title, "x": chart.x or x, "log_y": chart.log_y}
    return wr.LinePlot(**shown, smoothing_factor=0.0, smoothing_show_original=True)

"""`rlhf dashboard`: the W&B dashboard from code. With a key it is created or updated; without one only its specification is written."""

import json
import os
import threading
from pathlib import Path

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.system.files import read_json, write_json, writing
from rlhf.system.terminal import say

# Seconds after which a server that does not answer is given up.
SEND_TIMEOUT = 60.0


def run(config: Config) -> None:
    """Write runs_dir/dashboard.json and, if WANDB_API_KEY is set, the dashboard of the project.

    Raises: UserError if the folder cannot be written or the server refuses or does not answer.
    """
    from rlhf.report.workspace import make_specification

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
    specification["url"] = send_within(SEND_TIMEOUT, project, entity, path)
    write_json(path, specification)
    say(f"dashboard: {specification['url']}")


def send_within(seconds: float, project: str, entity: str | None, remembered: Path) -> str:
    """Send the dashboard and return its address; in a thread, since W&B's own retries last for minutes.

    Raises: UserError if the server refuses or does not answer in time.
    """
    addresses: list[str] = []
    reasons: list[str] = []

    def work() -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb

            from rlhf.report.workspace import send

            owner = entity or wandb.Api(timeout=int(seconds)).default_entity
            if not owner:
                raise ValueError("the key has no default entity: set tracking.entity")
            addresses.append(send(project, owner, remembered))
        except Exception as error:
            reasons.append(" ".join(str(error).split())[:300])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if addresses:
        return addresses[0]
    reason = reasons[0] if reasons else f"no answer within {seconds:.0f} s"
    raise UserError(
        f"dashboard: W&B did not take it ({reason}): check WANDB_API_KEY, WANDB_BASE_URL and "
        f"tracking.entity; the specification is in {json.dumps(str(remembered))}"
    )

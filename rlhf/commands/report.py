"""`rlhf report run=x`: a run as one self-contained HTML page."""

from pathlib import Path

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.runs.folders import existing_run, refuse_inside_stage
from rlhf.system.terminal import say


def run(config: Config) -> None:
    from rlhf.report.page import write_report

    folder, out = existing_run(config), None if config.report.out is None else Path(config.report.out)
    if out is not None:
        refuse_inside_stage(out, "report.out")
        if out.is_dir():
            raise UserError(f"report.out={out}: is a folder, want a file: add a name such as report.html")
        if out.exists() and not config.overwrite:
            with out.open("rb") as file:
                if not file.read(15).lower().startswith(b"<!doctype html"):
                    raise UserError(f"report.out={out}: exists and is no report: choose another, or add overwrite=true")
    say(f"report: {write_report(folder, out)}")

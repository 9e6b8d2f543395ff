"""`rlhf report run=x`: a run as one self-contained HTML page."""

from pathlib import Path

from rlhf.config import Config
from rlhf.runs.folders import existing_run, refuse_inside_stage
from rlhf.system.files import check_replaceable
from rlhf.system.terminal import say


def run(config: Config) -> None:
    from rlhf.report.page import write_report

    folder, out = existing_run(config), None if config.report.out is None else Path(config.report.out)
    if out is not None:
        refuse_inside_stage(out, "report.out")
        check_replaceable(out, True, "report.out", "report", is_report)
    say(f"report: {write_report(folder, out)}")


def is_report(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:15].lower().startswith(b"<!doctype html")

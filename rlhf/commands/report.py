"""`rlhf report run=a[,b,c]`: a run, or several on the same axes, as one self-contained HTML page."""

from dataclasses import replace
from pathlib import Path

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.runs.folders import refuse_inside_stage, run_folder
from rlhf.system.terminal import say


def run(config: Config) -> None:
    """Write the page. Raises: UserError for an unknown run."""
    from rlhf.report.page import write_report

    say(f"report: {write_report(*run_folders(config), path=checked_out(config))}")


def checked_out(config: Config) -> Path | None:
    """report.out. Raises: UserError if it would overwrite anything but a report."""
    if config.report.out is None:
        return None
    out = Path(config.report.out)
    refuse_inside_stage(out, "report.out")
    if out.is_dir():
        raise UserError(f"report.out={out}: is a folder, want a file: add a name such as report.html")
    if out.exists() and not config.overwrite:
        with out.open("rb") as file:
            if not file.read(15).lower().startswith(b"<!doctype html"):
                raise UserError(f"report.out={out}: exists and is no report: choose another, or add overwrite=true")
    return out


def run_folders(config: Config) -> list[Path]:
    """The folders of run=a,b,c. Raises: UserError if one is not a run, or is named twice."""
    folders: list[Path] = []
    for name in filter(None, map(str.strip, config.run.split(","))):
        folder = run_folder(replace(config, run=name))
        if not folder.is_dir():
            raise UserError(f"{folder}: no such run: check run=… and runs_dir=…")
        if folder in folders:
            raise UserError(f"run={config.run}: {name} is named twice: name each run once")
        folders.append(folder)
    if not folders:
        raise UserError("run=: want the name of a run, or several separated by commas")
    return folders

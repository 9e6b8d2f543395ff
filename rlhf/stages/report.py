"""`rlhf report`: the run as one self-contained HTML page."""

from pathlib import Path

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.runs import disk_error, run_folder


def run(config: Config) -> None:
    """Write runs/<run>/report.html. Raises: UserError where there is no such run."""
    folder = run_folder(config)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run: check run=… and runs_dir=…")
    print(f"report: {write(folder)}")


def write(folder: Path) -> Path:
    from rlhf.tracking.report import write_report

    try:
        return write_report(folder)
    except OSError as error:
        raise disk_error(error, folder / "report.html") from error

"""A stage that is replaced: the new one is written beside the old one, which stays until the new one is complete.

runs/<run>/sft/       the stage that is there
runs/<run>/.sft.new/  its replacement under way (overwrite=true); an interrupted one is resumed
runs/<run>/.sft.old/  only for the moment between the two renames of the swap
"""

import shutil
from pathlib import Path

from rlhf.files import disk_error


def beside(folder: Path) -> Path:
    """Where the replacement of a stage's folder is written."""
    return folder.with_name(f".{folder.name}.new")


def set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def under_way(folder: Path) -> Path:
    """The folder in which the stage works now: its replacement's, if there is one, else its own."""
    return beside(folder) if (beside(folder) / "stage.json").is_file() else folder


def swap(folder: Path) -> None:
    """Put the complete replacement in the place of the old stage. Raises: UserError if the system refuses."""
    new, old = beside(folder), set_aside(folder)
    try:
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except OSError as error:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise disk_error(error, folder) from error
    shutil.rmtree(old, ignore_errors=True)


def settle(folder: Path) -> None:
    """Finish what a kill in the middle of `swap` left. Call it with the stage's lock held."""
    new, old = beside(folder), set_aside(folder)
    if not old.exists():
        return
    if (folder / "stage.json").exists():
        shutil.rmtree(old, ignore_errors=True)
    else:  # killed between the two renames
        shutil.rmtree(folder, ignore_errors=True)  # holds a lock at most
        (new if (new / "stage.json").exists() else old).rename(folder)
        shutil.rmtree(old, ignore_errors=True)

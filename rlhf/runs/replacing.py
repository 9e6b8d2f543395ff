"""Replacing a stage: the new one is written to a separate folder; the old one stays until the new one is complete.

runs/<run>/sft/       the existing stage
runs/<run>/.sft.new/  its unfinished replacement (overwrite=true); an interrupted one is resumed
runs/<run>/.sft.old/  exists only between the two renames of the swap
"""

import shutil
from pathlib import Path

from rlhf.files import beside, set_aside


def under_way(folder: Path) -> Path:
    """The folder in which the stage is written: that of its replacement, if there is one, else its own."""
    return beside(folder) if (beside(folder) / "stage.json").is_file() else folder


def settle(folder: Path) -> None:
    """Finish a `swap` that was killed half-way. Call it with the stage's lock held."""
    new, old = beside(folder), set_aside(folder)
    if not old.exists():
        return
    if (folder / "stage.json").exists():
        shutil.rmtree(old, ignore_errors=True)
    else:  # killed between the two renames
        shutil.rmtree(folder, ignore_errors=True)  # contains at most a lock
        (new if (new / "stage.json").exists() else old).rename(folder)
        shutil.rmtree(old, ignore_errors=True)

"""What a run's view elsewhere says of where it comes from: parents, data, code. runs.py keeps the record itself."""

import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def git_state(folder: Path = Path(__file__).parent) -> dict[str, Any]:
    """{"commit", "branch", "dirty"} of the checkout that the code lies in; empty if it lies in none."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # An installed package may lie below somebody else's checkout, which does not hold this file.
    if not git("ls-files", "--error-unmatch", "metrics.py"):
        return {}
    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no", "--", ".")
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    return {"commit": commit, "branch": branch, "dirty": bool(status)} if commit else {}


def tracking_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's record as the configuration of its run: lineage at the top, then every setting by its own key."""
    lineage = {key: record.get(key) for key in ("stage", "run", "seed", "parents", "data", "versions")}
    settings = {key: value for key, value in (record.get("config") or {}).items() if key not in lineage}
    return {**lineage, "git": record.get("git") or {}, **settings}

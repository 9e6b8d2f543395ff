"""The lineage of a run as shown in W&B and other trackers: parents, data, code."""

import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def git_state(folder: Path = Path(__file__).parent) -> dict[str, Any]:
    """{"commit", "branch", "dirty"} of the git checkout that contains the code; empty if there is none."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # An installed package may be inside another project's checkout, which does not contain this file.
    if not git("ls-files", "--error-unmatch", Path(__file__).name):
        return {}
    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no", "--", ".")
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    return {"commit": commit, "branch": branch, "dirty": bool(status)} if commit else {}


def tracking_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's record as the configuration of its run: lineage at the top, then every setting by its own key."""
    lineage = {key: record.get(key) for key in ("stage", "run", "seed", "parents", "data", "versions")}
    settings = {key: value for key, value in (record.get("config") or {}).items() if key not in lineage}
    return {**lineage, "git": record.get("git") or {}, **settings}

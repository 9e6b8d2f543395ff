"""Checkpoints: a manifest of hashes is written last, so a checkpoint is whole or ignored; and which checkpoints are kept."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.config import CheckpointConfig
from rlhf.errors import UserError
from rlhf.runs.folders import read_record
from rlhf.system.files import hash_files, share, sync, write_json, writing
from rlhf.system.terminal import say

MANIFEST = "manifest.json"


def seal(folder: Path, figure: float | None = None) -> None:
    """Sync a checkpoint's files, then write the manifest of their hashes. figure: for checkpoints.keep_best, higher is better."""
    share(folder)
    for path in filter(Path.is_file, folder.rglob("*")):
        sync(path)
    write_json(folder / MANIFEST, {"files": hash_files(folder, skip=(MANIFEST,)), "figure": figure})
    for path in (folder, folder.parent):  # before older checkpoints are removed
        sync(path)


def read_manifest(folder: Path) -> dict | None:
    """A checkpoint's manifest, or None if there is none that can be used."""
    try:
        return read_record(folder / MANIFEST, "manifest")
    except UserError:
        return None


def is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint is there with the hash that its manifest states."""
    manifest = read_manifest(folder)
    return manifest is not None and manifest["files"].items() <= hash_files(folder).items()


def checkpoint_step(folder: Path) -> int:
    return int(folder.name.rsplit("-", 1)[-1])


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first, whole or not."""
    numbered = [p for p in folder.glob("*-*") if p.is_dir() and p.name.rsplit("-", 1)[-1].isdigit()]
    return sorted(numbered, key=checkpoint_step)


def latest_checkpoint(folder: Path, say: Callable[[str], None] = say) -> Path | None:
    """The newest whole checkpoint; damaged ones are reported and skipped."""
    for path in reversed(checkpoints(folder)):
        if is_whole(path):
            return path
        if (path / MANIFEST).exists():
            say(f"{path}: checkpoint is damaged (a file is missing or its hash differs): using the previous one")
    return None


def save_checkpoint(
    folder: Path, step: int, write: Callable[[Path], None], keep: CheckpointConfig, figure: float | None = None
) -> Path:
    """Write `folder/step-<step>` through `write`, seal it, then `prune_checkpoints`.
    Raises: UserError if the disk is full or not writable; earlier checkpoints stay.
    """
    target = folder / f"step-{step}"
    shutil.rmtree(target, ignore_errors=True)
    try:
        with writing(target):
            target.mkdir(parents=True)
            write(target)
            seal(target, figure)
    except Exception:
        shutil.rmtree(target, ignore_errors=True)
        raise
    prune_checkpoints(folder, keep)
    return target


def prune_checkpoints(folder: Path, keep: CheckpointConfig) -> None:
    """Remove all checkpoints but those that `keep` names."""
    newest_first = [path for path in checkpoints(folder)[::-1] if (path / MANIFEST).exists()]
    figures: dict[Path, Any] = {path: (read_manifest(path) or {}).get("figure") for path in newest_first}
    measured = [path for path in newest_first if figures[path] is not None]
    best_first = sorted(measured, key=figures.__getitem__, reverse=True)  # of equal ones the later first
    of_step = [path for path in newest_first if keep.keep_every and checkpoint_step(path) % keep.keep_every == 0]
    kept = {*newest_first[: keep.keep], *best_first[: keep.keep_best], *of_step}
    for path in checkpoints(folder):
        if path not in kept:
            remove_checkpoint(path)


FIRST_SECONDS = 120.0  # the first checkpoint of a stage comes at least so early
MOST_WRITING = 0.05  # of the time, if checkpoints are slow to write


def checkpoint_due(
    settings: CheckpointConfig, step: int, seconds: float, writing: float = 0.0, *, first: bool = False
) -> bool:
    """Whether the loop should write a checkpoint after `step`, `seconds` after the last one, which took `writing`
    seconds.

    first: there is none yet. With every_seconds=0 each step has one, however long that takes.
    """
    every = min(settings.every_seconds, FIRST_SECONDS) if first else settings.every_seconds
    if every:
        every = max(every, writing / MOST_WRITING)
    return seconds >= every or (settings.keep_every > 0 and step % settings.keep_every == 0)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that an interrupted removal leaves no valid checkpoint."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)

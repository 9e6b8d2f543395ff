"""`rlhf clean run=x`: lists the files of a run that nothing reads any more, with their sizes, and deletes them with
`yes=true`.

Kept are the files that a stage's record lists, what an unfinished stage resumes from, and the report's curves and
samples.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.runs.checkpoints import checkpoints, is_whole, remove_checkpoint
from rlhf.runs.folders import check_output, existing_run, read_stage, stages_of
from rlhf.runs.run_files import memory
from rlhf.runs.stage import has_begun
from rlhf.system.files import beside, locked, set_aside
from rlhf.system.terminal import say


def run(config: Config) -> None:
    """List what can go, and delete it with clean.yes. Raises: UserError if there is no such run, or if it is in use."""
    folder = existing_run(config)
    stages = stages_of(folder)
    with contextlib.ExitStack() as locks:
        for stage in stages.values():
            locks.enter_context(locked(stage, "working on it: wait for it, or end it"))
        found = list(removable(folder, stages))
        freed = sum(size_of(path) for path, _ in found)
        for path, why in found:
            say(f"{memory(size_of(path) / 1e6):>9}  {path}: {why}")
            if config.clean.yes and path.is_file():
                path.unlink(missing_ok=True)
            elif config.clean.yes:
                remove_checkpoint(path)  # a manifest goes first
                with contextlib.suppress(OSError):  # unless others are left
                    path.parent.rmdir()
    kept = size_of(folder) - (0 if config.clean.yes else freed)
    can_go = "is deleted" if config.clean.yes else "can go" + (": add yes=true to delete it" if found else "")
    say(f"{memory(freed / 1e6):>9}  {can_go}")
    say(f"{memory(kept / 1e6):>9}  stays: the stages' models, which later stages and export read, curves and reports")


def removable(folder: Path, stages: dict[str, Path]) -> Iterator[tuple[Path, str]]:
    """What can go of a run, and why. A damaged stage keeps everything, since a checkpoint may be all that is left of it."""
    for name, stage in stages.items():
        try:
            finished = (read_stage(stage) or {}).get("status") == "complete"
            if finished:
                check_output(stage, name)
        except UserError as error:
            say(f"keeps what {stage} has, as it is damaged: {error}")
            continue
        for path in checkpoints(stage / "checkpoints"):
            if finished:
                yield path, f"kept by checkpoints.keep_best or keep_every; {name} is complete: nothing resumes from it"
            elif not is_whole(path):
                yield path, "incomplete or damaged, so nothing resumes from it"
        unfinished = [] if has_begun(beside(stage), name) else [beside(stage)]
        left = [*stage.glob(".*.tmp"), *stage.glob("*.jsonl.kept"), set_aside(stage), *unfinished]
        for path in filter(Path.exists, left):
            yield path, "a killed process left it behind"
    cache, verdicts = folder / "evaluations" / "judge-cache.jsonl", folder / "evaluations" / "judge.json"
    if cache.is_file() and verdicts.is_file():
        yield cache, "the judge's replies, which are counted; the same comparison would ask it again"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; what a link points to does not count."""
    return sum(one.lstat().st_size for one in (path, *path.rglob("*")) if not one.is_dir())

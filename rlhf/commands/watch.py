"""`rlhf watch run=x`: follows a run from another terminal until it ends. It only reads the run's files."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.report.watching import Watch, line, screen
from rlhf.runs.folders import run_folder
from rlhf.system.terminal import say, write

# Seconds between two plain lines of a stage, and seconds without a lock after which a run counts as ended: a pipeline
# takes some seconds from one stage to the next.
PLAIN_INTERVAL, PATIENCE = 10.0, 30.0


def run(config: Config) -> None:
    """Show the state of the run until it ends. Raises: UserError if there is no such run, or if it stopped."""
    folder = run_folder(config)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run: check run=… and runs_dir=…")
    every = max(0.05, config.watch.every_seconds)
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    try:
        (follow_live if live else follow_plain)(folder, every, config.watch.wait, sys.stdout)
    except KeyboardInterrupt:
        say()


def look_until_the_end(watch: Watch, every: float, wait: bool, patience: float) -> Iterator[None]:
    """Poll the run until it ends, or until no process has worked on it for `patience` seconds."""
    silent_since = time.monotonic()
    while True:
        changed = watch.look()
        now = time.monotonic()
        silent_since = now if changed or watch.running else silent_since
        yield
        if not wait or watch.ended or now - silent_since >= patience:
            return
        time.sleep(every)


def follow_plain(folder: Path, every: float, wait: bool, out: TextIO, patience: float = PATIENCE) -> None:
    """A line when a stage begins or ends and every PLAIN_INTERVAL seconds."""
    watch = Watch(folder)
    printed: dict[str, tuple[str, str]] = {}
    printed_at = 0.0
    for _ in look_until_the_end(watch, every, wait, patience):
        now = time.monotonic()
        for stage in watch.begun:
            text, before = line(stage), printed.get(stage.title, ("", ""))
            if stage.status != before[0] or (text != before[1] and now - printed_at >= PLAIN_INTERVAL):
                say(text, out)
                printed[stage.title] = (stage.status, text)
                printed_at = now
    conclude(watch, wait)


def follow_live(folder: Path, every: float, wait: bool, out: TextIO, patience: float = PATIENCE) -> None:
    """Redraw a small screen in place."""
    watch = Watch(folder)
    height = 0
    write("\x1b[?25l", out)  # no cursor
    try:
        for _ in look_until_the_end(watch, every, wait, patience):
            lines = screen(watch, max(20, shutil.get_terminal_size().columns))
            shown = "".join(f"\x1b[2K{text}\n" for text in lines)
            write((f"\x1b[{height}A" if height else "") + shown + "\x1b[0J", out)
            height = len(lines)
    finally:
        write("\x1b[?25h", out)
    conclude(watch, wait)


def conclude(watch: Watch, wait: bool) -> None:
    """Raises: UserError if the run is incomplete and no process works on it."""
    stopped = [stage for stage in watch.begun if stage.status == "stopped"]
    if wait and stopped:
        stage = stopped[-1]
        at = f" at step {stage.step:,}" if stage.step else ""
        raise UserError(
            f"{stage.folder}: {stage.title} stopped{at} and no process works on it: run the same command again, "
            "it resumes"
        )

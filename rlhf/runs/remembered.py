"""The settings that a run was given: runs/<run>/settings.json, as {key: text of the value}, so that a later command
needs only changes.

The command line and `rlhf.Run` state in GIVEN what they were given; a stage stores it once its data and models are
loaded.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.config.commands import CONFIG_GROUPS, OF_SEVERAL, uses
from rlhf.config.compose import in_quotes
from rlhf.config.setting import NOTHING, settings_in, shown
from rlhf.errors import UserError
from rlhf.recipe import STAGES
from rlhf.system.files import write_json
from rlhf.system.terminal import one_line

FILE = "settings.json"
GIVEN: ContextVar[tuple[str, ...]] = ContextVar("given", default=())  # overrides of this command
OF_ONE_COMMAND = ("run", "runs_dir", "overwrite", "stages")


def by_key(overrides: Iterable[str]) -> dict[str, str]:
    """Overrides `key=value` as {key: text of the value}; the last one of a key counts."""
    pairs = (text.lstrip("+").partition("=") for text in overrides if "=" in text and not text.startswith("~"))
    return {key: value for key, _, value in pairs}


def is_kept(key: str) -> bool:
    """Whether a run remembers the setting: if a stage, or the pipeline as a whole, reads it, and not to evaluate something once."""
    stated = settings_in(Config).get(key)
    if stated is None:
        return key in (*CONFIG_GROUPS, "hydra.searchpath")
    once = key.startswith("evaluate.") and stated.changes == NOTHING
    return key not in OF_ONE_COMMAND and not once and any(uses(name, key) for name in (*STAGES, "pipeline"))


def recall(run: Path) -> dict[str, str]:
    """The settings that the run remembers; those that do not exist any more are left out. Raises: UserError for a damaged file."""
    from rlhf.system.schemas import Schema, read_checked

    given = read_checked(run / FILE, Schema, "correct it, or remove it and give the settings again") or {}
    return {key: str(text) for key, text in given.items() if is_kept(key)}


def trusted(run: Path, settings: Mapping[str, str], command: str = "pipeline") -> dict[str, str]:
    """The remembered settings that may be used. One that can run code or reach other machines counts only if this user
    has given it on this machine, since the run may come from elsewhere. Raises: UserError if the command uses another
    one.
    """
    kept = {key: text for key, text in settings.items() if _is_plain(key, text) or _mark(key, text).exists()}
    for key in settings.keys() - kept.keys():
        if command in OF_SEVERAL or key == "hydra.searchpath" or uses(command, key):
            why = "can run code or reach other machines, and you have not given it here"
            what = "if you trust it, add it to the command, else remove it from the file"
            raise UserError(f"{run / FILE}: {key}={one_line(settings[key], 200)} {why}: {what}")
    return kept


def _is_plain(key: str, text: str) -> bool:
    """Whether a value names neither a function, an address, a variable of the environment nor YAML outside of conf/."""
    if key in CONFIG_GROUPS:
        return re.fullmatch(r"[\w.-]+", text) is not None
    return key != "hydra.searchpath" and ":" not in text and "${" not in text


def _mark(key: str, text: str) -> Path:
    """The file that says that this user has given a setting."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "rlhf" / "given" / sha256(f"{key}={text}".encode()).hexdigest()


def remember(run: Path) -> None:
    before = recall(run)
    given = by_key(text for text in GIVEN.get() if not text.startswith("++"))  # `++key=value` is for one command
    # a group that is given replaces its members
    now = {key: text for key, text in before.items() if key.partition(".")[0] not in given}
    now |= {key: text for key, text in given.items() if is_kept(key)}
    for mark in (_mark(key, text) for key, text in now.items() if key in given and not _is_plain(key, text)):
        with contextlib.suppress(OSError):  # then it must be given each time
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    if now != before:
        write_json(run / FILE, now)


def text_of(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {text_of(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text_of, value)) + "]"
    if isinstance(value, str):
        return in_quotes(value, interpolate=True)
    return shown(value)

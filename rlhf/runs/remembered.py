"""The settings that a run was given: runs/<run>/settings.json, as {key: text of the value}, so that a later command needs only changes.

The command line and `rlhf.Run` state in GIVEN what they were given; a stage stores it once its data and models are loaded.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.config.commands import CONFIG_GROUPS, uses
from rlhf.config.setting import NOTHING, settings_in
from rlhf.recipe import STAGES
from rlhf.system.files import read_json, write_json

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
    """The settings that the run remembers; those that do not exist any more are left out."""
    return {key: str(text) for key, text in read_json(run / FILE).items() if is_kept(key)}


def remember(run: Path) -> None:
    before = recall(run)
    given = by_key(text for text in GIVEN.get() if not text.startswith("++"))  # `++key=value` is for one command
    now = before | {key: text for key, text in given.items() if is_kept(key)}
    if now != before:
        write_json(run / FILE, now)


def text_of(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {text_of(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text_of, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

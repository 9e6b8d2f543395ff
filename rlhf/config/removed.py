"""Commands and settings of earlier versions, with what to use instead: the one table behind the error messages."""

# Of a command or setting that is gone: what to use instead. A row of a whole group of settings has the group's name.
COMMANDS: dict[str, str] = {
    "study": "use `python scripts/studies/<kind>.py`, such as frontier.py, which has options of its own"
}
SETTINGS: dict[str, str] = {
    "processes": "`rlhf import` reads with one process: leave it out",
    "rollout.temperature": "PPO samples at temperature 1; `rlhf chat` has chat.temperature",
    "study": "use the options of `python scripts/studies/<kind>.py`, which --help lists",
}


def replacement(key: str) -> str | None:
    """What to use instead of a removed setting, or of one whose group was removed."""
    return SETTINGS.get(key) or SETTINGS.get(key.partition(".")[0])

"""Commands and settings of earlier versions, with what to use instead: the one table behind the error messages."""

COMMANDS: dict[str, str] = {}  # {"name": "use this instead"}
SETTINGS: dict[str, str] = {}  # {"group.name": "use this instead"}

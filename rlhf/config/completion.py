"""Completion of commands, settings and values in bash: `eval "$(rlhf -sc install=bash)"`, with Hydra's own flag.

At each Tab the shell calls `rlhf -sc query=bash`, which reads the line from COMP_LINE. Imports neither torch nor hydra.
"""

import os

from rlhf.config.command_table import COMMANDS, CONFIG_GROUPS, OF_SEVERAL, WITHOUT_GROUPS, uses
from rlhf.config.compose import conf_dir, schema_keys, schema_of
from rlhf.config.setting import settings_in
from rlhf.errors import UserError

FLAGS = ("-sc", "--shell-completion")
SCRIPT = """_rlhf_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" rlhf -sc query=bash 2>/dev/null))
}
complete -o nospace -o default -F _rlhf_complete rlhf"""
REPLIES = {"install=bash": SCRIPT, "uninstall=bash": "complete -r rlhf; unset -f _rlhf_complete"}


def reply(arguments: list[str]) -> str | None:
    """What to print for `-sc <word>`; None without that flag. Raises: UserError for an unknown word."""
    flag = next((i for i, word in enumerate(arguments) if word.partition("=")[0] in FLAGS), None)
    if flag is None:
        return None
    _, equals, word = arguments[flag].partition("=")
    word = word if equals else " ".join(arguments[flag + 1 : flag + 2])
    if word == "query=bash":
        line = os.environ.get("COMP_LINE", "")
        return "\n".join(candidates(line[: int(os.environ.get("COMP_POINT", len(line)))]))
    if word not in REPLIES:
        raise UserError(f"{arguments[flag]} {word}: want {' or '.join(REPLIES)}: other shells have no completion")
    return REPLIES[word]


def candidates(line: str) -> list[str]:
    """Completions of the last word of a line; for `key=value` only of the value, since bash splits words at "="."""
    words = line.split()
    current = words.pop() if words and not line.endswith(" ") else ""
    if len(words) < 2:
        return [f"{name} " for name in COMMANDS if name.startswith(current)] if words else []
    command = words[1]
    if command not in COMMANDS:
        return []
    stated = settings_in(schema_of(command))
    settings = {key: one for key, one in stated.items() if command in OF_SEVERAL or uses(command, key)}
    groups = () if command in WITHOUT_GROUPS else CONFIG_GROUPS
    key, equals, value = current.partition("=")
    if equals:
        if key in groups:
            choices = sorted(path.stem for path in (conf_dir() / key).glob("*.yaml"))
        else:
            is_switch = isinstance(schema_keys(command).get(key), bool)
            choices = ["true", "false"] if is_switch else list(settings[key].choices or ()) if key in settings else []
        return [choice for choice in choices if choice.startswith(value)]
    completions: dict[str, None] = {}
    for name in (*groups, *settings):
        if name.startswith(current):  # one level of a dotted key at a time
            head, dot, _ = name[len(current) :].partition(".")
            completions[current + head + (dot or "=")] = None
    return list(completions)

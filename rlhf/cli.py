"""`rlhf <command> [overrides]`: finds the command, checks the overrides, and hands over to Hydra.

A command's module, and with it torch, is imported only when the command runs, so that help and mistakes are fast.
"""

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from rlhf.config import completion, removed
from rlhf.config.command_table import COMMANDS, CONFIG_GROUPS, HELP_GROUPS, SHARED_FLAG, WITHOUT_GROUPS
from rlhf.config.compose import (
    conf_dir,
    config_name,
    first_line,
    nearest,
    register_schema,
    schema_keys,
    schema_of,
    to_settings,
)
from rlhf.config.overrides import check_jobs, check_overrides, check_used, read_flags, split_flags, split_texts
from rlhf.config.setting import listed
from rlhf.errors import UserError
from rlhf.recipe import STAGES
from rlhf.system.exits import MISTAKE, ending, interrupt_on_signals, leave, report
from rlhf.system.plugins import load_named
from rlhf.system.processes import disconnect, launch_problem
from rlhf.system.terminal import accept_any_text, say, write


def main(argv: list[str] | None = None) -> None:
    """The console script. Exit codes: `rlhf.system.exits`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = [a for a in arguments if not a.startswith("--local_rank=")]  # which DeepSpeed's launcher adds
    accept_any_text()
    interrupt_on_signals()
    if (problem := launch_problem()) is not None:
        report(problem)
        sys.exit(MISTAKE)
    with ending(interrupted=interrupted(arguments[0] if arguments else "")):
        _dispatch(arguments)
        write("")  # flush here, so that a full disk is reported now and not at the interpreter's end
        if argv is None and disconnect():
            leave(0)


def interrupted(command: str) -> str:
    """The message of an interrupted command: how to resume, if it can."""
    if command == "pipeline" or command in STAGES:
        return "interrupted: run the same command again, it resumes from the last checkpoint"
    if command == "generate":
        return "interrupted: run the same command again, it continues where it stopped"
    return "interrupted"


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        write(_help() + "\n")
        return
    if arguments[0] in ("-V", "--version"):
        from rlhf import __version__

        say(f"rlhf {__version__}")
        return
    if (completions := completion.reply(arguments)) is not None:
        write(completions + "\n")
        return
    command, overrides = arguments[0], arguments[1:]
    if command in ("report", "serve"):
        overrides = module_of(command).rewrite_arguments(overrides)
    if command in removed.COMMANDS:
        raise UserError(f"`rlhf {command}` is gone: {removed.COMMANDS[command]}")
    if command not in COMMANDS:
        raise UserError(f"unknown command {command!r}{nearest(command, list(COMMANDS))}: `rlhf --help` lists them")
    if any(flag in overrides for flag in ("-h", "--help")):
        write(_command_help(command) + "\n")
        return
    overrides, texts = split_texts(command, overrides)
    shared = SHARED_FLAG in overrides
    overrides = [o for o in overrides if o != SHARED_FLAG]
    # `+` adds a group to Hydra's list of defaults, which already contains ours
    overrides = [o[1:] if o.startswith("+") and o[1:].partition("=")[0] in CONFIG_GROUPS else o for o in overrides]
    flags, plain = split_flags(overrides)
    check_overrides(plain, command, read_flags(flags, command)[1])
    if not shared and not {"-c", "--cfg", "-i", "--info"}.intersection(flags):
        check_used(plain, command)
    _run_with_hydra(command, flags, plain, texts)


def _run_with_hydra(command: str, flags: list[str], plain: list[str], texts: dict[str, str]) -> None:
    """Check the configuration (of a sweep: every job's), then run the command with it. texts: the settings of TEXTS.

    Hydra itself runs commands with Hydra's own flags or settings. The pipeline gets its overrides too, for its stages.
    """
    sweep = any(flag in ("-m", "--multirun") for flag in flags)
    name, folder = read_flags(flags, command)
    ours = [o for o in plain if not o.startswith("hydra") or o.startswith("hydra.searchpath=")]
    searched = [f"hydra.searchpath=['file://{folder}']"] if folder is not None else []
    checked = []
    if name == config_name(command):  # the user's own primary configuration is checked after Hydra has found it
        checked = check_jobs(ours, sweep, searched, command)

    def start(config: Any, overrides: list[str]) -> None:
        for name_of_text, text in texts.items():
            setattr(getattr(config, command), name_of_text, text)
        for plugin in listed(getattr(config, "plugins", None)):
            load_named("plugins", plugin, 0)()
        places = [] if folder is None else ["--config-dir", folder]
        places += ["--config-name", name] if name != config_name(command) else []
        module_of(command).run(config, *([[*places, *overrides]] if command == "pipeline" else []))

    if not flags and ours == plain:
        return start(checked[0], plain)

    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    from rlhf.config.checks import check_config

    def guarded(composed: Any) -> None:
        # Hydra would print a traceback of its own
        with full_errors(users_value), ending(interrupted=interrupted(command)):
            config = to_settings(composed)
            if name != config_name(command):
                check_config(config, command)
            start(config, list(HydraConfig.get().overrides.task))

    register_schema(config_name(command))
    users_value = os.environ.get("HYDRA_FULL_ERROR")  # if the user set it, tracebacks are wanted
    # our code reports Hydra's errors; the folder is for Hydra's own record of a sweep, a run's record is in the run's folder
    with full_errors("1"), tempfile.TemporaryDirectory() as nowhere:
        sys.argv = [f"rlhf {command}", *flags, *plain, *([f"hydra.sweep.dir={nowhere}"] if sweep else [])]
        try:
            hydra.main(version_base="1.3", config_path=str(conf_dir().resolve()), config_name=name)(guarded)()
        except HydraException as error:
            raise UserError(first_line(error)) from None


@contextlib.contextmanager
def full_errors(value: str | None) -> Iterator[None]:
    """Set HYDRA_FULL_ERROR within the block (None: unset it), then restore it."""
    before = os.environ.pop("HYDRA_FULL_ERROR", None)
    if value is not None:
        os.environ["HYDRA_FULL_ERROR"] = value
    try:
        yield
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def module_of(command: str) -> ModuleType:
    """The module whose `run` is the command."""
    return importlib.import_module(COMMANDS[command][0])


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    return f"""rlhf <command> [key=value …]

RLHF by the InstructGPT recipe, from raw text to an aligned chat model.

commands:
{commands}

examples:
  rlhf pipeline experiment=gold run=demo     the whole recipe on a small world, minutes on a laptop
  rlhf pipeline experiment=align run=mine model.pretrained=x.gguf data.demonstrations=demos.json data.comparisons=labels.jsonl
  rlhf ppo experiment=gold run=demo kl.coef=0.05 overwrite=true
  rlhf chat run=demo

`rlhf <command> --help` shows a command's settings, `--cfg job` the composed configuration, `-m` sweeps."""


def _command_help(command: str) -> str:
    """Usage, and each setting with its default and its meaning."""
    from rlhf.config.setting import settings_in

    schema = schema_of(command)
    defaults, shown = schema_keys(command), ("", *HELP_GROUPS[command])
    lines = [f"rlhf {command} [key=value …]", "", COMMANDS[command][1], ""]
    for group in shown:
        for key, stated in settings_in(schema).items():
            if key.rpartition(".")[0] == group:
                lines.append(f"  {key + '=' + _show(defaults[key]):<40} {stated.described()}")
    if command == "import":
        lines += _import_help()
    if command in WITHOUT_GROUPS:
        return "\n".join(lines)
    choices = {g: sorted(p.stem for p in (conf_dir() / g).glob("*.yaml")) for g in CONFIG_GROUPS}
    lines += [f"  {g + '=' + ' | '.join(names):<40}" for g, names in choices.items()]
    lines += ["", "Values shown are the schema's defaults (the papers'); experiment=… replaces some of them."]
    return "\n".join(lines)


def _import_help() -> list[str]:
    """Examples, and the keys that each format needs in a row."""
    from rlhf.data.formats import FORMATS

    wants = sorted((f.name, f.wants) for f in FORMATS.values())
    return [
        "",
        "formats (auto recognises all but table):",
        *(f"  {name:<20} {text}" for name, text in wants),
        "",
        "examples:",
        "  rlhf import path=labels.jsonl out=data/labels",
        "  rlhf import path=labels.csv out=data/labels format=table columns.prompt=question columns.responses=[a,b] \\",
        "    columns.winner=label",
        "  rlhf sft data.demonstrations=data/labels",
        "",
        "Files: .jsonl .json .csv .tsv (these also .gz or .zst) .xlsx .xls .ods .parquet .arrow, a folder of them, or a hub id.",
        "Exit code 0; 2 for a mistake, or with more rejects than max_rejects: what was accepted is then in <out>.partial.",
    ]


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

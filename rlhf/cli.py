"""`rlhf <command> [overrides]`: finds the command, checks the overrides, and hands over to Hydra.

A command's module, and with it torch, is imported only when the command runs, so that help and mistakes are fast.
"""

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.commands import completion
from rlhf.commands.table import (
    COMMANDS,
    CONFIG_GROUPS,
    FORWARDING,
    HELP_GROUPS,
    OF_SEVERAL,
    SHARED_FLAG,
    WITHOUT_GROUPS,
    uses,
)
from rlhf.config import removed
from rlhf.config.adopting import (
    check_adopting,
    refuse_as_group,
    refuse_as_shape,
    refuse_in_later_stage,
    refuse_other_name,
)
from rlhf.config.compose import (
    SCHEMAS,
    compose_config,
    conf_dir,
    config_name,
    first_line,
    jobs_of,
    nearest,
    register_schema,
    schema_keys,
    schema_of,
    split_texts,
    to_settings,
    unknown_setting,
)
from rlhf.config.setting import listed
from rlhf.errors import UserError
from rlhf.recipe import BASELINES, PIPELINE, STAGES, ancestors
from rlhf.system.exits import check_launch, ending
from rlhf.system.interrupts import interrupt_on_signals, leave
from rlhf.system.plugins import load_named
from rlhf.system.processes import disconnect
from rlhf.system.terminal import accept_any_text, say, write

# Hydra's flags that are followed by a value.
FLAGS_WITH_VALUE = (
    "-c",
    "--cfg",
    "-p",
    "--package",
    "-i",
    "--info",
    "-cp",
    "--config-path",
    "-cn",
    "--config-name",
    "-cd",
    "--config-dir",
)
FLAGS_ALONE = ("-m", "--multirun", "-r", "--run", "--resolve", "--hydra-help")


def main(argv: list[str] | None = None) -> None:
    """The console script. Exit codes: `rlhf.system.exits`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = [a for a in arguments if not a.startswith("--local_rank=")]  # which DeepSpeed's launcher adds
    accept_any_text()
    interrupt_on_signals()
    check_launch()
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


def split_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into Hydra's flags (with their values) and the overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before in FLAGS_WITH_VALUE and "=" not in argument
        (flags if argument.startswith("-") or is_value else overrides).append(argument)
    return flags, overrides


def check_overrides(overrides: list[str], command: str = "", folder: str | None = None) -> None:
    """Refuse an override whose key the schema lacks, with or without `+`, naming the nearest real one.

    Raises: UserError.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    keys = schema_keys(command)
    groups = () if command in WITHOUT_GROUPS else CONFIG_GROUPS
    parser = OverridesParser.create()
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"{text!r}: want key=value: write for example `seed=1`{nearest(text, list(keys))}")
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(
                f"{text!r}: not an override ({first_line(error)}): write key=value, quote odd values"
            ) from None
        key = override.key_or_group
        if key.startswith("hydra") or (key in groups and not text.startswith("~")):
            if not any(o.startswith("hydra.searchpath=") for o in overrides):  # Hydra reads this folder
                _check_choice(key, override.value(), folder)
            continue
        if key not in keys:
            refuse_other_name(key, override.value())
            known = [k for k, v in keys.items() if not is_dataclass(v)] + list(groups)
            raise UserError(unknown_setting(key, known))
        if is_dataclass(keys[key]) and isinstance(override.value(), str | int | float):
            refuse_as_group(key, override.value())
    check_adopting(overrides)


def check_used(overrides: list[str], command: str) -> None:
    """Refuse a setting that the command does not read; a pipeline lists those that none of its stages reads.

    Raises: UserError.
    """
    keys = [text.lstrip("+~").partition("=")[0] for text in overrides]
    known = [key for key, value in schema_keys(command).items() if not is_dataclass(value)]
    given = [key for key in keys if key in known]
    if command == "pipeline":
        for key in given:  # the pipeline can run the baselines and the stages that evaluate builds on
            if not any(uses(name, key) for name in (*PIPELINE, *BASELINES, *ancestors("evaluate"), command)):
                say(f"pipeline: {key}: no stage of the pipeline uses it")
    if command in OF_SEVERAL:
        return
    unused = [key for key in given if not uses(command, key)]
    if unused:
        refuse_in_later_stage(command, unused[0])
        others = [name for name in COMMANDS if name not in ("pipeline", *SCHEMAS) and uses(name, unused[0])]
        others = others or ["pipeline"]
        more = f" ({', '.join(unused[1:])}: neither)" if unused[1:] else ""
        raise UserError(
            f"{unused[0]}: `rlhf {command}` does not use it; {', '.join(others)} {'do' if others[1:] else 'does'}{more}: "
            f"leave it out, or add {SHARED_FLAG} if the settings are meant for several commands"
        )


def _check_choice(group: str, value: Any, folder: str | None) -> None:
    if group not in CONFIG_GROUPS or not isinstance(value, str):
        return
    places = [conf_dir(), *([] if folder is None else [Path(folder)])]
    choices = sorted(p.stem for place in places for p in (place / group).glob("*.yaml"))
    if group == "model" and value not in choices:
        refuse_as_shape(value)
    if value not in choices:
        raise UserError(f"{group}={value}: want one of {', '.join(choices)}{nearest(value, choices)}")


def _run_with_hydra(command: str, flags: list[str], plain: list[str], texts: dict[str, str]) -> None:
    """Check the configuration (of a sweep: every job's), then run the command with it. texts: the settings of TEXTS.

    Hydra itself runs commands with Hydra's own flags or settings, and those that ask it for their overrides.
    """
    sweep = any(flag in ("-m", "--multirun") for flag in flags)
    name, folder = read_flags(flags, command)
    ours = [o for o in plain if not o.startswith("hydra") or o.startswith("hydra.searchpath=")]
    searched = [f"hydra.searchpath=['file://{folder}']"] if folder is not None else []
    checked = []
    if name == config_name(command):  # the user's own primary configuration is checked after Hydra has found it
        checked = check_jobs([[*job, *searched] for job in jobs_of(ours, sweep)], command)

    def start(config: Any) -> None:
        for name_of_text, text in texts.items():
            setattr(getattr(config, command), name_of_text, text)
        for plugin in listed(getattr(config, "plugins", None)):
            load_named("plugins", plugin, 0)()
        module_of(command).run(config)

    if not flags and ours == plain and command not in FORWARDING:
        return start(checked[0])

    import hydra
    from hydra.errors import HydraException

    from rlhf.config.checks import check_config

    def guarded(composed: Any) -> None:
        # Hydra would print a traceback of its own
        with full_errors(users_value), ending(interrupted=interrupted(command)):
            config = to_settings(composed)
            if name != config_name(command):
                check_config(config, command)
            start(config)

    register_schema(config_name(command))
    users_value = os.environ.get("HYDRA_FULL_ERROR")  # if the user set it, tracebacks are wanted
    # our code reports Hydra's errors; the folder is for Hydra's own record of a sweep, a run's record is in the run's folder
    with full_errors("1"), tempfile.TemporaryDirectory() as nowhere:
        sys.argv = [f"rlhf {command}", *flags, *plain, *([f"hydra.sweep.dir={nowhere}"] if sweep else [])]
        try:
            hydra.main(version_base="1.3", config_path=str(conf_dir().resolve()), config_name=name)(guarded)()
        except HydraException as error:
            raise UserError(first_line(error)) from None


def module_of(command: str) -> ModuleType:
    """The module whose `run` is the command."""
    return importlib.import_module(COMMANDS[command][0])


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


def read_flags(flags: list[str], command: str) -> tuple[str, str | None]:
    """The primary configuration's name and the user's folder of YAML files. Raises: UserError for an unknown flag."""
    name, folder = config_name(command), None
    for i, flag in enumerate(flags):
        key, equals, value = flag.partition("=")
        value = value if equals else (flags[i + 1] if i + 1 < len(flags) else "")
        if flag.startswith("-") and key not in FLAGS_WITH_VALUE + FLAGS_ALONE:
            raise UserError(
                f"unknown option {key!r}{nearest(key, list(FLAGS_WITH_VALUE + FLAGS_ALONE))}: write settings as key=value"
            )
        if key in ("-cp", "--config-path"):
            raise UserError(
                f"{key}: would hide the schema: use --config-dir {value} for a folder of your own YAML files"
            )
        if key in ("-cd", "--config-dir"):
            if not Path(value).is_dir():
                raise UserError(
                    f"{key} {value}: no such folder: want one with YAML files, such as experiment/mine.yaml"
                )
            folder = str(Path(value).resolve())
        if key in ("-cn", "--config-name"):
            name = value.removesuffix(".yaml")
    return name, folder


def check_jobs(jobs: list[list[str]], command: str) -> list[Any]:
    """Check each job's configuration, and that no two jobs would write one run; returns them. Raises: UserError."""
    from rlhf.config.checks import check_config

    runs: dict[str, list[str]] = {}
    configs = []
    for job in jobs:
        config = compose_config(job, command)
        check_config(config, command)
        configs.append(config)
        if command != "import" and (command in STAGES or command == "pipeline"):
            if config.run in runs:
                other = sorted(set(job) ^ set(runs[config.run]))
                key = next((o.partition("=")[0] for o in other if not o.startswith("run=")), "seed")
                raise UserError(
                    f"--multirun: several jobs would write run={config.run}: give each a run of its own, such as "
                    f"'run={config.run}-${{{key}}}'"
                )
            runs[config.run] = job
    return configs


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
    from rlhf.data.importers import formats

    wants = sorted((f.name, f.wants) for f in formats().values())
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

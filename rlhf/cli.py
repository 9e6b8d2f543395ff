"""`rlhf <command> [overrides]`: finds the command, checks the overrides, has Hydra compose its configuration, and runs it.

A command's module, and with it torch, is imported only when the command runs, so that help and mistakes are fast.
"""

import importlib
import re
import sys
from dataclasses import asdict
from multiprocessing import parent_process
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.config import Config, removed
from rlhf.config.command_line import Words, check_jobs, check_overrides, check_used, read_words
from rlhf.config.commands import COMMANDS, CONFIG_GROUPS, SHARED_FLAG, WITHOUT_GROUPS
from rlhf.config.compose import SCHEMAS, choices_of, compose_config, nearest, schema_of
from rlhf.config.setting import get, listed, settings_in, stored
from rlhf.errors import UserError
from rlhf.recipe import POLICY_STAGES, STAGES
from rlhf.runs.folders import NAME, lend_parents, run_folder
from rlhf.runs.remembered import GIVEN, by_key, recall, trusted
from rlhf.system.exits import MISTAKE, ending, interrupt_on_signals, leave, report
from rlhf.system.plugins import call_plugins
from rlhf.system.processes import disconnect, launch_problem, process_count
from rlhf.system.terminal import accept_any_text, say, write


def main(argv: list[str] | None = None) -> None:
    """The console script. Exit codes: `rlhf.system.exits`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = [a for a in arguments if not a.startswith("--local_rank=")]  # which DeepSpeed's launcher adds
    accept_any_text()
    message = interrupted(arguments[0] if arguments else "")
    with ending(message):
        interrupt_on_signals(message)
        if (problem := launch_problem()) is not None:
            report(problem)
            sys.exit(MISTAKE)
        _dispatch(arguments)
        write("")  # flush here, so that a full disk is reported now and not at the interpreter's end
        if argv is None and disconnect():
            leave(0)


def interrupted(command: str) -> str:
    """The message of an interrupted command: how to resume, if it can."""
    if command == "pipeline" or command in STAGES:
        return "interrupted: run the same command again, it resumes from the last checkpoint"
    return "interrupted"


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        write(_help() + "\n")
        return
    if arguments[0] in ("-V", "--version"):
        from rlhf import __version__

        say(f"rlhf {__version__}")
        return
    command, words = arguments[0], arguments[1:]
    if command in removed.COMMANDS:
        raise UserError(f"`rlhf {command}` is gone: {removed.COMMANDS[command]}")
    if command not in COMMANDS:
        raise UserError(f"unknown command {command!r}{nearest(command, list(COMMANDS))}: `rlhf --help` lists them")
    asks = [word for word in words if word in ("-h", "--help")]
    given = read_words([word for word in words if word not in (*asks, SHARED_FLAG)], command)
    check_overrides(given.overrides, command)
    if asks:
        write(_command_help(command, with_remembered(command, given._replace(shows=True))) + "\n")
        return
    if SHARED_FLAG not in words and not given.shows:
        check_used(given.overrides, command)
    _run(command, with_remembered(command, given))


def with_remembered(command: str, given: Words) -> Words:
    """The words, preceded by the settings that their run remembers and that they do not change.

    Sweeps, a pipeline's processes and commands with a schema of their own state everything themselves.
    """
    if given.sweeps or command in SCHEMAS or parent_process() is not None:
        return given
    stated = by_key(given.overrides)
    place = [stated.get(key, "").strip("'\"") for key in ("run", "runs_dir")]
    if not all(re.fullmatch(r"[\w./-]+", name) for name in place):  # a preset or the environment may name them
        composed = compose_config(given.overrides, command) if given.overrides else Config()
        place = [composed.run, composed.runs_dir]
    run, runs_dir = place
    if not NAME.fullmatch(run):
        return given
    remembered = recall(Path(runs_dir) / run)
    source = stated.get("ppo.policy", "").strip("'\"")
    if (
        not remembered and source not in POLICY_STAGES and NAME.fullmatch(source)
    ):  # a new run that starts from another one's policy
        run, remembered = source, recall(Path(runs_dir) / source)
    kept_keys = [key for key in remembered if not {key, key.partition(".")[0]} & stated.keys()]
    remembered = trusted(Path(runs_dir) / run, {key: remembered[key] for key in kept_keys}, command)
    kept = [f"{key}={text}" for key, text in remembered.items()]
    if kept and not given.shows and (command in STAGES or command == "pipeline"):
        say(f"{command}: as run={run} was given: {' '.join(kept)}")
    overrides = [*kept, *given.overrides]
    check_overrides(overrides, command)
    return given._replace(overrides=overrides)


def _run(command: str, given: Words) -> None:
    """Check the configuration, of a sweep every job's, then run the command with each."""
    jobs = check_jobs(given.overrides, given.sweeps, command)
    for number, (config, overrides) in enumerate(jobs, 1):
        if given.shows:
            import yaml

            write(yaml.safe_dump(stored(asdict(config)), sort_keys=False, allow_unicode=True))
            continue
        if given.sweeps:
            swept = (text for text in overrides if text not in given.overrides)
            say(f"{command}: job {number} of {len(jobs)}: {' '.join(swept)}")
        given_here = GIVEN.set(tuple(overrides))
        try:
            _start(command, config, overrides)
        finally:
            GIVEN.reset(given_here)
    if not given.sweeps or given.shows or not (command in STAGES or command == "pipeline"):
        return
    if made := [folder for config, _ in jobs if (folder := run_folder(config)).is_dir()]:
        from rlhf.report.page import compare_runs

        write("\n".join(["", *compare_runs(made), ""]))


def _start(command: str, config: Any, words: list[str]) -> None:
    """Run the command. words: what its stages get, and it itself if it runs as several processes."""
    call_plugins(listed(getattr(config, "plugins", None)))
    if command in STAGES or command == "pipeline":
        lend_parents(config)
    if command in STAGES and config.launcher.processes > 1 and process_count() == 1:
        from rlhf.commands.pipeline import processes_of, run_stage

        if processes_of(config, command) > 1:
            return run_stage(config, command, words)
    module_of(command).run(config, *([words] if command == "pipeline" else []))


def module_of(command: str) -> ModuleType:
    """The module whose `run` is the command."""
    return importlib.import_module(COMMANDS[command][0])


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {text}" for name, (_, text, _) in COMMANDS.items())
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


def _command_help(command: str, given: Words) -> str:
    """Usage, and each setting with its meaning and the value that the words, and the run that they name, give it."""
    config = compose_config(given.overrides, command) if given.overrides else schema_of(command)()
    lines = [f"rlhf {command} [key=value …]", "", COMMANDS[command][1], ""]
    for group in ("", *COMMANDS[command][2]):
        for key, stated in settings_in(schema_of(command)).items():
            if key.rpartition(".")[0] == group:
                value = _show(get(config, key))
                usual = "" if value == _show(stated.default) else f" (default {_show(stated.default)})"
                choices = "" if stated.choices is None else f"{' | '.join(stated.choices)}: "
                lines.append(f"  {key + '=' + value:<40} {choices}{stated.help}{usual}")
    if command == "import":
        lines += _import_help()
    if command not in WITHOUT_GROUPS:
        lines += [f"  {group + '=' + ' | '.join(choices_of(group)):<40}" for group in CONFIG_GROUPS]
        lines += [
            "",
            "Defaults are the papers' values. With experiment=… or run=… this help shows the values that they give.",
        ]
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
        "Files: .jsonl .json .csv .tsv (these also .gz or .zst) .xlsx .parquet, a folder of them, or a hub id.",
        "Exit code 0; 2 for a mistake, or with more rejects than max_rejects: what was accepted is then in <out>.partial.",
    ]


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

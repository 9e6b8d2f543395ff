"""`rlhf <command> [overrides]`: finds the command, checks the overrides, has Hydra compose its configuration, and runs
it.

A command's module, and with it torch, is imported only when the command runs, so that help and mistakes are fast.
"""

import importlib
import sys
from dataclasses import asdict
from multiprocessing import parent_process
from pathlib import Path
from types import ModuleType

from rlhf.config import Config, compose, removed
from rlhf.config.commands import COMMANDS, CONFIG_GROUPS, SHARED_FLAG, WITHOUT_GROUPS
from rlhf.config.setting import get, listed, settings_in, shown, stored
from rlhf.errors import UserError
from rlhf.recipe import POLICY_STAGES, STAGES
from rlhf.runs.folders import NAME, lend_parents, run_folder
from rlhf.runs.remembered import GIVEN, by_key, recall, trusted
from rlhf.system.exits import MISTAKE, end, ending, interrupt_on_signals, report
from rlhf.system.plugins import call_plugins
from rlhf.system.processes import disconnect, launch_problem, process_count
from rlhf.system.terminal import accept_any_text, say, write

RUN_STAGES = ("pipeline", *STAGES)  # the commands that run stages


def main(argv: list[str] | None = None) -> None:
    """The console script. Exit codes: `rlhf.system.exits`."""
    words = sys.argv[1:] if argv is None else argv
    arguments = [word for word in words if not word.startswith("--local_rank=")]  # which DeepSpeed's launcher adds
    accept_any_text()
    resumes = bool(arguments) and arguments[0] in RUN_STAGES
    again = ": run the same command again, it resumes from the last checkpoint, or begins anew if there is none yet"
    message = "interrupted" + (again if resumes else "")
    with ending(message):
        interrupt_on_signals(message)
        if (problem := launch_problem()) is not None:
            report(problem)
            sys.exit(MISTAKE)
        _dispatch(arguments)
        write("")  # flush here, so that a full disk is reported now and not at the interpreter's end
        if argv is None and disconnect():
            end(0, at_once=True)


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
        meant = compose.nearest(command, list(COMMANDS))
        raise UserError(f"unknown command {command!r}{meant}: `rlhf --help` lists them")
    given = compose.read_words([word for word in words if word not in ("-h", "--help", SHARED_FLAG)], command)
    compose.check_overrides(given.overrides, command)
    if {"-h", "--help"} & {*words}:
        write(_command_help(command, with_remembered(command, given._replace(shows=True))) + "\n")
        return
    if SHARED_FLAG not in words and not given.shows:
        compose.check_used(given.overrides, command)
    _run(command, with_remembered(command, given))


def with_remembered(command: str, given: compose.Words) -> compose.Words:
    """The words, preceded by the settings that their run remembers and that they do not change."""
    if given.sweeps or command in compose.SCHEMAS or parent_process() is not None:  # they state everything themselves
        return given
    stated = by_key(given.overrides)
    config = compose.compose_config(given.overrides, command) if given.overrides else Config()
    run, source, runs_dir = config.run, config.ppo.policy, Path(config.runs_dir)
    if not NAME.fullmatch(run):
        return given
    remembered = recall(runs_dir / run)
    of_other_run = source not in POLICY_STAGES and NAME.fullmatch(source)
    if not remembered and of_other_run:  # a new run that starts from another one's policy
        run, remembered = source, recall(runs_dir / source)
    new = {key: text for key, text in remembered.items() if not {key, key.partition(".")[0]} & stated.keys()}
    kept = [f"{key}={text}" for key, text in trusted(runs_dir / run, new, command).items()]
    if kept and not given.shows and command in RUN_STAGES:
        say(f"{command}: as run={run} was given: {' '.join(kept)}")
    overrides = [*kept, *given.overrides]
    compose.check_overrides(overrides, command)
    return given._replace(overrides=overrides)


def _run(command: str, given: compose.Words) -> None:
    jobs = compose.check_jobs(given.overrides, given.sweeps, command)
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
            call_plugins(listed(getattr(config, "plugins", None)))
            if command in RUN_STAGES:
                lend_parents(config)
            if command in STAGES and process_count() == 1 < config.processes_of(command):
                from rlhf.commands.pipeline import run_stage

                run_stage(config, command, overrides)
            else:
                module_of(command).run(config, *([overrides] if command == "pipeline" else []))
        finally:
            GIVEN.reset(given_here)
    if given.sweeps and not given.shows and command in RUN_STAGES:
        from rlhf.report.page import compare_runs

        if made := [folder for config, _ in jobs if (folder := run_folder(config)).is_dir()]:
            write("\n".join(["", *compare_runs(made), ""]))


def module_of(command: str) -> ModuleType:
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


def _command_help(command: str, given: compose.Words) -> str:
    """Usage, and each setting with its meaning and the value that the words, and the run that they name, give it."""
    config = compose.compose_config(given.overrides, command) if given.overrides else compose.schema_of(command)()
    lines = [f"rlhf {command} [key=value …]", "", COMMANDS[command][1], ""]
    for group in ("", *COMMANDS[command][2]):
        for key, stated in settings_in(compose.schema_of(command)).items():
            if key.rpartition(".")[0] == group:
                value = shown(get(config, key))
                usual = "" if value == shown(stated.default) else f" (default {shown(stated.default)})"
                choices = "" if stated.choices is None else f"{' | '.join(stated.choices)}: "
                lines.append(f"  {key + '=' + value:<40} {choices}{stated.help}{usual}")
    if command == "import":
        from rlhf.data.reading import FORMATS

        lines += ["", "formats (auto recognises all but table):"]
        lines += sorted(f"  {one.name:<20} {one.wants}" for one in FORMATS.values())
    if command not in WITHOUT_GROUPS:
        lines += [f"  {group + '=' + ' | '.join(compose.choices_of(group)):<40}" for group in CONFIG_GROUPS]
        lines += ["", "Defaults are the papers' values; with experiment=… or run=… this help shows theirs."]
    return "\n".join(lines)

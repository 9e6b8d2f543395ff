"""The words of a command line: Hydra's flags, overrides, free text; and what is wrong with them, in one line each."""

import itertools
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from rlhf.config.checks import check_config
from rlhf.config.command_table import COMMANDS, CONFIG_GROUPS, OF_SEVERAL, SHARED_FLAG, WITHOUT_GROUPS, uses
from rlhf.config.compose import (
    SCHEMAS,
    compose_config,
    conf_dir,
    config_name,
    first_line,
    nearest,
    schema_keys,
    unknown_setting,
)
from rlhf.config.model import shape_settings
from rlhf.errors import UserError
from rlhf.recipe import BASELINES, PIPELINE, STAGES, ancestors
from rlhf.system.terminal import say

# Hydra's flags that are followed by a value, and those that are not.
FLAGS_WITH_VALUE = (
    "-c", "--cfg", "-p", "--package", "-i", "--info", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"
)  # fmt: skip
FLAGS_ALONE = ("-m", "--multirun", "-r", "--run", "--resolve", "--hydra-help")
TEXTS = {"chat": ("message", "system"), "next": ("text",)}  # settings of free text; the first may follow `--`
# The names of model.pretrained in other programs.
NAMES_ELSEWHERE = (
    "model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_path", "model_id", "base_model", "pretrained",
    "checkpoint", "hf_model", "name_or_path",
)  # fmt: skip


def split_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into Hydra's flags (with their values) and the overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before in FLAGS_WITH_VALUE and "=" not in argument
        (flags if argument.startswith("-") or is_value else overrides).append(argument)
    return flags, overrides


def check_overrides(overrides: list[str], command: str = "", folder: str | None = None) -> None:
    """Refuse an override whose key the schema lacks, with or without `+`, naming the nearest real one; and settings that have no
    meaning together with model.pretrained.

    Raises: UserError.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    keys = schema_keys(command)
    groups = () if command in WITHOUT_GROUPS else CONFIG_GROUPS
    searched = any(text.startswith("hydra.searchpath=") for text in overrides)  # Hydra reads this folder
    parser, given = OverridesParser.create(), {}
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"{text!r}: want key=value: write for example `seed=1`{nearest(text, list(keys))}")
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(
                f"{text!r}: not an override ({first_line(error)}): write key=value, quote odd values"
            ) from None
        key, value = override.key_or_group, override.value()
        given[key] = text.partition("=")[2]
        if key.startswith("hydra") or (key in groups and not text.startswith("~")):
            if key in groups and isinstance(value, str) and not searched:
                _check_choice(key, value, folder)
        elif key not in keys:
            last = key.removeprefix("model.")
            if last in ("revision", "model_revision"):
                raise UserError(
                    f"unknown setting {key!r}: a revision is named with its model: model.pretrained=<hub id>@{value}"
                )
            if last in NAMES_ELSEWHERE:
                raise UserError(
                    f"unknown setting {key!r}: a pretrained model is named with model.pretrained={value}, in `rlhf pipeline`, "
                    "or in `rlhf tokenizer` and `rlhf pretrain`"
                )
            raise UserError(unknown_setting(key, [k for k, v in keys.items() if not is_dataclass(v)] + list(groups)))
        elif is_dataclass(keys[key]) and isinstance(value, str | int | float):
            hint = "a pretrained tokenizer comes with its model, by model.pretrained=…" if key == "tokenizer" else ""
            raise UserError(f"{key}={value}: {key} is a group of settings: {hint or f'write {key}.<setting>=…'}")
    if given.get("model.pretrained", "null") != "null":
        if shapes := [key for key in given if key in (*shape_settings(), "model")]:
            raise UserError(
                f"{', '.join(shapes)}: a pretrained model has a shape and a tokenizer of its own: leave it out, or leave "
                "out model.pretrained"
            )
        tokens = given.get("pretrain.tokens", "null")
        if tokens != "null" and not {"data.corpus", "experiment"} & set(given):
            raise UserError(
                f"pretrain.tokens={tokens}: pretraining goes on with text only: set data.corpus too, or leave "
                "pretrain.tokens out to adopt the model as it is"
            )


def _check_choice(group: str, value: str, folder: str | None) -> None:
    places = [conf_dir(), *([] if folder is None else [Path(folder)])]
    choices = sorted(p.stem for place in places for p in (place / group).glob("*.yaml"))
    if value in choices:
        return
    if group == "model" and ("/" in value or value.endswith(".gguf") or Path(value).exists()):
        raise UserError(
            f"model={value}: model=… names a shape to pretrain, such as gpt2: a pretrained model is named with "
            f"model.pretrained={value}"
        )
    raise UserError(f"{group}={value}: want one of {', '.join(choices)}{nearest(value, choices)}")


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
    unused = [] if command in OF_SEVERAL else [key for key in given if not uses(command, key)]
    if unused[:1] == ["model.pretrained"]:
        raise UserError(
            f"model.pretrained: `rlhf {command}` does not use it; it starts from the output of earlier stages: leave it out, or "
            "add it to `rlhf tokenizer` and `rlhf pretrain`, which run first, or to `rlhf pipeline`"
        )
    if unused:
        others = [name for name in COMMANDS if name not in ("pipeline", *SCHEMAS) and uses(name, unused[0])]
        others = others or ["pipeline"]
        more = f" ({', '.join(unused[1:])}: neither)" if unused[1:] else ""
        raise UserError(
            f"{unused[0]}: `rlhf {command}` does not use it; {', '.join(others)} {'do' if others[1:] else 'does'}{more}: "
            f"leave it out, or add {SHARED_FLAG} if the settings are meant for several commands"
        )


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


def check_jobs(overrides: list[str], sweep: bool, more: list[str], command: str) -> list[Any]:
    """The checked configuration of each job of a sweep, or of the one job; no two jobs may write one run.

    more: overrides that every job has. Raises: UserError.
    """
    jobs = [overrides]
    if sweep:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        choices = []
        for override in OverridesParser.create().parse_overrides(overrides):
            key, text = override.get_key_element(), str(override.input_line)
            swept = override.is_sweep_override()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()] if swept else [text])
        jobs = [list(job) for job in itertools.product(*choices)]
    runs: dict[str, list[str]] = {}
    configs = []
    for job in jobs:
        config = compose_config([*job, *more], command)
        check_config(config, command)
        configs.append(config)
        if command in STAGES or command == "pipeline":
            if config.run in runs:
                other = sorted(set(job) ^ set(runs[config.run]))
                key = next((o.partition("=")[0] for o in other if not o.startswith("run=")), "seed")
                raise UserError(
                    f"--multirun: several jobs would write run={config.run}: give each a run of its own, such as "
                    f"'run={config.run}-${{{key}}}'"
                )
            runs[config.run] = job
    return configs


def split_texts(command: str, overrides: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split off the overrides of TEXTS, whose plain text needs none of Hydra's quotes. Raises: UserError."""
    texts: dict[str, str] = {}
    keys = TEXTS.get(command, ())
    if "--" in overrides:
        if not keys:
            takers = " and ".join(f"`rlhf {name}`" for name in TEXTS)
            raise UserError(
                f"--: only {takers} take text after it: write the settings of `rlhf {command}` as key=value"
            )
        at = overrides.index("--")
        overrides, texts[keys[0]] = overrides[:at], " ".join(overrides[at + 1 :])
    others = []
    for text in overrides:
        match = re.fullmatch(rf"{command}\.({'|'.join(keys)})=\s*([^\s'\"$].*)", text, re.DOTALL) if keys else None
        if match is None or match[2] == "null":
            others.append(text)
        else:
            texts.setdefault(match[1], match[2])
    return others, texts

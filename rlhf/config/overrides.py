"""The words of a command line: Hydra's flags, overrides, free text; and what is wrong with them, in one line each."""

import itertools
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from rlhf.config.checks import check_config
from rlhf.config.command_table import (
    COMMANDS,
    CONFIG_GROUPS,
    OF_SEVERAL,
    SHARED_FLAG,
    WITHOUT_GROUPS,
    uses,
)
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
TEXTS = {"chat": ("message", "system"), "next": ("text",)}  # settings of free text; the first may follow `--`
# The names of model.pretrained in other programs.
NAMES_ELSEWHERE = (
    "model_name_or_path",
    "pretrained_model_name_or_path",
    "model_name",
    "model_path",
    "model_id",
    "base_model",
    "pretrained",
    "checkpoint",
    "hf_model",
    "name_or_path",
)


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


def jobs_of(overrides: list[str], sweep: bool) -> list[list[str]]:
    """The overrides of each job of a sweep, or of the one job."""
    if not sweep:
        return [overrides]
    from hydra.core.override_parser.overrides_parser import OverridesParser

    choices = []
    for override in OverridesParser.create().parse_overrides(overrides):
        key, text = override.get_key_element(), override.input_line
        swept = override.is_sweep_override()
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()] if swept else [text])
    return [list(job) for job in itertools.product(*choices)]


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


# --- a pretrained model, and the other ways of naming it ------------------------------------------------------------


def refuse_other_name(key: str, value: object) -> None:
    """Raises: UserError if a setting that we lack is another program's name for the model or its revision."""
    if key.removeprefix("model.") in ("revision", "model_revision"):
        raise UserError(
            f"unknown setting {key!r}: a revision is named with its model: model.pretrained=<hub id>@{value}"
        )
    if key.removeprefix("model.") in NAMES_ELSEWHERE:
        raise UserError(
            f"unknown setting {key!r}: a pretrained model is named with model.pretrained={value}, in `rlhf pipeline`, "
            "or in `rlhf tokenizer` and `rlhf pretrain`"
        )


def refuse_as_shape(value: str) -> None:
    """Raises: UserError if the value of model=… is a path, a hub id or a file."""
    if "/" in value or value.endswith(".gguf") or Path(value).exists():
        raise UserError(
            f"model={value}: model=… names a shape to pretrain, such as gpt2: a pretrained model is named with "
            f"model.pretrained={value}"
        )


def refuse_as_group(key: str, value: object) -> None:
    """Raises: UserError for a group of settings that is given one value."""
    pretrained = "a pretrained tokenizer comes with its model, by model.pretrained=…" if key == "tokenizer" else ""
    raise UserError(f"{key}={value}: {key} is a group of settings: {pretrained or f'write {key}.<setting>=…'}")


def refuse_in_later_stage(command: str, key: str) -> None:
    """Raises: UserError if model.pretrained is given to a command that starts from the output of earlier stages."""
    if key == "model.pretrained":
        raise UserError(
            f"model.pretrained: `rlhf {command}` does not use it; it starts from the output of earlier stages: leave it out, or "
            "add it to `rlhf tokenizer` and `rlhf pretrain`, which run first, or to `rlhf pipeline`"
        )


def check_adopting(overrides: list[str]) -> None:
    """Refuse settings that have no meaning together with model.pretrained.

    Raises: UserError.
    """

    given = {key: value for key, _, value in (text.lstrip("+~").partition("=") for text in overrides)}
    if given.get("model.pretrained", "null") == "null":
        return
    shapes = [key for key in given if key in (*shape_settings(), "model")]
    if shapes:
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

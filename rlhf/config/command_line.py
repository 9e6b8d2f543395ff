"""The words of a command line: Hydra's flags, overrides, free text; what is wrong with them, in one line each."""

import contextlib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.config.checks import check_config
from rlhf.config.commands import COMMANDS, CONFIG_GROUPS, OF_SEVERAL, SHARED_FLAG, WITHOUT_GROUPS, uses
from rlhf.config.compose import SCHEMAS, choices_of, compose_config, first_line, nearest, schema_of, unknown_setting
from rlhf.config.model import shape_settings
from rlhf.config.setting import settings_in
from rlhf.errors import UserError
from rlhf.recipe import BASELINES, PIPELINE, STAGES, ancestors
from rlhf.system.files import check_regular
from rlhf.system.terminal import say

FLAGS = ("-m", "--multirun", "-c", "--cfg", "-cd", "--config-dir")
# Settings that may be written without their group.
SHORT = {"serve": ("labelers", "labels_per_prompt"), "clean": ("yes",)}
TEXTS = {"chat": ("message", "system")}  # settings of free text; the first may follow `--`
PLAIN = re.compile(r"[\w./:,@+%-]*|['\"].*|.*\$\{.*", re.ASCII | re.DOTALL)  # a value that needs no quotes
FOLDER = re.compile(r"file://([^'\"\],]+)")  # in hydra.searchpath
MOST_LEVELS = 50  # of a YAML file


class Words(NamedTuple):
    """A command line taken apart."""

    overrides: list[str]
    sweeps: bool = False  # -m: a job for each combination of values
    shows: bool = False  # --cfg job: only print the configuration


def searched_folders(overrides: list[str]) -> list[Path]:
    """The user's folders of YAML files in hydra.searchpath."""
    texts = [text for text in overrides if text.startswith("hydra.searchpath=")]
    return [Path(path) for text in texts for path in FOLDER.findall(text)]


def check_yaml(folder: Path) -> None:
    """Raises: UserError for a YAML file that grows when it is read, by an alias within what an anchor names, or is nested deeply."""
    import yaml

    for path in (*folder.glob("*.yaml"), *folder.glob("*/*.yaml")):
        check_regular(path)
        anchors: list[str | None] = []  # of the collections that are open
        with contextlib.suppress(yaml.YAMLError):  # Hydra names the line, if it reads the file
            for event in yaml.parse(path.read_bytes()):
                if isinstance(event, yaml.CollectionStartEvent):
                    anchors.append(event.anchor)
                elif isinstance(event, yaml.CollectionEndEvent):
                    anchors.pop()
                if len(anchors) > MOST_LEVELS or (isinstance(event, yaml.AliasEvent) and any(anchors)):
                    raise UserError(
                        f"{path}: nested too deeply, or an alias within what an anchor names: write it out flat"
                    )


def read_words(arguments: list[str], command: str) -> Words:
    """Take the words after the command apart. Raises: UserError for an unknown flag or a missing folder."""
    overrides: list[str] = []
    words = list(arguments)
    sweeps = shows = False
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag in SHORT.get(command, ()):
            word = f"{command}.{word}"
        if word == "--":
            if command not in TEXTS:
                takers = " and ".join(f"`rlhf {name}`" for name in TEXTS)
                raise UserError(f"--: only {takers} takes text: write the settings of `rlhf {command}` as key=value")
            overrides.append(f"{command}.{TEXTS[command][0]}={in_quotes(' '.join(words))}")
            break
        if not word.startswith("-"):
            # `+` adds a group to Hydra's list of defaults, which already contains ours
            is_group = word.startswith("+") and word[1:].partition("=")[0] in CONFIG_GROUPS
            overrides.append(word[1:] if is_group else quoted(word))
            continue
        if flag not in FLAGS:
            raise UserError(f"unknown option {flag!r}{nearest(flag, list(FLAGS))}: write settings as key=value")
        if flag in ("-m", "--multirun"):
            sweeps = True
            continue
        value = value if equals or not words else words.pop(0)
        if flag in ("-c", "--cfg"):
            shows = True
            if value != "job":
                raise UserError(f"{flag} {value}: want {flag} job")
        elif not Path(value).is_dir():
            raise UserError(f"{flag} {value}: no such folder: want one with YAML files, such as experiment/mine.yaml")
        else:
            overrides.insert(0, f"hydra.searchpath=['file://{Path(value).resolve()}']")
    for folder in searched_folders(overrides):
        check_yaml(folder)
    return Words(overrides, sweeps, shows)


def quoted(word: str) -> str:
    """An override in Hydra's quotes if Hydra cannot read it as it is, such as `path=größe (1).csv` or `data.prompts=[a (1).csv,b.csv]`;
    of a column, a verdict's word or free text with any signs, as `columns.prompt=Frage, Teil 1`.
    """
    key, _, value = word.partition("=")
    group, _, name = key.partition(".")
    if name in TEXTS.get(group, ()) and value != "null" and value.lstrip()[:1] not in ("", "'", '"', "$"):
        return f"{key}={in_quotes(value)}"
    is_name = key.startswith(("columns.", "words.")) and value[:1] not in ("[", "{")
    if PLAIN.fullmatch(value) or (not is_name and is_override(word)):
        return word
    if value[0] == "[" and value[-1] == "]":
        items = [item.strip() for item in value[1:-1].split(",")]
        return f"{key}=[{','.join(item if PLAIN.fullmatch(item) else in_quotes(item) for item in items)}]"
    return word if value[0] in "[{" else f"{key}={in_quotes(value)}"


def is_override(word: str) -> bool:
    """Whether Hydra can read it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(word)
    except (HydraException, RecursionError):
        return False
    return True


def in_quotes(text: str, interpolate: bool = False) -> str:
    """The text in Hydra's quotes. interpolate: whether ${…} in it is a reference to another setting or the environment."""
    text = text if interpolate else re.sub(r"(\\*)\$\{", lambda at: at[1] * 2 + "\\${", text)
    escaped = re.sub(r"(\\*)('|\Z)", lambda at: at[1] * 2 + ("\\'" if at[2] else ""), text)
    return f"'{escaped}'"


def check_overrides(overrides: list[str], command: str = "") -> None:
    """Raises: UserError for an override whose key the schema lacks, naming the nearest real one; and as `check_adopted`."""
    if not overrides:
        return
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    settings = settings_in(schema_of(command))
    groups = () if command in WITHOUT_GROUPS else CONFIG_GROUPS
    parser, given = OverridesParser.create(), {}
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"{text!r}: want key=value: write for example `seed=1`{nearest(text, list(settings))}")
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(
                f"{text!r}: not an override ({first_line(error)}): write key=value, quote odd values"
            ) from None
        except RecursionError:
            raise UserError(f"{text[:60]}…: nested too deeply: write key=value") from None
        key, value = override.key_or_group, override.value()
        given[key] = text.partition("=")[2]
        if key in groups and not text.startswith("~"):
            if isinstance(value, str):
                _check_choice(key, value, searched_folders(overrides))
        elif any(setting.startswith(f"{key}.") for setting in settings):
            if isinstance(value, str | int | float):
                pretrained = "a pretrained tokenizer comes with its model, by model.pretrained=…"
                hint = pretrained if key == "tokenizer" else f"write {key}.<setting>=…"
                raise UserError(f"{key}={value}: {key} is a group of settings: {hint}")
        elif key not in (*settings, "hydra.searchpath"):
            raise UserError(unknown_setting(key, command, groups))
    check_adopted(given)


def check_adopted(given: Mapping[str, Any]) -> None:
    """Refuse settings, by key, that have no meaning together with model.pretrained. Raises: UserError."""
    if given.get("model.pretrained") in (None, "null"):
        return
    if shapes := [key for key in given if key in (*shape_settings(), "model")]:
        raise UserError(
            f"{', '.join(shapes)}: a pretrained model has a shape and a tokenizer of its own: leave it out, or leave "
            "out model.pretrained"
        )
    tokens = given.get("pretrain.tokens")
    if tokens not in (None, "null") and not {"data.corpus", "experiment"} & set(given):
        raise UserError(
            f"pretrain.tokens={tokens}: pretraining goes on with text only: set data.corpus too, or leave "
            "pretrain.tokens out to adopt the model as it is"
        )


def _check_choice(group: str, value: str, folders: list[Path]) -> None:
    choices = choices_of(group, *folders)
    if value in choices:
        return
    if group == "model" and ("/" in value or value.endswith(".gguf") or Path(value).exists()):
        raise UserError(
            f"model={value}: model=… names a shape to pretrain, such as gpt2: a pretrained model is named with "
            f"model.pretrained={value}"
        )
    raise UserError(
        f"{group}={value}: want one of {', '.join(choices)}{nearest(value, choices)}; a file of your own, "
        f"<folder>/{group}/{value}.yaml, is found with --config-dir <folder>"
    )


def check_used(overrides: list[str], command: str) -> None:
    """Raises: UserError for a setting that the command does not read; a pipeline lists those that none of its stages reads."""
    settings = settings_in(schema_of(command))
    given = [key for key in (text.lstrip("+~").partition("=")[0] for text in overrides) if key in settings]
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


def check_jobs(overrides: list[str], sweep: bool, command: str) -> list[tuple[Any, list[str]]]:
    """The checked configuration and the overrides of each job of a sweep, or of the one job. Raises: UserError, also if two jobs
    would write one run.
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
        config = compose_config(job, command)
        check_config(config, command)
        configs.append((config, job))
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

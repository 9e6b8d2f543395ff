"""From the words of a command line to settings: flags and overrides, composed by Hydra, with mistakes in one line.

Hydra is imported only when there are overrides.
"""

import contextlib
import difflib
import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.config import SCHEMAS, Config
from rlhf.config.checks import check_config
from rlhf.config.commands import COMMANDS, CONFIG_GROUPS, OF_SEVERAL, SHARED_FLAG, WITHOUT_GROUPS, uses
from rlhf.config.model import shape_settings
from rlhf.config.removed import EQUIVALENTS, replacement
from rlhf.config.setting import FromEnvironment, flatten, settings_in
from rlhf.errors import UserError
from rlhf.recipe import BASELINES, PIPELINE, STAGES, ancestors
from rlhf.system.files import check_regular
from rlhf.system.terminal import say

FLAGS = ("-m", "--multirun", "-c", "--cfg", "-cd", "--config-dir")
# Settings that may be written without their group.
SHORT = {"serve": ("labelers", "labels_per_prompt"), "clean": ("yes",)}
TEXTS = {"chat": ("message", "system")}  # settings of free text; the first may follow `--`
PLAIN = re.compile(r"[\w./:,@+%-]*|['\"].*|.*\$\{.*", re.ASCII | re.DOTALL)  # a value that needs no quotes
MOST_LEVELS = 50  # of a YAML file


def schema_of(command: str) -> Any:
    """The dataclass that a command's configuration is composed to."""
    return SCHEMAS.get(command, Config)


def conf_dir() -> Path:
    """The folder of YAML files: inside an installed package, next to it in a checkout."""
    inside = Path(__file__).parents[1] / "conf"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "conf"


def choices_of(group: str, *folders: Path) -> list[str]:
    """The names of a group's YAML files, in conf/ and in further folders."""
    return sorted(path.stem for folder in (conf_dir(), *folders) for path in (folder / group).glob("*.yaml"))


class Words(NamedTuple):
    overrides: list[str]
    sweeps: bool = False  # -m: a job for each combination of values
    shows: bool = False  # --cfg job: only print the configuration


def read_words(arguments: list[str], command: str) -> Words:
    """Take the words after the command apart. Raises: UserError for an unknown flag, a missing folder or a YAML file that grows."""
    overrides: list[str] = []
    words, sweeps, shows = list(arguments), False, False
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if word == "--" and command in TEXTS:
            overrides.append(f"{command}.{TEXTS[command][0]}={in_quotes(' '.join(words))}")
            break
        if not word.startswith("-"):
            word = f"{command}.{word}" if flag in SHORT.get(command, ()) else word
            # `+` adds a group to Hydra's list of defaults, which already contains ours
            is_group = flag.startswith("+") and flag[1:] in CONFIG_GROUPS
            overrides.append(word[1:] if is_group else quoted(word))
        elif flag not in FLAGS:
            raise UserError(f"unknown option {flag!r}{nearest(flag, list(FLAGS), 0.6)}: write settings as key=value")
        elif flag in ("-m", "--multirun"):
            sweeps = True
        else:
            value = value if equals or not words else words.pop(0)
            if flag in ("-c", "--cfg"):
                shows = True
                if value != "job":
                    raise UserError(f"{flag} {value}: want {flag} job")
            elif not Path(value).is_dir():
                wanted = "want one with YAML files, such as experiment/mine.yaml"
                raise UserError(f"{flag} {value}: no such folder: {wanted}")
            else:
                overrides.insert(0, f"hydra.searchpath=['file://{Path(value).resolve()}']")
    for folder in searched_folders(overrides):
        check_yaml(folder)
    return Words(overrides, sweeps, shows)


def searched_folders(overrides: list[str]) -> list[Path]:
    """The user's folders of YAML files in hydra.searchpath."""
    texts = [text for text in overrides if text.startswith("hydra.searchpath=")]
    return [Path(path) for text in texts for path in re.findall(r"file://([^'\"\],]+)", text)]


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
                    problem = "nested too deeply, or an alias within what its anchor names"
                    raise UserError(f"{path}: {problem}: write it out")


def quoted(word: str) -> str:
    """An override in Hydra's quotes if Hydra cannot read it as it is, such as `path=größe (1).csv` or
    `data.prompts=[a (1).csv,b.csv]`; of a column, a verdict's word or free text with any signs, as
    `columns.prompt=Frage, Teil 1`.
    """
    key, _, value = word.partition("=")
    group, _, name = key.partition(".")
    if name in TEXTS.get(group, ()) and value != "null" and value.lstrip()[:1] not in ("", "'", '"', "$"):
        return f"{key}={in_quotes(value)}"
    is_name = key.startswith(("columns.", "words.")) and value[:1] not in ("[", "{")
    if PLAIN.fullmatch(value):
        return word
    with contextlib.suppress(UserError):
        if not is_name and parse(word):
            return word
    if value[0] == "[" and value[-1] == "]":
        items = [item.strip() for item in value[1:-1].split(",")]
        return f"{key}=[{','.join(item if PLAIN.fullmatch(item) else in_quotes(item) for item in items)}]"
    return word if value[0] in "[{" else f"{key}={in_quotes(value)}"


def parse(text: str) -> Any:
    """Hydra's override of a word. Raises: UserError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError):
        odd = "write key=value, close brackets and quotes, quote odd values"
        remedy = "take out the comma at its end" if text.endswith(",") else odd
        raise UserError(f"{text[:200]!r}: not an override: {remedy}") from None


def in_quotes(text: str, interpolate: bool = False) -> str:
    """The text in Hydra's quotes. interpolate: whether ${…} in it is a reference to another setting or the environment."""
    text = text if interpolate else re.sub(r"(\\*)\$\{", lambda at: at[1] * 2 + "\\${", text)
    escaped = re.sub(r"(\\*)('|\Z)", lambda at: at[1] * 2 + ("\\'" if at[2] else ""), text)
    return f"'{escaped}'"


def check_overrides(overrides: list[str], command: str = "") -> None:
    """Raises: UserError for an override whose key the schema lacks, naming the nearest real one; and as `check_adopted`."""
    settings = settings_in(schema_of(command))
    groups = () if command in WITHOUT_GROUPS else CONFIG_GROUPS
    given = {}
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            example = f"`{text}=…`" if text in settings else f"for example `seed=1`{nearest(text, list(settings))}"
            raise UserError(f"{text!r}: want key=value: write {example}")
        override = parse(text)
        key, value = override.key_or_group, override.value()
        given[key] = text.partition("=")[2]
        if key in groups and not text.startswith("~"):
            choices = choices_of(key, *searched_folders(overrides))
            if isinstance(value, str) and value not in choices:
                if key == "model" and ("/" in value or value.endswith(".gguf") or Path(value).exists()):
                    instead = f"give model.pretrained={value}"
                    raise UserError(f"{key}={value}: names a shape to pretrain, such as gpt2: {instead}")
                own = f"a file of your own, <folder>/{key}/{value}.yaml, is found with --config-dir <folder>"
                raise UserError(f"{key}={value}: want one of {', '.join(choices)}{nearest(value, choices)}; {own}")
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
        own = "a pretrained model has a shape and a tokenizer of its own"
        raise UserError(f"{', '.join(shapes)}: {own}: leave it out, or leave out model.pretrained")
    tokens = given.get("pretrain.tokens")
    if tokens not in (None, "null") and not {"data.corpus", "experiment"} & set(given):
        text = "pretraining goes on with text only: set data.corpus too, or leave it out"
        raise UserError(f"pretrain.tokens={tokens}: {text}")


def check_used(overrides: list[str], command: str) -> None:
    """Raises: UserError for a setting that the command does not read; a pipeline lists those that none of its stages reads."""
    settings = settings_in(schema_of(command))
    given = [key for key in (text.lstrip("+~").partition("=")[0] for text in overrides) if key in settings]
    if command == "pipeline":
        for key in given:  # the pipeline can run the baselines and the stages that evaluate builds on
            if not any(uses(name, key) for name in (*PIPELINE, *BASELINES, *ancestors("evaluate"), command)):
                say(f"pipeline: {key}: no stage of the pipeline uses it")
    unused = [] if command in OF_SEVERAL else [key for key in given if not uses(command, key)]
    if unused:
        others = [name for name in COMMANDS if name not in OF_SEVERAL and uses(name, unused[0])] or ["pipeline"]
        do = f"{', '.join(others)} {'do' if others[1:] else 'does'}"
        more = f" ({', '.join(unused[1:])}: neither)" if unused[1:] else ""
        remedy = f"leave it out, or add {SHARED_FLAG} if the settings are meant for several commands"
        if unused[0] == "model.pretrained":
            remedy = "leave it out, or add it to `rlhf tokenizer` and `rlhf pretrain`, which run first, or to `rlhf pipeline`"
        raise UserError(f"{unused[0]}: `rlhf {command}` does not use it; {do}{more}: {remedy}")


def check_jobs(overrides: list[str], sweep: bool, command: str) -> list[tuple[Any, list[str]]]:
    """The checked configuration and the overrides of each job of a sweep, or of the one job. Raises: UserError, also if
    two jobs would write one run.
    """
    values = [[text] for text in overrides]
    for i, one in enumerate(map(parse, overrides) if sweep else ()):
        if one.is_sweep_override():
            values[i] = [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
    configs, runs = [], set[str]()
    for job in itertools.product(*values):
        config = compose_config(job, command)
        check_config(config, command)
        configs.append((config, list(job)))
        if command in STAGES or command == "pipeline":
            if config.run in runs:
                own = "give each a run of its own, such as 'run=x-${seed}' for seed=1,2"
                raise UserError(f"--multirun: several jobs would write run={config.run}: {own}")
            runs.add(config.run)
    return configs


def compose_config(overrides: Sequence[str], command: str = "") -> Any:
    """The `Config` (or the command's own schema) that these overrides give. Raises: UserError if Hydra refuses them."""
    if any("${" in text or "hydra." in text for text in overrides):  # the time and the user's files may change
        return _compose.__wrapped__(overrides, command)
    files = frozenset((path, path.stat().st_mtime_ns) for path in conf_dir().rglob("*.yaml"))
    return deepcopy(_compose(tuple(overrides), command, files, frozenset(os.environ.items())))


@functools.lru_cache(maxsize=16)
def _compose(overrides: Sequence[str], command: str, *read: object) -> Any:
    """read: what else the result depends on."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    name = command if command in SCHEMAS else "config"  # of the file under conf/
    store = ConfigStore.instance()
    running, usual = GlobalHydra.instance().hydra, store.repo  # of a caller that is a Hydra application
    GlobalHydra.instance().hydra, store.repo = None, {**usual, **stored(name)}
    try:
        with initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
            composed = compose(name, overrides=list(overrides))
        return to_settings(composed)
    except (HydraException, OmegaConfBaseException, OverflowError) as error:  # the last: a number of hundreds of digits
        raise UserError(unknown_key(error, command) or first_line(error)) from None
    except RecursionError:
        raise UserError("the YAML files named here include each other in their `defaults`: take one out") from None
    finally:
        GlobalHydra.instance().hydra, store.repo = running, usual


@functools.cache
def stored(name: str) -> dict[str, Any]:
    """The entries of Hydra's store that a command needs: the schema of its configuration, and Hydra's own configuration
    without its groups (launcher, sweeper, …). Hydra copies the whole store several times for each composition.
    """
    from hydra.conf import HydraConf
    from hydra.core.config_store import ConfigNode
    from omegaconf import OmegaConf

    file = f"{name}_schema.yaml" if name in SCHEMAS else "schema.yaml"
    schema, own = OmegaConf.structured(schema_of(name)), OmegaConf.structured(HydraConf(defaults=[]))
    return {
        file: ConfigNode(file, schema, None, None, "rlhf"),
        "hydra": {"config.yaml": ConfigNode("config.yaml", own, None, "hydra", "rlhf")},
    }


def to_settings(composed: Any) -> Any:
    """The schema's own classes, with interpolations resolved; text from the environment keeps the name of its variable."""
    from omegaconf import OmegaConf

    tree: Any = OmegaConf.to_container(composed, resolve=False)
    texts = flatten(tree)

    def from_environment(text: Any) -> bool:
        """Directly, or through other settings."""
        others = re.findall(r"\$\{([\w.]+)\}", str(text))
        return "${oc.env:" in str(text) or any(from_environment(texts.get(key)) for key in others)

    def mark(text: Any, value: Any) -> Any:
        if isinstance(text, list):
            return [mark(*pair) for pair in zip(text, value, strict=True)]
        if isinstance(text, dict) and isinstance(value, dict):
            return {key: mark(inner, value[key]) for key, inner in text.items()}
        for key, inner in text.items() if isinstance(text, dict) else ():
            setattr(value, key, mark(inner, getattr(value, key)))
        if isinstance(value, str) and from_environment(text):
            value = FromEnvironment(value)
            value.source = text
        return value

    return mark(tree, OmegaConf.to_object(composed))


def first_line(error: BaseException) -> str:
    """Hydra's message without its formatting, together with its cause, which names the value."""
    lines = [line.strip() for line in str(error).splitlines()]
    parts = [line for line in lines if line and not line.startswith(("full_key", "object_type"))][:2]
    parts += str(error.__cause__ or "").splitlines()[:1]
    return "; ".join(dict.fromkeys(parts)) or type(error).__name__


def nearest(word: str, known: list[str], least: float = 0.4) -> str:
    """A hint that names the nearest known word, or "". least: similarity, at most 1."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=least)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown_setting(key: str, command: str, more: tuple[str, ...] = ()) -> str:
    """What to do about a key that the schema lacks. more: what is known besides settings."""
    if instead := replacement(key) or replacement(key.removeprefix("model.")):
        return f"unknown setting {key!r}: {instead}"
    if key.startswith(("columns.", "words.")) and command != "import":
        return f"unknown setting {key!r}: only `rlhf import` reads it: import the file first, then give the folder"
    known, last = [*settings_in(schema_of(command)), *more], key.rpartition(".")[2]
    last = EQUIVALENTS.get(last, last)
    group = "ppo" if command in ("", "pipeline") else command
    own = [one for one in known if one.startswith(f"{group}.")]
    same_name = [last] if last in known else [one for one in (*own, *known) if one.rpartition(".")[2] == last]
    close = nearest(f"{group}.{last}", own, 0.8) or nearest(key, known)
    hint = f" (did you mean {same_name[0]!r}?)" if same_name else close
    return f"unknown setting {key!r}{hint}: `rlhf <command> --cfg job` shows all"


def unknown_key(error: BaseException, command: str) -> str | None:
    """The message for an unknown key in a YAML file, worded as on the command line."""
    full_key, where = (re.search(pattern, str(error)) for pattern in (r"full_key: (\S+)", r"In '([^']+)'"))
    if full_key is None or "not in" not in str(error):
        return None
    return (f"{where[1]}.yaml: " if where else "") + unknown_setting(full_key[1], command)

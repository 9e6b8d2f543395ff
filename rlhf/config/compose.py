"""Settings composed by Hydra: from overrides and YAML files to the schema's classes, with mistakes in one line.

Hydra is imported only when something is composed.
"""

import contextlib
import difflib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.config import Config, PlanConfig
from rlhf.config.commands import CorpusConfig, ImportConfig
from rlhf.config.removed import EQUIVALENTS, replacement
from rlhf.config.setting import FromEnvironment, flatten, get, settings_in
from rlhf.errors import UserError

# Commands that have a schema of their own; all others share `Config`.
SCHEMAS: dict[str, type[Any]] = {"import": ImportConfig, "corpus": CorpusConfig, "plan": PlanConfig}


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


def compose_config(overrides: list[str], command: str = "") -> Any:
    """The `Config` (or the command's own schema) that these overrides give. Raises: UserError if Hydra refuses them."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    name = command if command in SCHEMAS else "config"  # of the file under conf/
    register_schema(name)
    running = GlobalHydra.instance().hydra  # of a caller that is a Hydra application
    GlobalHydra.instance().hydra = None
    try:
        with initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"), without_hydras_groups():
            composed = compose(name, overrides=overrides)
        return to_settings(composed)
    except (HydraException, OmegaConfBaseException, OverflowError) as error:  # the last: a number of hundreds of digits
        raise UserError(unknown_key(error, command) or first_line(error)) from None
    except RecursionError:
        raise UserError("the YAML files named here include each other in their `defaults`: take one out") from None
    finally:
        GlobalHydra.instance().hydra = running  # initialize_config_dir leaves another instance


@contextlib.contextmanager
def without_hydras_groups() -> Iterator[None]:
    """Hydra's own groups (launcher, sweeper, logging, help), which no command uses, would take 40% of the time to compose."""
    from hydra.core.config_store import ConfigStore

    place = ConfigStore.instance().repo["hydra"]
    usual = place["config.yaml"]  # which a caller that is a Hydra application needs
    place["config.yaml"] = bare_hydra()
    try:
        yield
    finally:
        place["config.yaml"] = usual


@functools.cache
def bare_hydra() -> Any:
    from hydra.conf import HydraConf
    from hydra.core.config_store import ConfigNode
    from omegaconf import OmegaConf

    return ConfigNode("config.yaml", OmegaConf.structured(HydraConf(defaults=[])), None, "hydra", "rlhf")


@functools.cache
def register_schema(name: str) -> None:
    """Tell Hydra the schema of a primary configuration: "config", or a command that has its own."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name=f"{name}_schema" if name in SCHEMAS else "schema", node=schema_of(name))


def to_settings(composed: Any) -> Any:
    """The schema's own classes, with interpolations resolved; text from the environment keeps the name of its variable."""
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_object(composed)
    texts = flatten(OmegaConf.to_container(composed, resolve=False))

    def from_environment(text: Any) -> bool:
        """Directly, or through other settings."""
        others = re.findall(r"\$\{([\w.]+)\}", str(text))
        return "${oc.env:" in str(text) or any(from_environment(texts.get(key)) for key in others)

    def mark(text: Any, value: Any) -> Any:
        if isinstance(text, list):
            return [mark(*pair) for pair in zip(text, value, strict=True)]
        if isinstance(value, str) and from_environment(text):
            value = FromEnvironment(value)
            value.source = text
        return value

    schema: Any = type(config)
    for key in settings_in(schema):
        if isinstance(texts.get(key), str | list):
            group, _, name = key.rpartition(".")
            setattr(get(config, group) if group else config, name, mark(texts[key], get(config, key)))
    return config


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
    hint = (
        f" (did you mean {same_name[0]!r}?)"
        if same_name
        else nearest(f"{group}.{last}", own, 0.8) or nearest(key, known)
    )
    return f"unknown setting {key!r}{hint}: `rlhf <command> --cfg job` shows all"


def unknown_key(error: BaseException, command: str) -> str | None:
    """The message for an unknown key in a YAML file, worded as on the command line."""
    text = str(error)
    full_key = re.search(r"full_key: (\S+)", text)
    if full_key is None or "not in" not in text:
        return None
    where = re.search(r"In '([^']+)'", text)
    message = unknown_setting(full_key[1], command)
    return f"{where[1]}.yaml: {message}" if where else message

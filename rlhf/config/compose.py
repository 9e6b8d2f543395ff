"""Settings composed by Hydra: from overrides and YAML files to the schema's classes, with mistakes in one line.

Hydra is imported only when something is composed.
"""

import difflib
import functools
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rlhf.config import Config, PlanConfig
from rlhf.config.commands import ImportConfig
from rlhf.config.removed import replacement
from rlhf.config.setting import FromEnvironment
from rlhf.errors import UserError

# Commands that have a schema of their own; all others share `Config`.
SCHEMAS: dict[str, type[Any]] = {"import": ImportConfig, "plan": PlanConfig}


def to_settings(composed: Any) -> Any:
    """The schema's own classes, with interpolations resolved; text from the environment keeps the name of its variable."""
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_object(composed)
    raw = OmegaConf.to_container(composed, resolve=False)
    named: set[str] = set()  # settings that come from the environment, directly or through other settings

    def is_named(text: Any) -> bool:
        return isinstance(text, str) and ("${oc.env:" in text or any(f"${{{key}}}" in text for key in named))

    def mark(text: Any, value: Any, key: str) -> Any:
        if isinstance(text, dict):
            for name, inner in text.items():
                full = f"{key}.{name}" if key else str(name)
                old = value[name] if isinstance(value, dict) else getattr(value, name)
                new = mark(inner, old, full)
                if new is not old:
                    value.__setitem__(name, new) if isinstance(value, dict) else setattr(value, name, new)
        elif isinstance(text, list):
            value[:] = [mark(one, old, key) for one, old in zip(text, value, strict=True)]
        elif isinstance(value, str) and is_named(text):
            named.add(key)
            return FromEnvironment(value, text)
        return value

    known = -1
    while len(named) > known:
        known = len(named)
        mark(raw, config, "")
    return config


def first_line(error: BaseException) -> str:
    """Hydra's message without its formatting, together with its cause, which names the value."""
    lines = [line.strip() for line in str(error).splitlines()]
    parts = [line for line in lines if line and not line.startswith(("full_key", "object_type"))][:2]
    if error.__cause__ is not None and str(error.__cause__).splitlines():
        parts.append(str(error.__cause__).splitlines()[0])
    return "; ".join(dict.fromkeys(parts)) or type(error).__name__


def conf_dir() -> Path:
    """The folder of YAML files: inside an installed package, next to it in a checkout."""
    inside = Path(__file__).parents[1] / "conf"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "conf"


def schema_of(command: str) -> type[Any]:
    """The dataclass that a command's configuration is composed to."""
    return SCHEMAS.get(command, Config)


def schema_keys(command: str = "") -> dict[str, Any]:
    """Every key of a command's schema, dotted, with its default; groups too."""
    keys: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        for item in fields(value):
            inner = getattr(value, item.name)
            keys[prefix + item.name] = inner
            if is_dataclass(inner):
                add(f"{prefix}{item.name}.", inner)

    add("", schema_of(command)())
    return keys


def config_name(command: str) -> str:
    """The primary configuration of a command: conf/config.yaml, or its own file if it has its own schema."""
    return command if command in SCHEMAS else "config"


def compose_config(overrides: list[str], command: str = "") -> Any:
    """The `Config` (or the command's own schema) that these overrides give. Raises: UserError if Hydra refuses them."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register_schema(config_name(command))
    ours = GlobalHydra.instance()
    running, ours.hydra = ours.hydra, None  # the pipeline composes its stages' settings while Hydra runs the pipeline
    try:
        with initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
            composed = compose(config_name(command), overrides=overrides)
        return to_settings(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(unknown_key(error, command) or first_line(error)) from None
    except RecursionError:
        raise UserError("the YAML files named here include each other in their `defaults`: take one out") from None
    finally:
        ours.hydra = running


@functools.cache
def register_schema(name: str) -> None:
    """Tell Hydra the schema of a primary configuration: "config", or a command that has its own."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name=f"{name}_schema" if name in SCHEMAS else "schema", node=schema_of(name))


def nearest(word: str, known: list[str]) -> str:
    """A hint that names the nearest known word, or ""."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest_key(key: str, known: list[str]) -> str:
    """As `nearest`, first by the last part of a dotted key."""
    last = key.rsplit(".", 1)[-1]
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == last]
    return f" (did you mean {same_name[0]!r}?)" if same_name else nearest(key, known)


def unknown_setting(key: str, known: list[str]) -> str:
    if (instead := replacement(key)) is not None:
        return f"setting {key!r} is gone: {instead}"
    return f"unknown setting {key!r}{nearest_key(key, known)}: `rlhf <command> --cfg job` shows all"


def unknown_key(error: BaseException, command: str) -> str | None:
    """The message for an unknown key in a YAML file, worded as on the command line."""
    text = str(error)
    full_key = re.search(r"full_key: (\S+)", text)
    if full_key is None or "not in" not in text:
        return None
    where = re.search(r"In '([^']+)'", text)
    known = [key for key, value in schema_keys(command).items() if not is_dataclass(value)]
    message = unknown_setting(full_key[1], known)
    return f"{where[1]}.yaml: {message}" if where else message

"""What Hydra composed, as the schema's own classes; the jobs of a sweep; what Hydra says of a mistake, in one line."""

from typing import Any

from rlhf.config.setting import FromEnvironment


def to_settings(composed: Any) -> Any:
    """The schema's own classes, interpolations resolved; text from the environment remembers where it came from."""
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_object(composed)
    raw = OmegaConf.to_container(composed, resolve=False)
    named: set[str] = set()  # settings that come from the environment, also by way of other settings

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


def jobs_of(overrides: list[str], sweep: bool) -> list[list[str]]:
    """The overrides of each job of a sweep, or of the one job."""
    if not sweep:
        return [overrides]
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    batches = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None)
    return [list(job) for batch in batches for job in batch]


def first_line(error: BaseException) -> str:
    """What Hydra says, less its formatting; the cause, which names the value, goes along."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("full_key", "object_type"))][:2]
    if error.__cause__ is not None and str(error.__cause__).splitlines():
        told.append(str(error.__cause__).splitlines()[0])
    return "; ".join(dict.fromkeys(told)) or type(error).__name__

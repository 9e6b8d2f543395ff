"""A setting is stated once, on its field. Help, the checks of single values and lineage are derived from it.

lr: float = setting(1e-5, "of the policy", above=0, max=10)
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, get_args

# What a setting affects, and the consequence if a run is repeated with another value.
RESULT = "result"  # the result: a stage that was run with another value is not reused
ROUNDING = "rounding"  # memory, speed and the rounding of the result: a stage resumes and prints a note
NOTHING = "nothing"  # paths, display, or settings of no stage's result

MAX_SEED = 2**32 - 1
LEAST_TEMPERATURE = 1e-6  # below it logits may overflow, so that sampling fails
MAX_PROCESSES = 1024  # also of threads


Test = Callable[[Any], bool]


def listed(value: Any) -> list[Any]:
    """A setting that holds one value or several, as a list; empty for null."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def is_text(value: Any) -> bool:
    """Whether there is text other than white space."""
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_function(value: Any) -> bool:
    return is_text(value) and ":" in value


def _is_name(value: Any) -> bool:
    return is_text(value) or _is_number(value)


def _is_encoding(value: Any) -> bool:
    try:
        return bool("\n".encode(value))  # refuses codecs that are not of text, such as base64
    except (LookupError, ValueError, TypeError):
        return False


def _list_of(fits: Test, least: int = 1, most: float = math.inf) -> Test:
    return lambda v: isinstance(v, list | tuple) and least <= len(v) <= most and all(map(fits, v))


def _one_or_list(fits: Test, least: int = 1) -> Test:
    return lambda v: _list_of(fits, least)(v) if isinstance(v, list | tuple) else fits(v)


# The values of settings whose type YAML cannot express: what is wanted, in words, and whether a value fits.
KINDS: dict[str, tuple[str, Test]] = {
    "paths": ("a file, a folder or a hub id, or a list of these", _one_or_list(is_text)),
    "names": ("a name or a list of names", _one_or_list(is_text)),
    "labelers": ("a name or a list of names", _one_or_list(_is_name, least=0)),
    "rewards": (
        "a name or a list of names", lambda v: is_text(v) or _list_of(lambda name: name is None or is_text(name))(v)
    ),
    "function": ("a function module:name or file.py:name", _is_function),
    "functions": ("module:name or file.py:name, or a list of these", _one_or_list(_is_function)),
    "columns": ("a column or a list of columns", _one_or_list(_is_name, least=0)),
    "words": ("a word or a list of words", _one_or_list(lambda v: _is_name(v) or isinstance(v, bool), least=0)),
    "numbers": ("a number or a list of numbers", _one_or_list(_is_number)),
    "counts": (
        "a whole number of 0 or more, or a list of different ones",
        lambda v: _one_or_list(lambda n: type(n) is int and n >= 0)(v) and len({*listed(v)}) == len(listed(v)),
    ),
    "shares": ("a list of numbers above 0", _list_of(lambda n: _is_number(n) and n > 0)),
    "weights": (
        "a weight of 0 or more by name, as '{anna: 2, ben: 0.5}'",
        lambda v: isinstance(v, dict) and all(_is_number(weight) and weight >= 0 for weight in v.values()),
    ),
    "signed": (
        "a number by name, as '{helpfulness: 1, hallucination: -1}'",
        lambda v: isinstance(v, dict) and bool(v) and all(map(_is_number, v.values())),
    ),
    "parameters": (
        "values by name, as '{weight: 2, unit: cm}'",
        lambda v: isinstance(v, dict) and all(isinstance(name, str) and name.isidentifier() for name in v),
    ),
    "pair": ("two different names", lambda v: _list_of(is_text, 2, 2)(v) and v[0] != v[1]),
    "layers": ("a whole number of 1 or more, or mix", lambda v: v == "mix" or (type(v) is int and v >= 1)),
    "switch": ("auto, true or false", lambda v: v == "auto" or isinstance(v, bool)),
    "encoding": ("an encoding that Python knows, such as utf-8", _is_encoding),
}  # fmt: skip


# The bounds of numbers: in words, and whether one holds.
BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "min": ("{} or more", operator.ge), "above": ("more than {}", operator.gt),
    "max": ("at most {}", operator.le), "below": ("less than {}", operator.lt),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    help: str
    choices: tuple[str, ...] | None = None
    min: float | None = None
    above: float | None = None
    max: float | None = None
    below: float | None = None
    kind: str | None = None  # of KINDS; with choices also a value
    changes: str | None = None  # none: as its group
    default: Any = None
    optional: bool = False  # null is a value

    def wanted(self) -> str:
        """The values that fit, in words."""
        if self.choices is not None or self.kind is not None:
            choices = [f"one of {', '.join(self.choices)}"] if self.choices else []
            return ", or ".join([*choices, *([KINDS[self.kind][0]] if self.kind else [])])
        if self.min is not None and self.max is not None:
            return f"{self.min} to {self.max}"
        return " and ".join(BOUNDS[name][0].format(bound) for name, bound in self.bounds()) or "a finite number"

    def bounds(self) -> list[tuple[str, float]]:
        return [(name, bound) for name in BOUNDS if (bound := getattr(self, name)) is not None]

    def fits(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.choices is not None or self.kind is not None:
            return value in (self.choices or ()) or (self.kind is not None and KINDS[self.kind][1](value))
        if isinstance(value, str):
            return bool(value.strip())
        within = all(BOUNDS[name][1](value, bound) for name, bound in self.bounds())
        return within and (isinstance(value, int) or math.isfinite(value))

    def problem(self, key: str, value: Any) -> str | None:
        """What is wrong with a value, in words, or None."""
        if "\\x00" in repr(value).replace("\\\\", ""):  # which YAML can write as "\\0", also in a list
            return f"{key}: contains a NUL character, which no path can contain: leave it out"
        if self.fits(value):
            return None
        or_null = ", or null" if self.optional else ""
        if isinstance(value, str) and not value.strip():
            wanted = self.wanted() if self.choices or self.kind else "some text"
            return f"{key}='{value}': is empty (an unset shell variable?): want {wanted}{or_null}"
        finite = ", finite" if isinstance(value, float) and not math.isfinite(value) else ""
        return f"{key}={value}: want {self.wanted()}{finite}{or_null}"


def setting(default: Any, help: str, **stated: Any) -> Any:
    """A field with its default, its help (which names the unit) and other properties of `Setting`."""
    return field(default=default, metadata={"setting": Setting(help, default=default, **stated)})


def other_default(schema: Any, name: str, default: Any) -> Any:
    """The field of a schema that this one extends, with another default."""
    stated = replace(schema.__dataclass_fields__[name].metadata["setting"], default=default)
    return field(default=default, metadata={"setting": stated})


def group(schema: type, changes: str = RESULT) -> Any:
    """A field that is a group of settings. `changes` applies to those that do not state it themselves."""
    return field(default_factory=schema, metadata={"changes": changes})


@functools.cache
def settings_in(schema: Any, changes: str = RESULT) -> Mapping[str, Setting]:
    """Every setting of a schema by its dotted key, in the schema's order."""
    settings: dict[str, Setting] = {}
    for item in sorted(fields(schema), key=lambda item: item.name not in schema.__annotations__):  # inherited ones last
        if isinstance(item.type, type) and is_dataclass(item.type):
            inner = settings_in(item.type, item.metadata["changes"])
            settings |= {f"{item.name}.{key}": value for key, value in inner.items()}
            continue
        stated: Setting = item.metadata["setting"]
        optional = (item.type is Any and item.default is None) or type(None) in get_args(item.type)
        settings[item.name] = replace(stated, optional=optional, changes=stated.changes or changes)
    return settings


def get(config: Any, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def flatten(tree: Any, mark: str = ".", prefix: str = "") -> dict[str, Any]:
    """{"sft.lr": …} of nested settings; `mark` joins the names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        name = f"{prefix}{key}"
        flat |= flatten(value, mark, name + mark) if isinstance(value, dict) else {name: value}
    return flat


class FromEnvironment(str):
    """A value that an interpolation such as ${oc.env:TOKEN} gave: what is stored is the interpolation."""

    source: str


def stored(value: Any) -> Any:
    """A value, or a tree of them, as written to a file: values from the environment are replaced by their variable's name."""
    if isinstance(value, FromEnvironment):
        return value.source
    if isinstance(value, dict):
        return {key: stored(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [stored(inner) for inner in value]
    return str(value) if isinstance(value, str) else value  # plain text, without what a subclass adds

"""Functions from outside the package, named in settings as `module:name` or `file.py:name`."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.system.files import sha256_file


class Named(str):
    """The name `module:name` of a function that was given as it is, from Python."""

    function: Callable[..., Any]


def named(function: Callable[..., Any]) -> Named:
    """A function as a setting holds it: its name, which `load_named` takes back to the function."""
    name = Named(f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}")
    name.function = function
    return name


def source_sha256(what: str, name: str) -> str | None:
    """The hash of a function's source, or of the file that its name leads to; None if it has none. Raises: UserError."""
    if isinstance(name, Named):
        try:
            text = inspect.getsource(name.function).encode()
        except (OSError, TypeError):  # of a built-in function, or typed into an interpreter
            return None
        return hashlib.sha256(text).hexdigest()
    source = source_file(what, name)
    return None if source is None else sha256_file(source)


def is_function(name: str) -> bool:
    """Whether a name is that of a Python function `module:name` rather than a file, a folder, a hub id or an address."""
    return ":" in name and not is_address(name) and not Path(name).exists()


def is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def source_file(what: str, name: str) -> Path | None:
    """The file of `module:name` or `file.py:name`, also of the working directory; None for a built-in module. Raises: UserError."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise UserError(f"{what} {name!r}: want module:name or file.py:name")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UserError(f"{what} {name}: {place}: no such file: check the path")
        return Path(place)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(place)
    except Exception as error:  # raised by a parent package, which find_spec imports
        raise UserError(f"{what} {name}: cannot be imported ({type(error).__name__}: {error})") from error
    if spec is None:
        raise UserError(f"{what} {name}: cannot be imported (no module {place!r}): check module and name")
    return Path(spec.origin) if spec.origin is not None and Path(spec.origin).is_file() else None


def load_named(what: str, name: str, arguments: Sequence[str], offered: Sequence[str] = ()) -> Callable[..., Any]:
    """The function `module:name` or `file.py:name`; what it raises becomes a UserError of one line.
    what: for messages, such as "reward function". arguments: their names; those that end with "=" are passed by name.
    offered: names of further ones; its attribute `takes` lists those that it has. Raises: UserError if it cannot be
    called like this.
    """
    place, _, attribute = name.rpartition(":")
    source = None if isinstance(name, Named) else source_file(what, name)
    try:
        if isinstance(name, Named):
            function = name.function
        elif place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"plugin_{Path(place).stem}", str(source))
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses and pickle look for it there
            spec.loader.exec_module(module)
            function = getattr(module, attribute)
        else:
            function = getattr(importlib.import_module(place), attribute)
    except (Exception, SystemExit) as error:  # a module's code can raise anything
        reason = f"cannot be imported ({type(error).__name__}: {error})"
        raise UserError(f"{what} {name}: {reason}: check module and name") from error
    if not callable(function):
        raise UserError(f"{what} {name}: want a function, got a {type(function).__name__}")
    given, positional = list(arguments), [argument for argument in arguments if not argument.endswith("=")]
    takes: list[str] = []
    try:
        signature = inspect.signature(function)
        takes = [name for name in offered if name in list(signature.parameters)[len(positional) :]]
        given += [f"{name}=" for name in takes]
        signature.bind(*positional, **{a.removesuffix("="): a for a in given if a.endswith("=")})
    except ValueError:  # a built-in function has no signature
        pass
    except TypeError as error:
        called = f"is called as f({', '.join(given)})"
        raise UserError(f"{what} {name}: takes {signature} ({error}), {called}: give it these arguments") from None

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            raise UserError(f"{what} {name}: raised {type(error).__name__}: {error} ({place}): correct it") from error

    setattr(call, "takes", takes)  # noqa: B010 (a function's attribute has no type)
    return call


def call_plugins(names: Sequence[str]) -> None:
    """Call the functions of the setting `plugins`. Raises: UserError for one that cannot be called, or raises."""
    for name in names:
        load_named("plugins", name, ())()

"""The one exception for mistakes of the user, and its wording of errors from model libraries."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


class UserError(Exception):
    """A mistake that the user can correct.

    The message is one line: where it happened, what came, what was wanted, what to do. The command line exits with code
    2.
    """


def optional(package: str, needed_by: str, otherwise: str = "") -> Any:
    """A package or module that not every user needs. Raises: UserError if it is not installed. otherwise: what else would help."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise UserError(f"{needed_by}: needs the package {name}: pip install {name}{otherwise}") from None


@contextlib.contextmanager
def reading(what: str, remedy: str) -> Iterator[None]:
    """Raises: UserError "<what> (<reason>): <remedy>" for any error within, since a damaged file can raise many kinds."""
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of tokenizers is no Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own (auto_map in its config.json), which is never run"
        raise UserError(f"{what} ({reason}): {remedy}") from error


def hub_remedy(error: BaseException | None, page: str, otherwise: str) -> str:
    """What to do about a repository of the hub that could not be read, whose page is huggingface.co/`page`."""
    kinds = set()
    while error is not None:  # libraries wrap the hub's own error
        kinds.add(type(error).__name__)
        error = error.__cause__ or error.__context__
    if "GatedRepoError" in kinds:
        return f"it is gated: accept its terms on https://huggingface.co/{page}, then set HF_TOKEN to a token of that account"
    if kinds & {"RepositoryNotFoundError", "LocalTokenNotFoundError"}:
        return f"{otherwise}; if it is private, set HF_TOKEN to a token that may read it"
    return otherwise

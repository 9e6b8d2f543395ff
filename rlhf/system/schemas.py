"""JSON files with a schema, strict in types and ranges: each is read in one way and refused in one line.

A file's schema lies beside what reads it. Import this module inside a function where pydantic is not needed otherwise.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rlhf.errors import UserError
from rlhf.system.files import check_regular
from rlhf.system.terminal import one_line

MAX_BYTES = 64 << 20  # of one file
INTEGERS = 2**63  # beyond them torch and Arrow have no integers


def shown(value: Any, limit: int = 60) -> str:
    """A value as shown in an error message: on one line, printable, cut short."""
    try:
        text = repr(value[: limit + 1] if isinstance(value, str) else value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def first_problem(error: ValidationError) -> tuple[str, str]:
    """The first problem that pydantic found: its field, and a message `got …, want …`."""
    detail: Any = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in detail["loc"])
    wanted = detail["msg"].removeprefix("Input should be ").removeprefix("List should have ")
    if detail["type"] == "record":
        field, message = detail["ctx"]["field"], detail["msg"]
    elif detail["type"] == "missing":
        message = f"{field}: missing"
    elif detail["type"] == "string_unicode":
        message = f"{field}: got a lone surrogate (half of a character), want text that UTF-8 can hold"
    else:
        wanted = "an object {…}" if detail["type"] == "model_type" else wanted[0].lower() + wanted[1:]
        message = f"{field + ': ' if field else ''}got {shown(detail['input'])}, want {wanted}"
    return one_line(field, 200), one_line(message)


def _inside(name: str) -> str:
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError("a file inside the folder")
    return name


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Inside = Annotated[str, AfterValidator(_inside)]  # a file's name, relative to the folder of the record
Size = Annotated[int, Field(ge=1, lt=INTEGERS)]
Count = Annotated[int, Field(ge=0, lt=INTEGERS)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Schema(BaseModel):
    """Further keys are kept."""

    model_config = ConfigDict(extra="allow", strict=True)


def check_value(value: Any, schema: type[BaseModel], what: str, remedy: str) -> Any:
    """The value as its schema. Raises: UserError "<what> (<field>: got …, want …): <remedy>"."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise UserError(f"{what} ({first_problem(error)[1]}): {remedy}") from None


def read_checked(path: Path, schema: type[BaseModel], remedy: str) -> dict[str, Any] | None:
    """The object in a JSON file, or None if there is no such file. Raises: UserError if it is damaged or cannot be read."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder, want a file: {remedy}") from error
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise UserError(f"{path}: damaged ({str(error).splitlines()[0]}): {remedy}") from None
    check_value(value, schema, f"{path}: damaged", remedy)
    return value

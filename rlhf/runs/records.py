"""The JSON files of a run folder, checked against a schema when read; a damaged file gives a one-line error.

Imports pydantic only when a file is read.
"""

import functools
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf.errors import UserError
from rlhf.system.files import check_regular, read_json

Kind = Literal["stage", "manifest", "results"]


@functools.cache
def _schemas() -> dict[str, Any]:
    from typing import Annotated, Self

    from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

    def inside(name: str) -> str:
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError("a file outside the folder")
        return name

    Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    Files = dict[Annotated[str, AfterValidator(inside)], Digest]

    class Record(BaseModel):
        model_config = ConfigDict(extra="allow", strict=True)

    class StageRecord(Record):
        """stage.json. `files` and `hash` are present once the stage is complete."""

        stage: str
        status: Literal["running", "complete"]
        settings: dict[str, JsonValue]
        parents: dict[str, str]
        data: dict[str, str]
        seconds: float = 0.0
        steps: int | None = None
        config: dict[str, JsonValue] = Field(default_factory=dict)
        summary: dict[str, float | None] = Field(default_factory=dict)
        files: Files | None = None
        hash: Digest | None = None

        @model_validator(mode="after")
        def has_output(self) -> Self:
            if self.status == "complete" and (self.files is None or self.hash is None):
                raise ValueError("complete, but without files or hash")
            return self

    class Manifest(Record):
        """manifest.json of a checkpoint."""

        files: Annotated[Files, Field(min_length=1)]
        figure: float | None = None

    class Interval(Record):
        value: float
        ci95: tuple[float, float] = Field(strict=False)

    class Gold(Record):
        win_rate_vs_sft: Interval
        win_rate_greedy: Interval

    class Results(Record):
        """evaluate/results.json, as far as other commands read it."""

        kl_to_sft_nats: float
        gold: Gold | None = None

    return {"stage": StageRecord, "manifest": Manifest, "results": Results}


def read_record(path: Path, kind: Kind) -> dict[str, Any] | None:
    """The contents of a run file, or None if there is none. Raises: UserError if it is damaged or cannot be read."""
    check_regular(path)
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder, want a file: {REMEDY[kind]}") from error
    from pydantic import ValidationError

    try:
        value = json.loads(text)
        _schemas()[kind].model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][:3])
        raise UserError(f"{path}: damaged ({where + ': ' if where else ''}{first['msg']}): {REMEDY[kind]}") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise UserError(f"{path}: damaged ({str(error).splitlines()[0]}): {REMEDY[kind]}") from None
    return value


def read_what_is_there(path: Path, kind: Kind) -> tuple[dict[str, Any], str | None]:
    """A run file for reports: the object in it or None, and how it is damaged, if it is."""
    try:
        return read_record(path, kind) or {}, None
    except UserError as error:
        return read_json(path), str(error)


REMEDY: dict[Kind, str] = {
    "stage": "restore the file, or run the stage again with overwrite=true",
    "manifest": "remove the checkpoint",
    "results": "run `rlhf evaluate overwrite=true` again",
}


@functools.cache
def git_state(folder: Path = Path(__file__).parent) -> dict[str, Any]:
    """{"commit", "branch", "dirty"} of the git checkout that contains the code; empty if there is none."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # An installed package may be inside another project's checkout, which does not contain this file.
    if not git("ls-files", "--error-unmatch", Path(__file__).name):
        return {}
    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no", "--", ".")
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    return {"commit": commit, "branch": branch, "dirty": bool(status)} if commit else {}


def tracking_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's record as the configuration of its run: lineage at the top, then every setting by its own key."""
    lineage = {key: record.get(key) for key in ("stage", "run", "seed", "parents", "data", "versions")}
    settings = {key: value for key, value in (record.get("config") or {}).items() if key not in lineage}
    return {**lineage, "git": record.get("git") or {}, **settings}

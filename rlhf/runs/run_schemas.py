"""The schemas of a run's records, in `rlhf.runs.folders.read_record`: what other commands read in them."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rlhf.system.schemas import Count, Digest, Finite, Inside, Schema, Size

Files = dict[Inside, Digest]


class Lengths(Schema):
    max_tokens: Size | None = None
    max_new_tokens: Size | None = None


class Settings(Schema):
    """The run's configuration, as far as other commands read it."""

    parents: dict[str, str | None] = Field(default_factory=dict)
    data: Lengths = Lengths()
    rollout: Lengths = Lengths()


class StageRecord(Schema):
    """stage.json. `files` and `hash` are present once the stage is complete."""

    stage: str
    status: Literal["running", "complete"]
    run: str
    settings: dict[str, JsonValue]
    parents: dict[str, str]
    data: dict[str, str]
    versions: dict[str, str]
    seconds: Annotated[Finite, Field(ge=0)] = 0.0
    steps: Count | None = None
    memory: dict[str, Finite | None] = Field({})
    counts: dict[str, Count] = Field({})
    config: Settings = Settings()
    summary: dict[str, float | None] = Field({})
    files: Files | None = None
    hash: Digest | None = None

    @model_validator(mode="after")
    def has_output(self) -> Self:
        if self.status == "complete" and (self.files is None or self.hash is None):
            raise ValueError("complete, but without files or hash")
        return self


class Manifest(Schema):
    """manifest.json of a checkpoint."""

    files: Annotated[Files, Field(min_length=1)]
    figure: float | None = None


class Interval(Schema):
    value: float
    ci95: tuple[float, float] | None = Field(strict=False)  # none: too few prompts


class Gold(Schema):
    win_rate_vs_sft: Interval
    win_rate_greedy: Interval


class Results(Schema):
    """evaluate/results.json, as far as other commands read it."""

    kl_to_sft_nats: float
    policy: str = "ppo"
    gold: Gold | None = None


class Adopted(Schema):
    """adopted.json of a model that was not pretrained here."""

    source: str
    revision: str | None = None
    licence: str | None = None
    sha256: dict[str, Digest]


class Round(Schema):
    """sample.json of a round of labelling."""

    policy: str = ""
    counts: dict[str, Count]
    files: Files


# By kind: the schema, and what to do about a damaged file.
RECORD_KINDS: dict[str, tuple[Any, str]] = {
    "stage": (StageRecord, "restore the file, or run the stage again with overwrite=true"),
    "manifest": (Manifest, "remove the checkpoint"),
    "results": (Results, "run `rlhf evaluate overwrite=true` again"),
    "adopted": (Adopted, "restore the file, or run `rlhf pretrain overwrite=true` again"),
    "round": (Round, "restore the file, or sample to another folder"),
}

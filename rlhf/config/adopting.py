"""How a pretrained model is named on the command line (model.pretrained=…), and the errors for every other way of naming it."""

from pathlib import Path

from rlhf.errors import UserError

# The names of model.pretrained in other programs.
NAMES_ELSEWHERE = (
    "model_name_or_path",
    "pretrained_model_name_or_path",
    "model_name",
    "model_path",
    "model_id",
    "base_model",
    "pretrained",
    "checkpoint",
    "hf_model",
    "name_or_path",
)


def refuse_other_name(key: str, value: object) -> None:
    """Raises: UserError if a setting that we lack is another program's name for the model or its revision."""
    if key.removeprefix("model.") in ("revision", "model_revision"):
        raise UserError(
            f"unknown setting {key!r}: a revision is named with its model: model.pretrained=<hub id>@{value}"
        )
    if key.removeprefix("model.") in NAMES_ELSEWHERE:
        raise UserError(
            f"unknown setting {key!r}: a pretrained model is named with model.pretrained={value}, in `rlhf pipeline`, "
            "or in `rlhf tokenizer` and `rlhf pretrain`"
        )


def refuse_as_shape(value: str) -> None:
    """Raises: UserError if the value of model=… is a path, a hub id or a file."""
    if "/" in value or value.endswith(".gguf") or Path(value).exists():
        raise UserError(
            f"model={value}: model=… names a shape to pretrain, such as gpt2: a pretrained model is named with "
            f"model.pretrained={value}"
        )


def refuse_as_group(key: str, value: object) -> None:
    """Raises: UserError for a group of settings that is given one value."""
    pretrained = "a pretrained tokenizer comes with its model, by model.pretrained=…" if key == "tokenizer" else ""
    raise UserError(f"{key}={value}: {key} is a group of settings: {pretrained or f'write {key}.<setting>=…'}")


def refuse_in_later_stage(command: str, key: str) -> None:
    """Raises: UserError if model.pretrained is given to a command that starts from the output of earlier stages."""
    if key == "model.pretrained":
        raise UserError(
            f"model.pretrained: `rlhf {command}` does not use it; it starts from the output of earlier stages: leave it out, or "
            "add it to `rlhf tokenizer` and `rlhf pretrain`, which run first, or to `rlhf pipeline`"
        )


def check_adopting(overrides: list[str]) -> None:
    """Refuse settings that have no meaning together with model.pretrained.

    Raises: UserError.
    """
    from rlhf.config.model import shape_settings

    given = {key: value for key, _, value in (text.lstrip("+~").partition("=") for text in overrides)}
    if given.get("model.pretrained", "null") == "null":
        return
    shapes = [key for key in given if key in (*shape_settings(), "model")]
    if shapes:
        raise UserError(
            f"{', '.join(shapes)}: a pretrained model has a shape and a tokenizer of its own: leave it out, or leave "
            "out model.pretrained"
        )
    tokens = given.get("pretrain.tokens", "null")
    if tokens != "null" and not {"data.corpus", "experiment"} & set(given):
        raise UserError(
            f"pretrain.tokens={tokens}: pretraining goes on with text only: set data.corpus too, or leave "
            "pretrain.tokens out to adopt the model as it is"
        )

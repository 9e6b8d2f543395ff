"""Weights to and from transformers' architectures, and export to a folder in the original architecture."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.errors import UserError
from rlhf.model.architectures import ARCHITECTURES, special_ids
from rlhf.model.gpt import GPTConfig, GPTForCausalLM

OWN = "rlhf"  # the form of models that no public class can express: model type rlhf_gpt
# Fields of a checkpoint's configuration that describe the file, not the model.
PASSING = (
    "model_type",
    "architectures",
    "dtype",
    "transformers_version",
    "quantization_config",
    "auto_map",
    "_name_or_path",
)


def misfits(config: Any, form: str) -> list[str]:
    """Why our configuration cannot be written in a form, as texts; empty if it can."""
    if form == OWN:
        return []
    architecture, wrong = ARCHITECTURES[form], []
    for name, wanted in {"window": None, "experts": 0, **architecture.shape}.items():
        value = getattr(config, name)
        if value not in (wanted if isinstance(wanted, tuple) else (wanted,)):
            wrong.append(f"{name} is {value!r}, {form} has {wanted!r}")
    if architecture.square and config.n_kv_head != config.n_head:
        wrong.append(f"n_kv_head is {config.n_kv_head}, {form} has n_head={config.n_head}")
    if architecture.square and config.head_dim * config.n_head != config.width:
        wrong.append(f"head_dim is {config.head_dim}, {form} has width / n_head")
    if form == "openai-gpt" and config.mlp_width != 4 * config.width:
        wrong.append(f"mlp_width is {config.mlp_width}, {form} has 4 width")
    return wrong


def find_form(config: Any) -> str:
    """The architecture that the weights came from, if it still fits; else the first that does; else our own."""
    came_from = (config.origin or {}).get("model_type")
    forms = [came_from] if came_from in ARCHITECTURES else []
    return next((form for form in [*forms, *ARCHITECTURES] if not misfits(config, form)), OWN)


def why_own(config: Any) -> str:
    """Why our configuration cannot be written in the nearest architecture, as text."""
    return min((misfits(config, form) for form in ARCHITECTURES), key=len)[0]


def why_not_native(config: Any) -> list[str]:
    """Why our GPT cannot express a checkpoint's configuration, as text; empty if it can."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        return [f"{kind} is none of {', '.join(ARCHITECTURES)}"]
    return ARCHITECTURES[kind].problems(config)


def make_native_config(config: Any) -> GPTConfig:
    """A checkpoint's configuration as ours.

    Raises: UserError for an architecture or a variant that ours does not express.
    """
    kind = config.model_type
    if problems := why_not_native(config):
        raise UserError(f"convert from {kind}: " + "; ".join(problems))
    kept = {name: value for name, value in config.to_dict().items() if name not in PASSING}
    return GPTConfig(**ARCHITECTURES[kind].our_fields(config), origin={"model_type": kind, **kept})


def from_transformers(model: PreTrainedModel) -> GPTForCausalLM:
    """Our GPT with the weights of one of transformers' classes, copied.

    Raises: UserError for an architecture or a variant that ours does not express.
    """
    config = make_native_config(model.config)
    architecture = ARCHITECTURES[model.config.model_type]
    if not isinstance(model, architecture.model_class):
        wanted = architecture.model_class.__name__
        raise UserError(f"convert from {model.config.model_type}: a {type(model).__name__}: want a {wanted}")
    theirs = model.state_dict()
    state = {ours: layout.join([theirs[n] for n in names]) for ours, names, layout in architecture.entries(config)}
    return _build(GPTForCausalLM(config), state, model)


def to_transformers(model: GPTForCausalLM, form: str) -> PreTrainedModel:
    """transformers' class of the architecture `form` with our weights, copied.

    The remaining fields of its configuration (see `GPTConfig.origin`) are restored.

    Raises: UserError if the model does not fit the form.
    """
    config: Any = model.config
    if problems := misfits(config, form):
        raise UserError(f"convert to {form}: " + "; ".join(problems))
    architecture = ARCHITECTURES[form]
    origin = dict(config.origin or {})
    kept = origin if origin.pop("model_type", None) == form else {}
    written = architecture.their_fields(config)
    if kept and architecture.our_fields(architecture.config_class(**kept))["context_length"] == config.context_length:
        written |= {name: kept[name] for name in ("max_position_embeddings", "sliding_window") if name in written}
    result = architecture.model_class(architecture.config_class(**{**kept, **written}))
    ours, state = model.state_dict(), dict[str, torch.Tensor]()
    for name, names, layout in architecture.entries(config):
        state.update(zip(names, layout.split(ours[name]), strict=True))
    return _build(result, state, model)


def _build(model: Any, state: dict[str, torch.Tensor], like: PreTrainedModel) -> Any:
    """Fill a new model with a state dict, with the other model's dtype and device; evaluation mode."""
    torch.nn.Module.to(model, device=like.device, dtype=like.dtype)
    model.load_state_dict(state)
    model.generation_config = GenerationConfig.from_dict(like.generation_config.to_dict())  # type: ignore[union-attr]
    return model.eval()


# ----------------------------------------------------------------------------------------------------- export


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: str | PathLike, form: str = "auto") -> str:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads.

    form: one of `ARCHITECTURES`, which plain transformers loads; "rlhf", which loads after `import rlhf.model`; "auto"
    takes the architecture that the weights came from, else the first that fits. Tokenizer and a generation configuration
    with every end token go with it. A model that is not our GPT is saved as it is. Returns the form written.

    Raises: UserError if the model does not fit the form.
    """
    if form not in ("auto", OWN, *ARCHITECTURES):
        raise UserError(f"export: form {form!r} is unknown: choose auto, {', '.join(ARCHITECTURES)} or {OWN}")
    converted, written = _as_form(model, form)
    ids = special_ids(tokenizer)
    generation_config = converted.generation_config
    ends = _all_ends(generation_config, ids["eos_token_id"])
    converted.generation_config = GenerationConfig(**{**ids, "eos_token_id": ends})
    try:
        converted.save_pretrained(out)
    finally:
        converted.generation_config = generation_config
    tokenizer.save_pretrained(out)
    path = Path(out) / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **ids}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return written


def _all_ends(generation: Any, end: int | None) -> int | list[int] | None:
    """Every end token of the model, the tokenizer's first; a number if there is only one."""
    known = getattr(generation, "eos_token_id", None)
    ends = [end, *(known if isinstance(known, list) else [known])]
    ends = list(dict.fromkeys(i for i in ends if i is not None))
    return ends if len(ends) > 1 else next(iter(ends), None)


def _as_form(model: PreTrainedModel, form: str) -> tuple[PreTrainedModel, str]:
    if not isinstance(model, GPTForCausalLM):
        kind = model.config.model_type
        if form not in ("auto", kind):
            raise UserError(f"export: a {kind} model is saved as it is, not as {form!r}: choose form auto")
        return model, kind
    form = find_form(model.config) if form == "auto" else form
    return (model, OWN) if form == OWN else (to_transformers(model, form), form)

"""Models leave: weights to and from transformers' architectures, and folders that plain transformers loads, of policies
and of reward models."""

import copy
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.config.setting import listed
from rlhf.data.chat_template import end_ids
from rlhf.data.tokenizer import PAD
from rlhf.errors import UserError, reading
from rlhf.model.architectures import ARCHITECTURES, special_ids
from rlhf.model.gpt import GPTConfig, GPTForCausalLM
from rlhf.model.heads import fold
from rlhf.model.interface import lm
from rlhf.model.linear import merged
from rlhf.ops.fast import by_torch_alone

OWN = "rlhf"  # the form of models that no public class can express: model type rlhf_gpt
# Fields of a checkpoint's configuration that describe the file, not the model.
PASSING = (
    "model_type", "architectures", "dtype", "transformers_version", "quantization_config", "auto_map", "_name_or_path",
)  # fmt: skip
TOLERANCE = 1e-4  # largest difference of a score between our model and transformers' class
PROBED = 24  # tokens of the longest probe row


def misfits(config: Any, form: str) -> list[str]:
    """Why our configuration cannot be written in the form of an architecture, as texts; empty if it can."""
    architecture, wrong = ARCHITECTURES[form], []
    for name, wanted in {"attention": "causal", "window": None, "experts": 0, **architecture.shape}.items():
        value = getattr(config, name)
        if value not in (wanted if isinstance(wanted, tuple) else (wanted,)):
            wrong.append(f"{name} is {value!r}, {form} has {wanted!r}")
    if config.rotary_scaling and "llama3" not in architecture.ropes:
        wrong.append(f"rotary_scaling is set, unlike {form}")
    return wrong + [f"{problem}, unlike {form}" for problem in architecture.misfits(config)]


def find_form(config: Any) -> str:
    """The architecture that the weights came from, if it still fits; else the first that does; else our own."""
    came_from = (config.origin or {}).get("model_type")
    forms = [came_from] if came_from in ARCHITECTURES else []
    return next((form for form in [*forms, *ARCHITECTURES] if not misfits(config, form)), OWN)


def why_own(config: Any) -> str:
    """Why our configuration cannot be written in the nearest architecture, as text."""
    return min((misfits(config, form) for form in ARCHITECTURES), key=len)[0]


def make_native_config(config: Any) -> GPTConfig:
    """A checkpoint's configuration as ours, which expresses it (`why_not_native`). Raises: UserError for values that make no sense."""
    kind = config.model_type
    kept = {name: value for name, value in config.to_dict().items() if name not in PASSING}
    with reading(f"convert from {kind}: config.json", "restore it"):
        return GPTConfig(**ARCHITECTURES[kind].our_fields(config), origin={"model_type": kind, **kept})


def from_transformers(model: PreTrainedModel) -> GPTForCausalLM:
    """Our GPT with the weights of one of transformers' causal language models, copied. Raises: UserError as `make_native_config`."""
    config, theirs = make_native_config(model.config), model.state_dict()
    architecture = ARCHITECTURES[model.config.model_type]
    with torch.device("meta"):  # memory never contains the weights a third time
        ours = GPTForCausalLM(config)
    state: dict[str, Tensor] = {}
    for name in ours.state_dict():
        names, layout = architecture.locate(config, name)
        joined = layout.join([theirs[n] for n in names])
        shared = joined.untyped_storage().data_ptr() == theirs[names[0]].untyped_storage().data_ptr()
        state[name] = joined.clone(memory_format=torch.contiguous_format) if shared else joined
    ours.load_state_dict(state, assign=True)
    ours.tie_weights()
    return _finished(ours, model)


def to_transformers(model: GPTForCausalLM, form: str) -> PreTrainedModel:
    """transformers' class of an architecture that fits, with our weights, copied; `GPTConfig.origin` restores the rest of its fields."""
    config: Any = model.config
    result = ARCHITECTURES[form].model_class(their_config(config, form))
    nn.Module.to(result, device=model.device, dtype=model.dtype)
    result.load_state_dict(dict(renamed(config, form, model.state_dict().items())))
    return _finished(result, model)


def renamed(config: GPTConfig, form: str, ours: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Our weights under the names of an architecture and in its layout, one by one."""
    for name, weight in ours:
        names, layout = ARCHITECTURES[form].locate(config, name)
        yield from zip(names, layout.split(weight), strict=True)


def their_config(config: GPTConfig, form: str) -> Any:
    """The configuration of transformers' class for ours, which fits the form."""
    architecture = ARCHITECTURES[form]
    origin = dict(config.origin or {})
    kept = origin if origin.pop("model_type", None) == form else {}
    written = architecture.their_fields(config)
    if kept and architecture.our_fields(architecture.config_class(**kept))["context_length"] == config.context_length:
        written |= {name: kept[name] for name in ("max_position_embeddings", "sliding_window") if name in kept}
    return architecture.config_class(**{**kept, **written})


def public_form(config: GPTConfig, what: str) -> str:
    """`find_form`. Raises: UserError, which begins with `what`, if only our own class fits."""
    if (form := find_form(config)) == OWN:
        raise UserError(f"{what}: no public class expresses this model: {why_own(config)}")
    return form


def public_config(model: Any, what: str) -> dict[str, Any]:
    """config.json of the model as `export` writes it. Raises: UserError as `public_form`."""
    if not lm(model).native:
        return model.config.to_dict() | {"architectures": [type(model).__name__]}
    form = public_form(model.config, what)
    return their_config(model.config, form).to_dict() | {"architectures": [ARCHITECTURES[form].model_class.__name__]}


def public_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights as `public_config` describes them, adapters added, one by one; a tied unembedding is among them."""
    weights = merged(model, dict(model.state_dict()))
    return renamed(model.config, find_form(model.config), weights) if lm(model).native else weights


def _finished(model: Any, like: PreTrainedModel) -> Any:
    """The model with the other one's settings of generation, in evaluation mode."""
    model.generation_config = GenerationConfig.from_dict(like.generation_config.to_dict())  # type: ignore[union-attr]
    return model.eval()


# ---------------------------------------------------------------------------------------------------- policies


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: str | PathLike) -> str:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, with a generation configuration that has every
    end token.

    Returns the form of a model of ours, see `find_form`, of which "rlhf" loads only after `import rlhf.model`; else the
    architecture.
    """
    converted: Any = copy.copy(model)
    form = find_form(model.config) if lm(model).native else model.config.model_type
    if lm(model).native and form != OWN:
        converted = to_transformers(converted, form)
    ids, known = special_ids(tokenizer), getattr(model.generation_config, "eos_token_id", None)
    ends = [*dict.fromkeys([*listed(ids["eos_token_id"]), *listed(known)])]  # the tokenizer's first
    end = ends if len(ends) > 1 else next(iter(ends), None)
    converted.generation_config = GenerationConfig(**{**ids, "eos_token_id": end})
    converted.config = copy.deepcopy(converted.config)
    converted.config.update(ids)
    converted.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return form


# ----------------------------------------------------------------------------------------------- reward models


def export_reward(model: Any, tokenizer: Any, out: str | PathLike) -> tuple[str, float]:
    """Write a reward model as `AutoModelForSequenceClassification` with one label, with its tokenizer; returns (class,
    offset), with score = logit + offset: gain and shift go into the weights, but without a bias not this constant.

    Its head reads the last token that is not the pad token. tokenizer: the policy's. Raises: UserError for a model that
    no public class expresses.
    """
    if model.reads_text:
        result, tokenizer = copy.deepcopy(model.network), model.tokenizer
        offset = fold(_head(result), model.gain, model.shift)
    elif model.config.read_tokens > 1 or model.mix is not None:
        several = "several tokens or layers (reward.read_tokens, reward.layers=mix)"
        raise UserError(f"export: no class of transformers reads a score at {several}")
    else:
        result, tokenizer = _with_score_head(model), copy.deepcopy(tokenizer)
        _give_pad(result, tokenizer)
        end_at_end_token(tokenizer)
        head = _head(result)
        with torch.no_grad():
            head.weight.copy_(model.head.weight)
        offset = fold(head, model.gain, model.shift - model.head.bias.item())
        _check(model, result, tokenizer, offset)
    result.config.score_offset = offset
    result.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return type(result).__name__, offset


def _with_score_head(model: Any) -> Any:
    """transformers' class on a copy of the trunk, whose head is still random."""
    trunk = model.trunk
    settings, weights = copy.deepcopy(trunk.config), trunk.state_dict()
    if lm(trunk).native:
        form = public_form(trunk.config, "export")
        settings = their_config(trunk.config, form)
        weights = dict(renamed(trunk.config, form, ((f"model.{name}", weight) for name, weight in weights.items())))
    settings.num_labels = 1
    try:
        result: Any = AutoModelForSequenceClassification.from_config(settings, trust_remote_code=False)
        prefix = f"{result.base_model_prefix}."
        result.base_model.load_state_dict({name.removeprefix(prefix): weight for name, weight in weights.items()})
    except (ValueError, RuntimeError) as error:
        lacks = f"transformers has no sequence classifier of a {settings.model_type}"
        raise UserError(f"export: {lacks}: {str(error).splitlines()[0]}") from error
    return result.float().eval()


def _head(model: Any) -> nn.Linear:
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 1][-1]


def _give_pad(model: Any, tokenizer: Any) -> None:
    """A pad token that is no end token, since these classes read the last token that is not pad."""
    if tokenizer.pad_token_id in (end_ids(tokenizer) or [tokenizer.eos_token_id]):
        tokenizer.add_special_tokens({"pad_token": PAD})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.update(special_ids(tokenizer))


def end_at_end_token(tokenizer: Any) -> None:
    """Make a rendered dialogue end with the last turn's end token, at which the score is read: many templates write a newline after it."""
    template, ends = tokenizer.chat_template, [tokenizer.decode([i]) for i in end_ids(tokenizer)]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if not isinstance(template, str) or not ends:
        return
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    if not rendered.endswith(tuple(ends)) and rendered.rstrip().endswith(tuple(ends)):
        tokenizer.chat_template = "{% filter trim %}" + template + "{% endfilter %}"


@torch.no_grad()
@by_torch_alone()
def _check(model: Any, result: Any, tokenizer: Any, offset: float) -> None:
    """Raises: UserError if a padded probe batch has other scores."""
    generator = torch.Generator().manual_seed(0)
    most = min(PROBED, lm(model.trunk).context or PROBED)
    lengths = torch.tensor([most, most // 2, max(1, most // 3)])
    tokens = torch.randint(0, model.trunk.get_input_embeddings().num_embeddings, (3, most), generator=generator)
    tokens[tokens == tokenizer.pad_token_id] = (end_ids(tokenizer) or [tokenizer.eos_token_id])[0]
    mask = torch.arange(most) < lengths[:, None]
    ours = model(tokens, lengths)
    theirs = result(input_ids=tokens.where(mask, tokenizer.pad_token_id), attention_mask=mask.long()).logits[:, 0]
    difference = float((ours - theirs - offset).abs().max() / ours.abs().max().clamp(min=1.0))
    if not difference <= TOLERANCE:
        found = f"scores of a probe batch differ by {difference:.1e} in {type(result).__name__}, more than {TOLERANCE}"
        raise UserError(f"export: {found}: it does not express this reward model")

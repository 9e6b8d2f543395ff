"""A reward model as transformers' `AutoModelForSequenceClassification` with one label, which TRL and others load.

Its head is `score` of the last token that is not the pad token. Gain and shift of the calibration go into the weights. Most
of these classes have a head without bias. Then the constant goes into the bias of the last norm, which nothing else uses; if the
norm has none either (RMSNorm), it is left out and stated: a constant changes neither an order nor a difference.
"""

from __future__ import annotations

import copy
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from rlhf.cpu.products import by_torch_alone
from rlhf.data.chat_template import end_ids
from rlhf.data.tokenizer import PAD
from rlhf.errors import UserError
from rlhf.model.architectures import special_ids
from rlhf.model.classifier import EncoderClassifier, TextRewardModel
from rlhf.model.convert import OWN, find_form, to_transformers, why_own
from rlhf.model.gpt import GPTForCausalLM
from rlhf.model.gpt_config import GPTConfig
from rlhf.model.heads import RewardModel

TOLERANCE = 1e-4  # largest difference of a score between our model and transformers' class
PROBED = 24  # tokens of the longest probe row


class Exported(NamedTuple):
    """The result of `export_reward`."""

    class_name: str
    offset: float  # score = logit + offset


def export_reward(model: RewardModel | TextRewardModel, tokenizer: Any, out: str | PathLike) -> Exported:
    """Write a folder that plain transformers loads, with its tokenizer; `tokenizer` is the policy's.

    Raises: UserError for a model that no public class expresses.
    """
    if isinstance(model, TextRewardModel):
        if isinstance(model.network, EncoderClassifier):
            raise UserError(
                f"export: no class of transformers scores with the encoder of a {model.network.config.model_type}"
            )
        result, tokenizer = copy.deepcopy(model.network), model.tokenizer
        offset = fold(_head(result), model.gain, model.shift, None)
    elif model.config.read_tokens > 1:
        raise UserError(
            f"export: no class of transformers reads a score at {model.config.read_tokens} tokens (reward.read_tokens)"
        )
    else:
        result = _with_score_head(model)
        tokenizer = copy.deepcopy(tokenizer)
        _give_pad(result, tokenizer)
        end_at_end_token(tokenizer)
        head = _head(result)
        with torch.no_grad():
            head.weight.copy_(model.head.weight)
        bias = model.head.bias.item()
        offset = fold(head, model.gain, model.shift - bias, _last_norm(result, model))
        _check(model, result, tokenizer, offset)
    result.config.score_offset = offset
    result.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return Exported(type(result).__name__, offset)


@torch.no_grad()
def fold(head: nn.Linear, gain: float, shift: float, norm: nn.Module | None) -> float:
    """Fold gain (w . h + b - shift) into the weights; returns the constant that cannot be folded.

    norm: a layer whose output only the head reads.
    """
    head.weight.mul_(gain)
    if head.bias is not None:
        head.bias.sub_(shift).mul_(gain)
        return 0.0
    place = getattr(norm, "bias", None)
    square = float(head.weight.double().square().sum())
    if place is None or square == 0.0:
        return -gain * shift
    place.add_(head.weight[0] * (-gain * shift / square))  # w . (h + c w / |w|^2) = w . h + c
    return 0.0


def _with_score_head(model: RewardModel) -> Any:
    """transformers' class on a copy of the trunk; its head is still random."""
    config: Any = model.config.trunk
    trunk: Any = model.trunk
    if isinstance(config, GPTConfig):
        form = find_form(config)
        if form == OWN:
            raise UserError(f"export: no class of transformers expresses this reward model's trunk: {why_own(config)}")
        ours = GPTForCausalLM(config)
        ours.model.load_state_dict(model.trunk.state_dict())
        trunk = to_transformers(ours, form).base_model
    settings: Any = copy.deepcopy(trunk.config)
    settings.num_labels = 1
    try:
        result: Any = AutoModelForSequenceClassification.from_config(settings, trust_remote_code=False)
        result.base_model.load_state_dict(trunk.state_dict())
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"export: transformers has no sequence classifier of a {settings.model_type}: {str(error).splitlines()[0]}"
        ) from error
    return result.float().eval()


def _head(model: Any) -> nn.Linear:
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 1]
    if not heads:
        raise UserError(f"export: {type(model).__name__} has no linear layer with one output")
    return heads[-1]


def _last_norm(result: Any, model: RewardModel) -> nn.Module | None:
    """The layer whose output is the last hidden state, if it is a LayerNorm of our GPT's architectures."""
    if not isinstance(model.config.trunk, GPTConfig):
        return None
    norms = [m for m in result.base_model.modules() if isinstance(m, nn.LayerNorm)]
    return norms[-1] if norms else None


def _end_tokens(tokenizer: Any) -> list[int]:
    """The possible last tokens of a row: the end tokens; for completions, which have none, the tokenizer's eos."""
    return end_ids(tokenizer) or [tokenizer.eos_token_id]


def _give_pad(model: Any, tokenizer: Any) -> None:
    """A pad token that is no end token: these classes read the last token that is not pad, which must be the end token."""
    if tokenizer.pad_token_id in _end_tokens(tokenizer):
        tokenizer.add_special_tokens({"pad_token": PAD})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for name, value in special_ids(tokenizer).items():
        setattr(model.config, name, value)


def end_at_end_token(tokenizer: Any) -> None:
    """Make a rendered dialogue end with the last turn's end token, at which the score is read.

    Many templates write a newline after it (SmolLM2, Qwen), at which the logit has no meaning.
    """
    template, ends = tokenizer.chat_template, [tokenizer.decode([i]) for i in end_ids(tokenizer)]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if not isinstance(template, str) or not ends:
        return
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    if not rendered.endswith(tuple(ends)) and rendered.rstrip().endswith(tuple(ends)):
        tokenizer.chat_template = "{% filter trim %}" + template + "{% endfilter %}"


@torch.no_grad()
@by_torch_alone()
def _check(model: RewardModel, result: Any, tokenizer: Any, offset: float) -> None:
    """Raises: UserError if a padded probe batch has other scores."""
    generator = torch.Generator().manual_seed(0)
    most = min(PROBED, getattr(model.config.trunk, "max_position_embeddings", None) or PROBED)
    lengths = torch.tensor([most, most // 2, max(1, most // 3)])
    tokens = torch.randint(0, model.trunk.get_input_embeddings().num_embeddings, (3, most), generator=generator)
    tokens[tokens == tokenizer.pad_token_id] = _end_tokens(tokenizer)[0]
    mask = torch.arange(most) < lengths[:, None]
    ours = model(tokens, lengths)
    theirs = (
        result(input_ids=tokens.where(mask, tokenizer.pad_token_id), attention_mask=mask.long()).logits[:, 0] + offset
    )
    difference = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1.0))
    if not difference <= TOLERANCE:
        raise UserError(
            f"export: scores of a probe batch differ by {difference:.1e} in {type(result).__name__}, more than "
            f"{TOLERANCE}: it does not express this reward model"
        )

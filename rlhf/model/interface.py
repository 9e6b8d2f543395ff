"""What the rest of the package asks of a model, whatever its class: `lm(model)` of a causal language model, and of a
reward model the methods of `RewardModel`, which TextRewardModel gives to any of transformers' classifiers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.data.records import PromptRecord
from rlhf.model.batching import by_length, scoring_tokens
from rlhf.system.processes import gather


def unwrapped(model: Any) -> Any:
    """The model, or the model inside an engine."""
    return getattr(model, "module", model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in eval mode; afterwards the modules that were in training mode are so again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def lm(model: Any) -> "LanguageModel":
    """The interface of a causal language model or of a trunk, bare or inside an engine."""
    bare = unwrapped(model)
    return bare if hasattr(bare, "native") else LanguageModel(bare)


class LanguageModel:
    """A causal language model, or its trunk: here of transformers' classes; our GPT has these methods itself."""

    native = False  # our GPT: the sampler's cache, and `kept` exist

    def __init__(self, model: Any):
        self.model = model

    @property
    def context(self) -> int | None:
        """The longest row in tokens; None if its configuration does not state it."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def logits_are(self) -> str:
        """ "product": the unembedding's with the last hidden states; "finished": `finish` of it; "own": by the model's
        forward alone.

        Measured once, with three tokens.
        """
        model = self.model
        if (known := getattr(model, "logits_are", None)) is not None:
            return known
        with torch.no_grad(), evaluating(model):
            tokens = torch.tensor([[0, 1, 2]], device=model.device)
            logits = model(input_ids=tokens, use_cache=False).logits.float()
            hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            product = model.get_output_embeddings()(hidden)
        made = {"product": product, "finished": self.finish(product)}
        same = (name for name, x in made.items() if torch.allclose(x.float(), logits, rtol=1e-4, atol=1e-5))
        model.logits_are = next(same, "own")
        return model.logits_are

    def finish(self, product: Tensor) -> Tensor:
        """Logits from the unembedding's product, as the configuration says: scaled (Cohere, Granite), soft-capped (Gemma 2)."""
        config = self.model.config.get_text_config()
        scale, divisor = getattr(config, "logit_scale", None) or 1.0, getattr(config, "logits_scaling", None) or 1.0
        cap = getattr(config, "final_logit_softcapping", None)
        logits = product * (scale / divisor)
        return cap * torch.tanh(logits / cap) if cap else logits

    def hidden(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Last hidden states (N, D) of the tokens that `kept` (N,) names by row * T + position.

        tokens (B, T), right-padded, so that causal attention hides padding from every real token.
        """
        output = self.model.base_model(input_ids=tokens, use_cache=False)
        return output.last_hidden_state.flatten(0, 1).index_select(0, kept)

    def layers_at(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Hidden states (layers + 1, N, D) of these tokens: embeddings, then each block's output; the last as of `hidden`."""
        output = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return torch.stack([x.flatten(0, 1).index_select(0, kept) for x in output.hidden_states])

    def logits(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Logits (N, V) after the tokens in `kept`."""
        if self.logits_are == "own":
            return self.model(input_ids=tokens, use_cache=False).logits.flatten(0, 1).index_select(0, kept)
        product = self.model.get_output_embeddings()(self.hidden(tokens, kept))
        return product if self.logits_are == "product" else self.finish(product)


# ------------------------------------------------------------------------------------------------ reward models


class Episodes(NamedTuple):
    """B prompts with one response each, as tokens and as text."""

    records: list[PromptRecord]
    prompts: list[list[int]]
    responses: list[list[int]]
    texts: list[str]  # responses without their end token
    ended: Tensor  # (B,) bool


def scoring_groups(model: Any, lengths: Sequence[int], most: int) -> list[list[int]]:
    """`by_length` for forwards without gradients, of at most `most` rows. Under ZeRO-3, whose forwards gather weights,
    every rank must call the model equally often: the last group is repeated.
    """
    groups = by_length(lengths, most, scoring_tokens(model))
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        groups += groups[-1:] * (max(gather(len(groups))) - len(groups))
    return groups


@torch.no_grad()
def score(model: Any, rows: Sequence[Any], **how: Any) -> Tensor:
    """Scores (B,) float32 on the CPU of rows, in groups of similar length, or what else the forward returns by `how`.
    model: of rewards, bare or inside an engine.
    """
    bare, scores = unwrapped(model), dict[int, Tensor]()
    device = next(bare.parameters()).device
    with evaluating(bare):
        for group in scoring_groups(bare, [len(row) for row in rows], bare.together):
            batch = {name: x.to(device) for name, x in bare.collate([rows[i] for i in group]).items()}
            scores |= zip(group, model(**batch, **how).float().cpu(), strict=True)
    return torch.stack([scores[i] for i in range(len(rows))]) if rows else torch.zeros(0)

"""Functions for any causal language model: hidden states of chosen tokens, and whether logits are a plain product."""

from typing import Any

import torch
from torch import Tensor

from rlhf.model.branches import Joined, choose_groups, join
from rlhf.model.gpt import GPTForCausalLM, GPTModel


def context_of(model: Any, tokenizer: Any) -> int:
    """The model's context in tokens; if its configuration does not state it, the tokenizer's maximum length."""
    return getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length


def hidden_at(trunk: Any, tokens: Tensor, kept: Tensor) -> Tensor:
    """Last hidden states (N, D) of the tokens that `kept` (N,) names by row * T + position, of any causal trunk.

    tokens (B, T), right-padded, so that causal attention hides padding from every real token. A native trunk reads a common
    prefix of several rows only once, if that saves time.
    """
    if not isinstance(trunk, GPTModel):
        return trunk(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1).index_select(0, kept)
    if len(tokens) > 1 and len(kept) and trunk.config.window is None:  # a window counts distances within the row
        rows, positions = kept // tokens.shape[1], kept % tokens.shape[1]
        if (joined := join_rows(tokens, rows, positions, trunk.config.width)) is not None:
            given = {"attention_mask": joined.mask, "position_ids": joined.positions}
            at = joined.places(rows, positions)
            return trunk(input_ids=joined.tokens, use_cache=False, kept=at, **given).last_hidden_state
    return trunk(input_ids=tokens, use_cache=False, kept=kept).last_hidden_state


def join_rows(tokens: Tensor, rows: Tensor, positions: Tensor, width: int) -> Joined | None:
    """The rows of tokens (B, T) joined, each up to the last of its `positions`; None if that saves no time."""
    ends = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
    ends = ends.scatter_reduce(0, rows, positions, "amax")
    texts = [row[: end + 1] for row, end in zip(tokens.tolist(), ends.tolist(), strict=True)]
    groups = choose_groups(texts, width)
    return None if groups is None else join(texts, groups, tokens.device)


def logits_at(model: Any, tokens: Tensor, kept: Tensor) -> Tensor:
    """Logits (N, V) after the tokens in `kept`, by the model's own forward, with its scaling or capping."""
    return model(input_ids=tokens, use_cache=False).logits.flatten(0, 1).index_select(0, kept)


def multiplies_plainly(model: Any) -> bool:
    """Whether logits are the output embedding's product with the last hidden states, and nothing more.

    Models with soft-capping (Gemma 2) or logit scales (Cohere, Granite) need `logits_at`. Measured once per model, with three
    tokens.
    """
    if isinstance(model, GPTForCausalLM):
        return True
    if (known := getattr(model, "multiplies_plainly", None)) is not None:
        return known
    was_training = model.training
    model.eval()
    with torch.no_grad():
        tokens = torch.tensor([[0, 1, 2]], device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        product = model.get_output_embeddings()(hidden)
    model.train(was_training)
    model.multiplies_plainly = bool(torch.allclose(product.float(), logits.float(), rtol=1e-4, atol=1e-5))
    return model.multiplies_plainly

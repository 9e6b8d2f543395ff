"""What training needs of any causal language model: hidden states of chosen tokens, and whether logits are a plain product."""

from typing import Any

from torch import Tensor

from rlhf.model.gpt import GPTModel


def hidden_at(trunk: Any, tokens: Tensor, kept: Tensor) -> Tensor:
    """Last hidden states (N, D) of the tokens that `kept` (N,) names by row * T + position, of any causal trunk.

    tokens (B, T), padded on the right if at all, where causal attention hides padding from every real token.
    """
    if isinstance(trunk, GPTModel):
        return trunk(input_ids=tokens, use_cache=False, kept=kept).last_hidden_state
    return trunk(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1).index_select(0, kept)

"""The most likely next tokens of a text that begins a document, without a chat template."""

from typing import Any

import torch

from rlhf.data.tokenizer import encode_text, separator_id
from rlhf.system.terminal import printable


def document_tokens(tokenizer: Any, text: str, context: int) -> list[int]:
    """The tokens of a text that begins a document; one longer than the context loses its beginning. Special tokens that it
    spells stay text.
    """
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    begin = tokenizer.bos_token_id if begins else separator_id(tokenizer)
    return [begin, *encode_text(tokenizer, text)][-context:]


@torch.no_grad()
def likeliest(model: Any, tokens: list[int], count: int) -> list[tuple[int, float]]:
    """The `count` most likely next tokens with their probabilities, the most likely first."""
    row = torch.tensor([tokens], device=next(model.parameters()).device)
    logits = model(row, use_cache=False).logits[0, -1]
    top = logits.float().softmax(-1).topk(min(count, len(logits)))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def show(tokenizer: Any, token: int) -> str:
    """A token as text in quotes, so that a leading space is visible; special tokens by their names."""
    if token in tokenizer.all_special_ids:
        return printable(tokenizer.convert_ids_to_tokens(token))
    return printable(repr(tokenizer.decode([token])))

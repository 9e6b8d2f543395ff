"""What a model thinks of tokens: the most likely next ones of a document, and those of a given response."""

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


@torch.no_grad()
def judge_tokens(
    policy: Any, reference: Any, prompt: list[int], response: list[int]
) -> tuple[list[float], list[float]]:
    """Per token of a response log pi(token) in nats, and KL(pi || reference) over the vocabulary at its position."""

    def logprobs(model: Any) -> torch.Tensor:
        tokens = torch.tensor([prompt + response], device=next(model.parameters()).device)
        return model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)

    logp, logp_ref = logprobs(policy), logprobs(reference)
    chosen = logp.gather(-1, torch.tensor(response, device=logp.device)[:, None])[:, 0]
    return chosen.tolist(), (logp.exp() * (logp - logp_ref)).sum(-1).clamp(min=0).tolist()


def show(tokenizer: Any, token: int) -> str:
    """A token as text in quotes, so that a leading space is visible; special tokens by their names."""
    if token in tokenizer.all_special_ids:
        return printable(tokenizer.convert_ids_to_tokens(token))
    return printable(repr(tokenizer.decode([token])))

"""Probabilities of tokens: the most likely next tokens of a document, and the log-probs of a given response."""

from typing import Any

import torch
from torch import Tensor

from rlhf.data.tokenizer import encode_text, separator_id
from rlhf.model.fused_loss import chosen_logprobs
from rlhf.model.interface import lm
from rlhf.ops.logprobs import entropy, token_logprobs
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
    [logits] = lm(model).logits(row, torch.tensor([len(tokens) - 1], device=row.device))
    top = logits.float().softmax(-1).topk(min(count, len(logits)))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def before_responses(prompt_lengths: Tensor, width: int, mask: Tensor) -> Tensor:
    """(N,) positions of the token before each response token of mask (B, A), as row * width + position."""
    device = mask.device
    position = prompt_lengths[:, None] - 1 + torch.arange(mask.shape[1], device=device)  # (B, A)
    return (position + width * torch.arange(len(mask), device=device)[:, None])[mask]


def response_logprobs(
    policy: Any,
    tokens: Tensor,
    prompt_lengths: Tensor,
    mask: Tensor,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    hidden: Tensor | None = None,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (B, A) float32 of the response tokens, 0 outside the mask, and their full-softmax entropy.

    Only response positions go through the last block's MLP and the unembedding, so no logits (B, T, V) are made. hidden: the hidden
    states (N, D) before the tokens in mask (B, A), if already computed; before: `before_responses`, likewise.
    """
    before = before_responses(prompt_lengths, tokens.shape[1], mask) if before is None else before
    chosen, model = tokens.flatten()[before + 1], lm(policy)
    if model.logits_are == "own":
        logits = model.logits(tokens, before)  # (N, V)
        logp = token_logprobs(logits, chosen)
        entropies = entropy(logits if entropy_gradient else logits.detach()) if with_entropy else None
    else:
        hidden = model.hidden(tokens, before) if hidden is None else hidden
        logp, entropies = chosen_logprobs(policy, hidden, chosen, with_entropy, entropy_gradient)
    return unpacked(logp, mask), None if entropies is None else unpacked(entropies, mask)


def unpacked(values: Tensor, mask: Tensor) -> Tensor:
    """(B, A) float32 from one value per token in mask (B, A), as (N,); 0 outside the mask."""
    return torch.zeros(mask.shape, device=mask.device, dtype=torch.float32).masked_scatter(mask, values)


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

"""The next-token loss, and the log-probs of chosen tokens and of responses, without logits of all tokens."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf.model.blocks import balance_loss
from rlhf.model.interface import lm
from rlhf.model.linear import Linear
from rlhf.ops.logprobs import entropy, token_logprobs
from rlhf.ops.unembedding import unembedded_cross_entropy, unembedded_logprobs

IGNORED = -100  # the label of tokens that do not count
CHUNK = 2**24  # elements of logits that are computed at one time by a layer that is not plain


def is_plain(head: nn.Module) -> bool:
    """Whether the layer is only a weight, and complete on this rank (ZeRO-3 divides it)."""
    known = type(head) in (nn.Linear, Linear, nn.Embedding)
    return known and getattr(head, "bias", None) is None and not hasattr(head.weight, "ds_id")


class NextToken(nn.Module):
    """-sum over labels != -100 of log P(label_{t+1} | u_{<=t}) / denominator of any causal language model, as a module that an
    engine can train; of our GPT in pretraining with the balance loss of its experts.

    In half precision the logits of a plain unembedding are not rounded.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor, denominator: float = 1.0, **inputs: Any) -> Tensor:
        """labels (B, T); inputs: input_ids (B, T), right-padded, and what else the model takes."""
        model, known = self.model, lm(self.model)
        targets, before = before_labels(labels)
        inputs["use_cache"] = False
        if known.logits_are == "own":
            logits = model(**inputs).logits.flatten(0, 1).index_select(0, before)
            return F.cross_entropy(logits.float(), targets, reduction="sum") / denominator
        experts = known.native and model.config.experts
        # The balance loss needs all tokens of a row; if nearly all are chosen, nothing is saved.
        if known.native and not experts and len(before) <= labels.numel() * 7 // 8:
            hidden = model.base_model(**inputs, kept=before).last_hidden_state
        else:
            hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1).index_select(0, before)
        head = model.get_output_embeddings()
        if known.logits_are == "product" and is_plain(head):
            loss = unembedded_cross_entropy(hidden, head.weight, targets) / denominator
        else:
            loss = -chosen_logprobs(model, hidden, targets)[0].sum() / denominator
        return loss + balance_loss(model, labels, IGNORED, denominator) if experts else loss


def before_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels (N,) of (B, T) that count, and the position of the token before each, as row * T + position."""
    after = labels[:, 1:]
    counted = after != IGNORED
    index = counted.flatten().nonzero()[:, 0]
    # rows of (B, T - 1) in (B, T)
    return after[counted], index + index.div(labels.shape[1] - 1, rounding_mode="floor")


def chosen_logprobs(
    model: Any, hidden: Tensor, tokens: Tensor, with_entropy: bool = False, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (N,) float32 of `tokens` (N,) after hidden states (N, D), and the entropies; see `unembedded_logprobs`.

    model: a causal language model whose logits are not its "own". Without a plain product logits are computed in chunks, and
    again for the backward pass.
    """
    finish: Any = lm(model).finish if lm(model).logits_are == "finished" else None
    head: Any = model.get_output_embeddings()
    if finish is None and is_plain(head):
        return unembedded_logprobs(hidden, head.weight, tokens, with_entropy, entropy_gradient)

    def measure(rows: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        logits = head(rows) if finish is None else finish(head(rows))
        logp = token_logprobs(logits, chosen)
        return (logp, entropy(logits if entropy_gradient else logits.detach())) if with_entropy else (logp,)

    logp, *entropies = in_chunks(measure, head, hidden, tokens)
    return logp, entropies[0] if with_entropy else None


def in_chunks(measure: Callable[..., tuple[Tensor, ...]], head: Any, *rows: Tensor) -> tuple[Tensor, ...]:
    """`measure` of rows (N, …), which makes logits by an unembedding: chunk by chunk, and again for the backward pass."""
    weight = getattr(head, "weight", None)
    if weight is None or hasattr(weight, "ds_id"):  # ZeRO-3 gathers it once for all rows
        return measure(*rows)
    size = max(1, CHUNK // len(weight))
    chunks = zip(*(x.split(size) for x in rows), strict=True)
    parts = [checkpoint(measure, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


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

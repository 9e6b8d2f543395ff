"""The next-token loss, the masked-token loss, and the log-probs of chosen tokens and of responses, without logits of all tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf.model.blocks import balance_loss
from rlhf.model.interface import lm
from rlhf.model.linear import Float32Linear, Linear
from rlhf.ops.logprobs import entropy, token_logprobs
from rlhf.ops.unembedding import unembedded_cross_entropy, unembedded_logprobs

IGNORED = -100  # the label of tokens that do not count
CHUNK = 2**24  # elements of logits that are computed at one time by a layer that is not plain


def is_plain(head: nn.Module) -> bool:
    """Whether the layer is only a weight, and complete on this rank (ZeRO-3 divides it)."""
    known = type(head) in (nn.Linear, Linear, nn.Embedding)
    return known and getattr(head, "bias", None) is None and not hasattr(head.weight, "ds_id")


class NextToken(nn.Module):
    """-sum over labels != -100 of log P(label_{t+1} | u_{<=t}) / denominator of any causal language model, as a module
    that an engine can train; of our GPT in pretraining with the balance loss of its experts.

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
        experts = known.native and model.config.experts
        # The balance loss needs all tokens of a row; if nearly all are chosen, nothing is saved.
        if known.logits_are == "own":
            hidden = model(**inputs).logits.flatten(0, 1).index_select(0, before)
        elif known.native and not experts and len(before) <= labels.numel() * 7 // 8:
            hidden = model.base_model(**inputs, kept=before).last_hidden_state
        else:
            hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1).index_select(0, before)
        loss = summed_nats(model, hidden, targets) / denominator
        return loss + balance_loss(model, labels, IGNORED, denominator) if experts else loss


def summed_nats(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """-sum of log P(targets (N,)); hidden: as of `chosen_logprobs`."""
    head = model.get_output_embeddings()
    if lm(model).logits_are == "product" and is_plain(head):
        return unembedded_cross_entropy(hidden, head.weight, targets)
    return -chosen_logprobs(model, hidden, targets)[0].sum()


class MaskedToken(nn.Module):
    """The losses of an encoder in pretraining, as a module that an engine can train.

    L = -sum over labels != -100 of log P(label_t | all tokens of the masked row), and logits of whether the row's
    halves belong together, if `pairs`: W h + b of its last token. Source: Devlin et al. 2018, section 3.1.
    Differs: no layer and no bias between the last hidden state and the tied unembedding; the pair is read at the last
    token, where classifiers read, not at the first one through tanh.
    """

    def __init__(self, model: Any, pairs: bool):
        super().__init__()
        self.model, self.pair_head = model, Float32Linear(model.config.width, 2) if pairs else None

    def forward(self, labels: Tensor, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """(nats () summed over the labels (B, T), logits (B, 2) or None); inputs: input_ids (B, T) and what else the model takes."""
        counted = (labels != IGNORED).flatten().nonzero()[:, 0]
        last = torch.arange(labels.shape[1] - 1, labels.numel(), labels.shape[1], device=labels.device)
        kept = counted if self.pair_head is None else torch.cat((counted, last))
        hidden = self.model.base_model(**inputs, use_cache=False, kept=kept).last_hidden_state
        nats = summed_nats(self.model, hidden[: len(counted)], labels.flatten()[counted])
        return nats, None if self.pair_head is None else self.pair_head(hidden[len(counted) :])


def mask_tokens(tokens: Tensor, ordinary: Tensor, mask: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(masked tokens, labels), both (B, T), of tokens (B, T) int64 on the CPU: 15% of the ordinary tokens are chosen,
    at least one per row; of these 80% become `mask`, 10% a random ordinary token, and 10% stay. Labels are -100
    elsewhere.

    ordinary (V,) bool: the tokens that are not special. Source: Devlin et al. 2018, section 3.1, task 1.
    """
    u = torch.rand(tokens.shape, generator=generator).masked_fill(~ordinary[tokens], 2.0)
    chosen = (u < 0.15) | (u == u.amin(1, keepdim=True))
    how = torch.rand(tokens.shape, generator=generator)
    known = ordinary.nonzero()[:, 0]
    drawn = known[torch.randint(len(known), tokens.shape, generator=generator)]
    masked = torch.where(how < 0.8, mask, torch.where(how < 0.9, drawn, tokens))
    return torch.where(chosen, masked, tokens), torch.where(chosen, tokens, IGNORED)


def pair_halves(tokens: Tensor, others: Tensor | None, end: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(rows (B, T), labels (B,)): the halves of tokens (B, T), each with `end` as its last token; label 1 if they are
    as in the text, 0 in half of the rows, whose halves change places or, with `others` (B, T), whose second half is
    that of another text.

    Source: Devlin et al. 2018, section 3.1, task 2 (next sentence); Lan et al. 2019, section 3.1 (order).
    Differs: segments are the halves of a packed block, so that no token is padding, and not of one document.
    """
    half, same = tokens.shape[1] // 2, torch.randint(2, (len(tokens),), generator=generator)
    changed = tokens.roll(half, 1) if others is None else torch.cat((tokens[:, :half], others[:, half:]), 1)
    rows = torch.where(same[:, None] == 1, tokens, changed)
    rows[:, [half - 1, -1]] = end
    return rows, same


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

    model: a causal language model; if its logits are its "own", `hidden` are they (N, V). Without a plain product
    logits are computed in chunks, and again for the backward pass.
    """
    known = lm(model)
    head: Any = None if known.logits_are == "own" else model.get_output_embeddings()
    if known.logits_are == "product" and is_plain(head):
        return unembedded_logprobs(hidden, head.weight, tokens, with_entropy, entropy_gradient)

    def measure(rows: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        logits = rows if head is None else head(rows)
        logits = known.finish(logits) if known.logits_are == "finished" else logits
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

    Only response positions go through the last block's MLP and the unembedding, so no logits (B, T, V) are made.
    hidden: the hidden states (N, D) before the tokens in mask (B, A), if already computed; before: `before_responses`,
    likewise.
    """
    before = before_responses(prompt_lengths, tokens.shape[1], mask) if before is None else before
    chosen, model = tokens.flatten()[before + 1], lm(policy)
    if model.logits_are == "own":
        hidden = model.logits(tokens, before)  # (N, V)
    elif hidden is None:
        hidden = model.hidden(tokens, before)
    logp, entropies = chosen_logprobs(policy, hidden, chosen, with_entropy, entropy_gradient)
    return unpacked(logp, mask), None if entropies is None else unpacked(entropies, mask)


def unpacked(values: Tensor, mask: Tensor) -> Tensor:
    """(B, A) float32 from one value per token in mask (B, A), as (N,); 0 outside the mask."""
    return torch.zeros(mask.shape, device=mask.device, dtype=torch.float32).masked_scatter(mask, values)

"""Log-probs and the next-token loss without logits of all tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

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


def compute_fused_loss(trunk: Any, weight: Tensor, labels: Tensor, inputs: dict[str, Any]) -> CausalLMOutputWithPast:
    """-sum over labels != -100 of log P(label_{t+1} | u_{<=t}) / N, for logits = hidden weight^T, without returning logits.

    trunk: a GPTModel, called with `inputs`; weight (V, D); labels (B, T). N is inputs["num_items_in_batch"], or the
    number of such labels. In half precision the logits are not rounded.
    """
    targets, before = before_labels(labels.to(weight.device))
    few = len(before) <= labels.numel() * 7 // 8  # if nearly all are chosen, nothing is saved
    whole = inputs.get("output_hidden_states") or trunk.config.experts  # the balance loss needs all tokens of a row
    kept = before if few and not whole else None
    output = trunk(**inputs, kept=kept)
    hidden = output.last_hidden_state
    rows = hidden if kept is not None else hidden.flatten(0, 1).index_select(0, before)
    loss = unembedded_cross_entropy(rows, weight, targets)
    count = inputs.get("num_items_in_batch")
    return CausalLMOutputWithPast(
        loss=loss / (targets.numel() if count is None else count),  # type: ignore[arg-type]
        past_key_values=output.past_key_values,
        hidden_states=output.hidden_states,
    )


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

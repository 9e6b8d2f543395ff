"""The next-token loss without logits of all tokens: only the positions with labels are computed."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from rlhf.model.linear import Linear
from rlhf.ops.unembedding import unembedded_cross_entropy

IGNORED = -100  # the label of tokens that do not count


def is_plain(head: nn.Module) -> bool:
    """Whether the layer is only a weight, and complete on this rank (ZeRO-3 divides it)."""
    return type(head) in (nn.Linear, Linear) and head.bias is None and not hasattr(head.weight, "ds_id")


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

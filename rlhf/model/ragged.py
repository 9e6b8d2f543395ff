"""The next-token loss of a batch of unequal lengths, with little padding and without logits of all tokens.

The batch and the loss do not change. Only the forward is split: rows of similar length together, each part cut to its
longest row.
"""

from typing import Any

import torch
from torch import Tensor

from rlhf.model.batching import by_length
from rlhf.model.fused_loss import IGNORED

PART_ROWS = 8  # rows per part: fewer leave the processor idle, more add padding


def ragged_loss(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    lengths: Tensor,
    count: Tensor | int | None = None,
    rows: int = PART_ROWS,
) -> Tensor:
    """loss = -sum over labels != -100 of log P(label_{t+1} | u_{<=t}) / count        count: such labels unless given

    model: our GPT, bare or wrapped. input_ids, labels (B, T) int64, padded on the right; lengths (B,) int64, tokens of each
    row. Returns the scalar loss in nats, the same as one forward over the whole batch gives.
    """
    if count is None:
        count = int((labels[:, 1:] != IGNORED).sum())
    parts = []
    for group in reversed(list(by_length(lengths.tolist(), rows))):  # longest first: later parts reuse its memory
        width = int(lengths[group].max())
        if not bool((labels[group, 1:width] != IGNORED).any()):
            continue
        part = model(
            input_ids=input_ids[group, :width],
            labels=labels[group, :width],
            use_cache=False,
            skip_logits=True,
            num_items_in_batch=count,
        )
        parts.append(part.loss)
    if not parts:  # no labels: a loss of 0 that still has a gradient
        return model(input_ids=input_ids[:1, :1], use_cache=False).logits.sum() * 0.0
    return torch.stack(parts).sum()

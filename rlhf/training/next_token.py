"""The next-token loss of any causal language model, as a module that an engine can train; for pretraining and SFT."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rlhf.model.fused_loss import before_labels, chosen_logprobs, is_plain
from rlhf.model.interface import lm
from rlhf.ops.unembedding import unembedded_cross_entropy


class NextToken(nn.Module):
    """-sum over labels != -100 of log P(label_{t+1} | u_{<=t}) / denominator, without logits of all tokens."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    @property
    def config(self) -> Any:
        return self.model.config

    def forward(self, labels: Tensor, denominator: float = 1.0, **inputs: Any) -> Tensor:
        """labels (B, T); inputs: input_ids (B, T), right-padded, and what else the model takes."""
        inputs["use_cache"] = False
        if lm(self.model).native:
            inputs |= {"labels": labels, "skip_logits": True, "num_items_in_batch": denominator}
            return self.model(**inputs).loss
        targets, before = before_labels(labels)
        logits_are = lm(self.model).logits_are
        if logits_are == "own":
            logits = self.model(**inputs).logits.flatten(0, 1).index_select(0, before)
            return F.cross_entropy(logits.float(), targets, reduction="sum") / denominator
        hidden = self.model.base_model(**inputs).last_hidden_state.flatten(0, 1).index_select(0, before)
        head = self.model.get_output_embeddings()
        if logits_are == "product" and is_plain(head):
            return unembedded_cross_entropy(hidden, head.weight, targets) / denominator
        return -chosen_logprobs(self.model, hidden, targets)[0].sum() / denominator

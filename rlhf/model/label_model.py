"""A causal language model with a linear layer on the extract token, and the transfer of pretrained blocks to it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf.errors import UserError
from rlhf.model.checkpoint import LAYER
from rlhf.model.interface import lm
from rlhf.model.linear import Float32Linear
from rlhf.ops.logprobs import mean_nats
from rlhf.system.files import read_json, write_json

HEAD, RECORD = "label_head.safetensors", "label_head.json"  # next to the language model in its folder


class LabelModel(nn.Module):
    """P(y | x) = softmax(h W_y), with h the last hidden state of the extract token.

    With several rows per example (similarity) h is their sum; with `choices` each row has one score, and the softmax is over
    an example's rows. Source: Radford et al. 2018, equations 3 to 5 and section 3.3.
    """

    def __init__(self, lm: Any, classes: list[str], choices: bool, dropout: float = 0.0):
        super().__init__()
        self.lm, self.classes, self.choices = lm, classes, choices
        self.dropout = nn.Dropout(dropout)
        self.head = Float32Linear(lm.config.hidden_size, 1 if choices else len(classes), bias=False)
        nn.init.normal_(self.head.weight, 0.0, getattr(lm.config, "initializer_range", None) or 0.02)

    def forward(self, tokens: Tensor, lengths: Tensor, examples: int, with_lm: bool = False) -> tuple[Tensor, Tensor]:
        """Logits (N, C) float32 of N = `examples` with R / N rows each, and L1 (N,), which is 0 without `with_lm`.

        tokens (R, T) right-padded, lengths (R,). L1 is the mean over an example's rows of `mean_nats`.
        """
        last = torch.arange(len(tokens), device=tokens.device) * tokens.shape[1] + lengths - 1
        if with_lm:
            hidden = self.lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            plain = lm(self.lm).plain
            logits = self.lm.get_output_embeddings()(hidden) if plain else self.lm(tokens, use_cache=False).logits
            nats = mean_nats(logits, tokens, lengths).view(examples, -1).mean(1)
            hidden = hidden.flatten(0, 1)[last]
        else:
            hidden, nats = lm(self.lm).hidden(tokens, last), torch.zeros(examples, device=tokens.device)
        rows = hidden.view(examples, -1, hidden.shape[-1])  # (N, rows, D)
        scores = self.head(self.dropout(rows)).squeeze(-1) if self.choices else self.head(self.dropout(rows.sum(1)))
        return scores, nats

    def save_head(self, folder: Path) -> None:
        save_file({"weight": self.head.weight.detach().float().cpu().contiguous()}, str(folder / HEAD))
        write_json(folder / RECORD, {"classes": self.classes, "choices": self.choices})

    @classmethod
    def with_head(cls, lm: Any, folder: Path) -> "LabelModel":
        """A language model with the head that `save_head` wrote."""
        record = read_json(folder / RECORD)
        model = cls(lm, record["classes"], record["choices"])
        model.head.weight.data.copy_(load_file(str(folder / HEAD))["weight"])
        return model.eval()


@torch.no_grad()
def transfer(model: Any, layers: int | None, nothing: bool = False) -> Any:
    """The model with only its embeddings and first `layers` blocks; the rest is freshly initialised. None: all of it.

    nothing: transfer nothing, not even the embeddings. Raises: UserError for more layers than there are.
    """
    if layers is None and not nothing:
        return model
    there = model.config.num_hidden_layers
    if layers is not None and layers > there:
        raise UserError(f"classify.layers={layers}: the base has {there}: want at most {there}")
    fresh = type(model)._from_config(model.config).float()
    if layers is None:
        return fresh.eval()
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    embeddings |= {id(p) for p in model.get_output_embeddings().parameters()}
    for (name, old), new in zip(model.named_parameters(), fresh.parameters(), strict=True):
        numbered = LAYER.search(name)
        kept = int(numbered[0].strip(".")) < layers if numbered else id(old) in embeddings or layers == there
        if kept:
            new.copy_(old)
    return fresh.eval()

"""An LSTM language model of a Transformer's size, for the study of transfer (Radford et al. 2018, section 5).

With plugins=scripts/studies/lstm.py:register every command of rlhf treats it as any other causal model of transformers.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class LSTMConfig(PreTrainedConfig):
    """`sized` makes one with about a given number of parameters."""

    model_type = "study_lstm"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width", "num_hidden_layers": "n_layer", "max_position_embeddings": "context_length",
    }  # fmt: skip

    vocab_size: int = 50257
    context_length: int = 512
    n_layer: int = 1
    width: int = 2048
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    @classmethod
    def sized(cls, parameters: int, **fields: Any) -> "LSTMConfig":
        """V w + 8 w^2 + 8 w = parameters: one layer, as in the paper, and tied embeddings."""
        b = fields["vocab_size"] + 8
        return cls(width=round((math.sqrt(b * b + 32 * parameters) - b) / 16), **fields)


class LSTMPreTrainedModel(PreTrainedModel):
    config_class = LSTMConfig
    base_model_prefix = "model"

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the embeddings; torch's LSTM initialises itself."""
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, 0.0, self.config.initializer_range)


class LSTMModel(LSTMPreTrainedModel):
    def __init__(self, config: LSTMConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.lstm = nn.LSTM(config.width, config.width, config.n_layer, batch_first=True)
        self.post_init()

    def forward(self, input_ids: Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        """Rows are padded on the right, so that padding changes no real token."""
        return BaseModelOutputWithPast(last_hidden_state=self.lstm(self.embed_tokens(input_ids))[0])


class LSTMForCausalLM(LSTMPreTrainedModel):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LSTMConfig):
        super().__init__(config)
        self.model = LSTMModel(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> CausalLMOutputWithPast:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def register() -> None:
    """Make the LSTM known to transformers' Auto classes."""
    AutoConfig.register(LSTMConfig.model_type, LSTMConfig, exist_ok=True)
    AutoModel.register(LSTMConfig, LSTMModel, exist_ok=True)
    AutoModelForCausalLM.register(LSTMConfig, LSTMForCausalLM, exist_ok=True)


def write_beside(base: Path, folder: Path, seed: int) -> Path:
    """Write a random LSTM with the size and tokenizer of a run's base model, to be adopted; returns the folder."""
    import rlhf

    loaded = rlhf.load(base)
    transformer, tokenizer = loaded.policy("pretrain"), loaded.tokenizer
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    size = {"vocab_size": len(tokenizer), "context_length": tokenizer.model_max_length}
    spread, parameters = transformer.config.initializer_range, sum(p.numel() for p in transformer.parameters())
    config = LSTMConfig.sized(parameters, initializer_range=spread, **size, **ends)
    torch.manual_seed(seed)
    LSTMForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

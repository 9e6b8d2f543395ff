"""The GPT: trunk and causal language model, as transformers models.

One model assembled from configuration: h_0 = W_e[u] (+ W_p[position]); h_l = block(h_{l-1}); P(u) =
softmax(norm(h_n) W_e^T). Its parts: attention.py, blocks.py.
Source: Radford et al. 2018, equation 2, and 2019, section 2.3 (pre-norm, scaled init); Zhang and Sennrich 2019
(RMSNorm).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from rlhf.model.attention import (
    QKNorm,
    Rope,
    Sinusoids,
    as_bias,
    make_attention_mask,
    make_positions,
    narrow,
    rotary_factors,
    select,
)
from rlhf.model.batching import join_rows
from rlhf.model.blocks import BLOCKS, balance_loss, make_norm
from rlhf.model.fused_loss import IGNORED
from rlhf.model.gpt_config import GPTConfig
from rlhf.model.linear import Linear, ResidualLinear


class GPTPreTrainedModel(PreTrainedModel):
    config_class = GPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = [kind.__name__ for kind in BLOCKS.values()]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    native, logits_are = True, "product"  # see rlhf/model/interface.py

    @property
    def context(self) -> int:
        return self.config.context_length

    def hidden(self, tokens: Tensor, kept: Tensor) -> Tensor:
        return self._read(tokens, kept)[0].last_hidden_state

    def layers_at(self, tokens: Tensor, kept: Tensor) -> Tensor:
        output, at = self._read(tokens, kept, output_hidden_states=True)
        return torch.stack([*(select(x, at) for x in output.hidden_states[:-1]), output.last_hidden_state])

    def _read(self, tokens: Tensor, kept: Tensor, **more: Any) -> tuple[Any, Tensor]:
        """The trunk's output, and the places of `kept` in its rows, which are joined on a CPU if that saves time. On a
        GPU joining would wait for the tokens, and its mask rules out flash attention.
        """
        trunk: Any = self.base_model
        # a window counts distances within the row
        joins = self.config.window is None and self.config.causal
        if joins and len(tokens) > 1 and len(kept) and not tokens.is_cuda:
            rows, positions = kept // tokens.shape[1], kept % tokens.shape[1]
            if (joined := join_rows(tokens, rows, positions, self.config.width)) is not None:
                given = {"attention_mask": joined.mask, "position_ids": joined.positions}
                at = joined.places(rows, positions)
                return trunk(input_ids=joined.tokens, use_cache=False, kept=at, **given, **more), at
        return trunk(input_ids=tokens, use_cache=False, kept=kept, **more), kept

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range); where norms precede the sums, projections that write to the residual stream are
        scaled by 1/sqrt(2 n_layer) (Radford et al. 2019, section 2.3; not Radford et al. 2018).
        """
        if isinstance(module, nn.Linear | nn.Embedding):
            scaled = isinstance(module, ResidualLinear) and self.config.block != "post"
            depth = 2 * self.config.n_layer if scaled else 1
            nn.init.normal_(module.weight, 0.0, self.config.initializer_range / math.sqrt(depth))
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm | QKNorm):
            nn.init.ones_(module.weight)
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            nn.init.zeros_(bias)


class GPTModel(GPTPreTrainedModel):
    """The trunk: token ids to hidden states after the last norm."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.embed_positions: nn.Module | None = None
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.context_length, config.width)
        elif config.positions == "sinusoidal":
            self.embed_positions = Sinusoids(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers: Any = nn.ModuleList(BLOCKS[config.block](config, layer) for layer in range(config.n_layer))
        self.norm = nn.Identity() if config.block == "post" else make_norm(config)
        # as in BERT's released code; not in Vaswani et al. 2017 or Radford et al. 2018
        normed = config.block == "post" and not config.causal
        self.embed_norm = make_norm(config) if normed else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def embed(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Rope | None]:
        """First hidden state, and rotary factors if any, of embeddings x (B, T, D) at positions (…, T)."""
        rope = rotary_factors(positions, self.config, x.dtype) if self.embed_positions is None else None
        return self.dropout(self.embed_norm(self.place(x, positions))), rope

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embeddings x (…, D) plus those of their positions (…), if any; sinusoids are added to sqrt(D) x (Vaswani et al. 2017, 3.4)."""
        if self.embed_positions is None:
            return x
        if isinstance(self.embed_positions, Sinusoids):
            x = x * math.sqrt(self.config.width)
        return x + self.embed_positions(positions).to(x.dtype)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        kept: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states (B, T, D) of token ids (B, T), or (N, D) of the tokens in `kept`.

        kept (N,) int64: row * T + position of each token whose last hidden state is needed; for the others the last
        block computes only keys and values. attention_mask (B, past + T), 1 = real token, padding on either side;
        without position_ids, positions count the real tokens. Where position_ids restart within a row (0, or lower than
        before), a new example begins, which does not see the earlier ones. Right padding needs no mask, since no real
        token comes after it; an encoder takes pad tokens as padding unless one of the two is given.
        """
        causal, pad = self.config.causal, self.config.pad_token_id
        if not causal and attention_mask is None and position_ids is None and input_ids is not None and pad is not None:
            attention_mask = input_ids != pad
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:  # in training a cache would only copy keys and values
            use_cache = self.config.use_cache and causal and not self.training
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=self.config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        mask = make_attention_mask(x, attention_mask, position_ids, past_key_values, past, causal)
        window = self.config.window
        banded = None if window is None else as_bias(narrow(mask, window, x.shape[1], past, x.device), x)
        mask = as_bias(mask, x)
        x, rope = self.embed(x, make_positions(x, attention_mask, position_ids, past))

        earlier: tuple[Tensor, ...] = ()
        for layer in self.layers:
            if output_hidden_states:
                earlier += (x,)
            layer_mask = mask if layer.attention.window is None else banded
            last_kept = kept if layer is self.layers[-1] else None
            x = layer(x, rope, layer_mask, past_key_values=past_key_values, kept=last_kept)
        x = self.norm(x)
        states = (*earlier, x) if output_hidden_states else None  # transformers' convention: the last one is normed
        return BaseModelOutputWithPast(x, past_key_values if use_cache else None, states)


class GPTForCausalLM(GPTPreTrainedModel, GenerationMixin):
    """The trunk with its unembedding, tied to the token embeddings unless `tie_word_embeddings` is False."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.model = GPTModel(config)
        self.lm_head = Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V), or of the last `logits_to_keep` positions; the loss if labels (B, T) are given.

        loss = -sum over labels != -100 of log P(label_{t+1} | u_{<=t}) / N, with N = num_items_in_batch if the
        Trainer passes it, else the number of such labels. `NextToken` computes it without logits. The other arguments
        are `GPTModel.forward`'s.
        """
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep  # 0: all
        logits = self.lm_head(output.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            loss = loss + balance_loss(self, labels, IGNORED, kwargs.get("num_items_in_batch"))
        return CausalLMOutputWithPast(loss, logits, output.past_key_values, output.hidden_states)

    def logits(self, tokens: Tensor, kept: Tensor) -> Tensor:
        return self.lm_head(self.hidden(tokens, kept))


class GPTForSequenceClassification(GenericForSequenceClassification, GPTPreTrainedModel):
    """The trunk with a linear layer on the state of the last token that is not the pad token."""

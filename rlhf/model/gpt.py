"""The GPT, from scratch: configuration, trunk and causal language model, as transformers models.

One model assembled from configuration: h_0 = W_e[u] (+ W_p[position]); h_l = block(h_{l-1}); P(u) =
softmax(norm(h_n) W_e^T).
Source: Radford et al. 2018 (post-norm) and 2019 (pre-norm, scaled init), Su et al. 2021 (rotary), Shazeer 2020
(SwiGLU), Zhang and Sennrich 2019 (RMSNorm), Ainslie et al. 2023 (grouped queries), Black et al. 2022 (parallel).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from rlhf.model.fused_loss import compute_fused_loss, is_plain
from rlhf.model.gpt_config import GPTConfig
from rlhf.model.linear import Linear, ResidualLinear
from rlhf.model.masks import Documents, make_attention_mask, make_positions

Rope = tuple[Tensor, Tensor]
Mask = Tensor | Documents


def _make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


def rotary_factors(positions: Tensor, config: Any, dtype: torch.dtype) -> Rope:
    """cos and signed sin of position / theta^(2i/R), each (…, 1, head_dim) for positions (…); made in float32.

    R = rotary_share head_dim channels of a head turn; the others have angle 0. The sine's first half is negated,
    so that `rotate` is x cos + roll(x) sin.
    """
    turning = int(config.head_dim * config.rotary_share)
    half = torch.arange(0, turning, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / config.rope_theta ** (half / turning)
    if turning < config.head_dim:
        frequencies = F.pad(frequencies, (0, (config.head_dim - turning) // 2))
    angles = positions[..., None].float() * frequencies  # (…, head_dim/2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1).unsqueeze(-2), torch.cat((-sin, sin), -1).unsqueeze(-2)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn each pair (x_i, x_{i + head_dim/2}) of x (…, heads, head_dim) by its position's angle."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class QKNorm(nn.Module):
    """RMS norm over each head of the queries and keys, one learned scale for queries and one for keys."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.n_kv_head, self.eps = config.n_head, config.n_kv_head, config.norm_eps
        self.weight = nn.Parameter(torch.ones(2, config.head_dim))

    def forward(self, qk: Tensor) -> Tensor:
        q, k = self.weight[:1].expand(self.n_head, -1), self.weight[1:].expand(self.n_kv_head, -1)
        return F.rms_norm(qk, qk.shape[-1:], eps=self.eps) * torch.cat((q, k))


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.dropout = layer, config.dropout
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim = config.head_dim
        qkv_width = (self.n_head + 2 * self.n_kv_head) * self.head_dim
        self.qkv = Linear(config.width, qkv_width, bias=config.qkv_bias)
        self.out = ResidualLinear(self.n_head * self.head_dim, config.width, bias=config.bias)
        self.qk_norm = QKNorm(config) if config.qk_norm else None

    def project(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, H, D/H), k and v (B, T, KV, D/H) of x (B, T, D), turned to their positions."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2 KV, D/H)
        if self.qk_norm is None and rope is None:  # in one split, whose gradients are put together once
            q, k, v = qkv.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=-2)
            return q, k, v
        qk, v = qkv.split((self.n_head + self.n_kv_head, self.n_kv_head), dim=-2)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if rope is not None:
            qk = rotate(qk, rope)
        q, k = qk.split((self.n_head, self.n_kv_head), dim=-2)
        return q, k, v

    def forward(
        self, x: Tensor, rope: Rope | None, mask: Mask | None, cache: Cache | None, kept: Tensor | None = None
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.project(x, rope))  # (B, H or KV, T, D/H)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if isinstance(mask, Documents):
            y = mask.attend(q, k, v)
        else:
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None and q.shape[2] > 1,
                dropout_p=self.dropout if self.training else 0.0,
                enable_gqa=self.n_kv_head != self.n_head,
            )
        return self.out(_select(y.transpose(1, 2).flatten(2), kept))  # (B, T, D) or (N, D)


class MLP(nn.Module):
    """gelu: down(gelu(up x)); swiglu: down(silu(gate x) * up x), gate and up in one matrix."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.swiglu = config.mlp == "swiglu"
        self.approximate = "none" if config.mlp == "gelu_erf" else "tanh"
        self.up = Linear(config.width, config.mlp_width * (2 if self.swiglu else 1), bias=config.bias)
        self.down = ResidualLinear(config.mlp_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.swiglu:
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(GradientCheckpointingLayer):
    """Pre-norm (GPT-2, Llama): x + attention(norm_1 x) = y; y + mlp(norm_2 y)."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.norm_1, self.attention = _make_norm(config), Attention(config, layer)
        self.norm_2, self.mlp = _make_norm(config), MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rope: Rope | None = None,
        mask: Mask | None = None,
        past_key_values: Cache | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        attended = self.attention(self.before_attention(x), rope, mask, past_key_values, kept)
        return self.after_attention(_select(x, kept), attended)

    def before_attention(self, x: Tensor) -> Tensor:
        """What the attention reads of the residual stream x."""
        return self.norm_1(x)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output, of the residual stream x and what the attention gave."""
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.norm_2(x)))


class PostNormBlock(Block):
    """The first GPT's: norm_1(x + attention x) = y; norm_2(y + mlp y). No norm follows the last block."""

    def before_attention(self, x: Tensor) -> Tensor:
        return x

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.norm_1(x + self.dropout(attended))
        return self.norm_2(x + self.dropout(self.mlp(x)))


class ParallelBlock(Block):
    """GPT-NeoX's: x + attention(norm_1 x) + mlp(norm_2 x)."""

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        return x + self.dropout(attended) + self.dropout(self.mlp(self.norm_2(x)))


BLOCKS = {"pre": Block, "post": PostNormBlock, "parallel": ParallelBlock}


def _select(x: Tensor, kept: Tensor | None) -> Tensor:
    """The tokens (N, D) of x (B, T, D) that `kept` (N,) names by row * T + position; all of x without it."""
    return x if kept is None else x.flatten(0, 1).index_select(0, kept)


class GPTPreTrainedModel(PreTrainedModel):
    config_class = GPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block", "PostNormBlock", "ParallelBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range); what writes to the residual stream, scaled by 1/sqrt(2 n_layer)."""
        if isinstance(module, nn.Linear | nn.Embedding):
            depth = 2 * self.config.n_layer if isinstance(module, ResidualLinear) else 1
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
        self.embed_positions = (
            nn.Embedding(config.context_length, config.width) if config.positions == "learned" else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(BLOCKS[config.block](config, layer) for layer in range(config.n_layer))
        self.norm = nn.Identity() if config.block == "post" else _make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value  # type: ignore[assignment]

    def embed(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Rope | None]:
        """First hidden state, and rotary factors if any, of embeddings x (B, T, D) at positions (…, T)."""
        if self.embed_positions is not None:
            return self.dropout(x + self.embed_positions(positions)), None
        return self.dropout(x), rotary_factors(positions, self.config, x.dtype)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        seq_idx: Tensor | None = None,
        kept: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states (B, T, D) of token ids (B, T), or (N, D) of those tokens alone that `kept` names.

        kept (N,) int64: row * T + position of each token whose last hidden state is wanted. The last block then
        computes for the others what these attend to, their keys and values, and nothing else.

        attention_mask (B, past + T), 1 = real token, padding on either side; without position_ids, positions
        count the real tokens. Where position_ids restart within a row (0, or lower than before), or seq_idx
        (B, T) changes, a new example begins, which does not see the earlier ones. Without mask and restarts,
        attention runs the causal kernel and no mask exists: right padding needs none, since no real token
        comes after it.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("GPTModel.forward: give exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:  # a cache in training would only copy keys and values
            use_cache = self.config.use_cache and not self.training
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=self.config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        varlen = self.config.head_dim % 8 == 0 and not (
            self.training and self.config.dropout
        )  # that kernel has no dropout
        mask = make_attention_mask(x, attention_mask, position_ids, seq_idx, past_key_values, past, varlen)
        x, rope = self.embed(x, make_positions(x, attention_mask, position_ids, past))

        hidden_states = [x] if output_hidden_states else None
        for layer in self.layers:
            chosen = kept if layer is self.layers[-1] else None
            x = layer(x, rope, mask, past_key_values=past_key_values, kept=chosen)
            if hidden_states is not None:
                hidden_states.append(x)
        x = self.norm(x)
        if hidden_states is not None:
            hidden_states[-1] = x  # transformers' convention: the last one is normed
        output = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=None if hidden_states is None else tuple(hidden_states),
        )
        return output.to_tuple() if return_dict is False else output


class GPTForCausalLM(GPTPreTrainedModel, GenerationMixin):
    """The trunk with its unembedding, tied to the token embeddings unless `tie_word_embeddings` is False."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.model = GPTModel(config)
        self.lm_head = Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits (B, T, V), or of the last `logits_to_keep` positions; the loss if labels (B, T) are given.

        loss = -sum over labels != -100 of log P(label_{t+1} | u_{<=t}) / N, with N = num_items_in_batch where
        the Trainer passes it and the number of such labels otherwise. skip_logits: with labels, the same loss
        without logits (B, T, V) anywhere; there are none in the output then (and in half precision the loss is
        that of logits that are not rounded). The other arguments are `GPTModel.forward`'s.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            "output_hidden_states": output_hidden_states,
            **kwargs,
        }
        if skip_logits and labels is not None and is_plain(self.lm_head):
            bare = compute_fused_loss(self.model, self.lm_head.weight, labels, inputs)
            return bare.to_tuple() if return_dict is False else bare
        output = self.model(**inputs)
        hidden = output.last_hidden_state
        if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden = hidden[:, keep]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            vocab_size = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )
        return result.to_tuple() if return_dict is False else result

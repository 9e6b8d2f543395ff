"""The GPT, from scratch: configuration, trunk and causal language model, as transformers models.

One model assembled from configuration: h_0 = W_e[u] (+ W_p[position]); h_l = block(h_{l-1}); P(u) =
softmax(norm(h_n) W_e^T). Not here: sampling (`generate`), scalar heads (`heads`), other models' weights
(`convert`). The file imports torch and transformers only, so that an exported model can carry it and load
without this package.
Source: Radford et al. 2018 and 2019 (the block, pre-norm, scaled init), Su et al. 2021 (rotary), Shazeer 2020
(SwiGLU), Zhang and Sennrich 2019 (RMSNorm), Ainslie et al. 2023 (grouped queries).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

_GPT2 = {"vocab_size": 50257, "context_length": 1024}
NAMED_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1024,
        "context_length": 128,
        "n_layer": 4,
        "n_head": 4,
        "width": 128,
        "positions": "rotary",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "bias": False,
        "norm_eps": 1e-6,
    },
    "gpt2": {**_GPT2, "n_layer": 12, "n_head": 12, "width": 768},
    "gpt2-medium": {**_GPT2, "n_layer": 24, "n_head": 16, "width": 1024},
    "gpt2-large": {**_GPT2, "n_layer": 36, "n_head": 20, "width": 1280},
    "gpt2-xl": {**_GPT2, "n_layer": 48, "n_head": 25, "width": 1600},
}


class GPTConfig(PreTrainedConfig):
    """Shape and kind of a GPT; the defaults are GPT-2 small.

    `n_kv_head` None means `n_head`; `mlp_width` None means 4 width for gelu and 8/3 width, rounded up to a
    multiple of 16, for swiglu. `qk_norm` puts an RMS norm on each query and key head (such a model has no
    Llama form).

    Raises: ValueError when widths, heads and kinds do not fit together; every problem is in the one message.
    """

    model_type = "rlhf_gpt"
    # without annotations, which would make these fields of the configuration
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "intermediate_size": "mlp_width",
        "max_position_embeddings": "context_length",
    }

    vocab_size: int = 50257
    context_length: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = None  # type: ignore[assignment]
    width: int = 768
    mlp_width: int = None  # type: ignore[assignment]
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    qk_norm: bool = False
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.mlp_width is None:
            self.mlp_width = 4 * self.width if self.mlp == "gelu" else -(-8 * self.width // 48) * 16
        self._check_shape()
        super().__post_init__(**kwargs)

    def _check_shape(self) -> None:
        kinds = {"positions": ("learned", "rotary"), "norm": ("layernorm", "rmsnorm"), "mlp": ("gelu", "swiglu")}
        problems = [
            f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}"
            for name, known in kinds.items()
            if getattr(self, name) not in known
        ]
        if self.width % self.n_head:
            problems.append(f"width={self.width} must be a multiple of n_head={self.n_head}")
        elif self.positions == "rotary" and self.width // self.n_head % 2:
            problems.append(f"rotary positions need an even width/n_head, not {self.width // self.n_head}")
        if self.n_head % self.n_kv_head:
            problems.append(f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout={self.dropout} must be in [0, 1)")
        if problems:
            raise ValueError("GPTConfig: " + "; ".join(problems))

    @classmethod
    def named(cls, name: str, **overrides: Any) -> GPTConfig:
        """The configuration of a size in `NAMED_SIZES`, with fields replaced by `overrides`."""
        if name not in NAMED_SIZES:
            raise ValueError(f"model size {name!r} is unknown: choose one of {', '.join(NAMED_SIZES)}")
        return cls(**{**NAMED_SIZES[name], **overrides})


Rope = tuple[Tensor, Tensor]


def _make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


def rotary_factors(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """cos and signed sin of position / theta^(2i/head_dim), each (…, 1, head_dim) for positions (…); made in
    float32.

    The sine's first half is negated, so that `rotate` is x cos + roll(x) sin.
    """
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * (1.0 / theta ** (half / head_dim))  # (…, head_dim/2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1).unsqueeze(-2), torch.cat((-sin, sin), -1).unsqueeze(-2)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn each pair (x_i, x_{i + head_dim/2}) of x (…, heads, head_dim) by its position's angle."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class ResidualLinear(nn.Linear):
    """A projection that writes to the residual stream; its initialisation is scaled down by depth."""


class QKNorm(nn.Module):
    """RMS norm over each head of the queries and keys, one learned scale for queries and one for keys."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.n_kv_head, self.eps = config.n_head, config.n_kv_head, config.norm_eps
        self.weight = nn.Parameter(torch.ones(2, config.width // config.n_head))

    def forward(self, qk: Tensor) -> Tensor:
        q, k = self.weight[:1].expand(self.n_head, -1), self.weight[1:].expand(self.n_kv_head, -1)
        return F.rms_norm(qk, qk.shape[-1:], eps=self.eps) * torch.cat((q, k))


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.dropout = layer, config.dropout
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim = config.width // config.n_head
        qkv_width = (self.n_head + 2 * self.n_kv_head) * self.head_dim
        self.qkv = nn.Linear(config.width, qkv_width, bias=config.bias)
        self.out = ResidualLinear(config.width, config.width, bias=config.bias)
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
        self, x: Tensor, rope: Rope | None, mask: Tensor | None, cache: Cache | None, kept: Tensor | None = None
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.project(x, rope))  # (B, H or KV, T, D/H)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
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
    """gelu: down(gelu(up x)), tanh form; swiglu: down(silu(gate x) * up x), gate and up in one matrix."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.swiglu = config.mlp == "swiglu"
        self.up = nn.Linear(config.width, config.mlp_width * (2 if self.swiglu else 1), bias=config.bias)
        self.down = ResidualLinear(config.mlp_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.swiglu:
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(GradientCheckpointingLayer):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.norm_1, self.attention = _make_norm(config), Attention(config, layer)
        self.norm_2, self.mlp = _make_norm(config), MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rope: Rope | None = None,
        mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        attended = self.attention(self.norm_1(x), rope, mask, past_key_values, kept)
        x = _select(x, kept) + self.dropout(attended)
        return x + self.dropout(self.mlp(self.norm_2(x)))


def _select(x: Tensor, kept: Tensor | None) -> Tensor:
    """The tokens (N, D) of x (B, T, D) that `kept` (N,) names by row * T + position; all of x without it."""
    return x if kept is None else x.flatten(0, 1).index_select(0, kept)


class GPTPreTrainedModel(PreTrainedModel):
    config_class = GPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012
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
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = _make_norm(config)
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
        head_dim = self.config.width // self.config.n_head
        return self.dropout(x), rotary_factors(positions, head_dim, self.config.rope_theta, x.dtype)

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
        mask = self._attention_mask(x, attention_mask, position_ids, seq_idx, past_key_values, past)
        x, rope = self.embed(x, self._positions(x, attention_mask, position_ids, past))

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

    @staticmethod
    def _positions(x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, past: int) -> Tensor:
        if position_ids is not None:
            return position_ids
        if attention_mask is not None and attention_mask.dim() == 2:
            counted = attention_mask.long().cumsum(-1) - 1  # (B, past + T)
            return counted[:, past : past + x.shape[1]].clamp(min=0)
        return torch.arange(past, past + x.shape[1], device=x.device)[None]

    @staticmethod
    def _attention_mask(
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        seq_idx: Tensor | None,
        cache: Cache | None,
        past: int,
    ) -> Tensor | None:
        """Bool mask (B or 1, 1, T, keys), True = may attend; None where the plain causal kernel does."""
        if attention_mask is not None and attention_mask.dim() == 4:
            return attention_mask
        length = x.shape[1]
        keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
        fresh = keys == length  # a first call, so that keys are queries
        can_look = not torch.compiler.is_compiling()  # reading a tensor's value would break the graph
        if attention_mask is not None and can_look and _is_harmless(attention_mask, fresh):
            attention_mask = None
        segments = _segments(position_ids, seq_idx, can_look) if fresh and length > 1 else None
        if attention_mask is None and segments is None and keys == past + length and (fresh or length == 1):
            return None
        query = torch.arange(length, device=x.device)[:, None] + past  # (T, 1)
        key = torch.arange(keys, device=x.device)
        mask = (key <= query)[None]  # (1, T, keys)
        if segments is not None:
            mask = mask & (segments[:, :, None] == segments[:, None, :])
        if attention_mask is not None:
            real = F.pad(attention_mask.bool(), (0, max(0, keys - attention_mask.shape[1])))[:, None, :keys]
            mask = mask & (real | (key == query))  # a pad sees itself: a row without any key has no softmax
        return mask[:, None]


def _is_harmless(attention_mask: Tensor, fresh: bool) -> bool:
    """Whether causality alone hides all padding: there is none, or it is on the right of a first call."""
    if fresh:
        return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())
    return bool(attention_mask.all())


def _segments(position_ids: Tensor | None, seq_idx: Tensor | None, can_look: bool) -> Tensor | None:
    """Number of the example (B or 1, T) each token belongs to; None where every row holds one example."""
    if seq_idx is not None:
        return seq_idx
    if position_ids is None:
        return None
    starts = position_ids[:, 1:] < position_ids[:, :-1]
    starts = starts | (position_ids[:, 1:] == 0)
    if can_look and not bool(starts.any()):
        return None
    return F.pad(starts.long().cumsum(-1), (1, 0))


def unembedding_factor(weight: Tensor) -> Tensor:
    """The weight as `unembed` takes it: of half precision on a GPU alone, where such a product can sum in float32."""
    return weight if weight.dtype.itemsize >= 4 or weight.device.type == "cuda" else weight.float()


def unembed(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits (N, V) float32 = hidden weight^T of hidden (N, D) and an `unembedding_factor` (V, D).

    Of bfloat16 factors too the sums are not rounded to bfloat16, in which a logit near 100 is off by up to 0.25 nats.
    No gradient.
    """
    if weight.dtype.itemsize < 4:  # on a GPU: see `unembedding_factor`
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return (hidden.to(weight.dtype) @ weight.t()).float()


class _LinearCrossEntropy(torch.autograd.Function):
    """sum over rows of -log softmax(hidden weight^T)[label], without logits of all rows at once.

    A chunk of rows at a time: its logits become its probabilities and then its gradient while they are in the
    processor's cache; only the gradients of hidden (N, D) and weight (V, D) outlive the chunk. So forward does
    backward's work, and what is (N, V) is never made, read or kept.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        kind = torch.get_autocast_dtype(hidden.device.type) if in_autocast(hidden) else hidden.dtype
        h, w = hidden.to(kind), weight.to(kind)
        factor, rows = unembedding_factor(w), _rows_at_a_time(w)
        loss = torch.zeros((), dtype=torch.float32, device=h.device)
        d_hidden = torch.empty_like(h) if needs_hidden else None
        d_weight = torch.zeros_like(weight) if needs_weight else None
        with torch.autocast(h.device.type, enabled=False):
            for start in range(0, len(h), rows):
                part, own = h[start : start + rows], labels[start : start + rows, None]
                logits = unembed(part, factor)  # (rows, V)
                top = logits.amax(-1, keepdim=True)
                chosen = logits.gather(-1, own)
                gradient = torch.softmax(logits, -1)
                # the likeliest token's probability gives the sum that divides: never 0, unlike the label's
                loss += (top - gradient.amax(-1, keepdim=True).log() - chosen).sum()
                if kind.itemsize < 4:  # p - one-hot; a softmax over thousands of tokens knows 1 - p = 1e-4 to percents
                    gradient.scatter_(-1, own, 0.0)
                    gradient.scatter_(-1, own, -gradient.sum(-1, keepdim=True))
                else:
                    gradient.scatter_add_(-1, own, gradient.new_full((), -1.0).expand_as(own))
                gradient = gradient.to(kind)
                if d_hidden is not None:
                    torch.mm(gradient, w, out=d_hidden[start : start + rows])
                if d_weight is not None and kind == weight.dtype:
                    d_weight.addmm_(gradient.t(), part)
                elif d_weight is not None:  # chunks add up in the weight's own precision
                    d_weight += gradient.t() @ part
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.kind = hidden.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        d_hidden, d_weight = ctx.saved_tensors
        return (
            None if d_hidden is None else (d_hidden * d_loss).to(ctx.kind),
            None if d_weight is None else d_weight * d_loss,
            None,
        )


def in_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def _rows_at_a_time(weight: Tensor) -> int:
    """Rows whose logits stay in a CPU's cache; on a GPU, enough to fill it."""
    return max(64, (2**20 if weight.device.type == "cpu" else 2**27) // len(weight))


def _before_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels (N,) of (B, T) that count, and where the token before each stands: row * T + position."""
    after = labels[:, 1:]
    counted = after != -100
    index = counted.flatten().nonzero()[:, 0]
    # rows of (B, T - 1) in (B, T)
    return after[counted], index + index.div(labels.shape[1] - 1, rounding_mode="floor")


def hidden_at(trunk: Any, tokens: Tensor, kept: Tensor) -> Tensor:
    """Last hidden states (N, D) of the tokens that `kept` (N,) names by row * T + position, of any causal trunk.

    tokens (B, T), padded on the right if at all, where causal attention hides padding from every real token.
    """
    if isinstance(trunk, GPTModel):
        return trunk(input_ids=tokens, use_cache=False, kept=kept).last_hidden_state
    return _select(trunk(input_ids=tokens, use_cache=False).last_hidden_state, kept)


def is_plain(head: nn.Module) -> bool:
    """Whether its weight is all there is to it, and is here whole (ZeRO-3 shards it)."""
    return type(head) is nn.Linear and head.bias is None and not hasattr(head.weight, "ds_id")


class GPTForCausalLM(GPTPreTrainedModel, GenerationMixin):
    """The trunk with its unembedding, tied to the token embeddings unless `tie_word_embeddings` is False."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.model = GPTModel(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
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
        loss_alone = skip_logits and labels is not None and is_plain(self.lm_head)
        before = kept = None
        if loss_alone:
            targets, before = _before_labels(labels.to(self.lm_head.weight.device))  # type: ignore[union-attr]
            few = len(before) <= labels.numel() * 7 // 8  # type: ignore[union-attr]
            kept = before if few and not output_hidden_states else None  # choosing nearly all saves nothing
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            kept=kept,
            **kwargs,
        )
        hidden = output.last_hidden_state
        if loss_alone:
            rows = hidden if kept is not None else _select(hidden, before)
            loss = _LinearCrossEntropy.apply(rows, self.lm_head.weight, targets)
            count = kwargs.get("num_items_in_batch")
            bare = CausalLMOutputWithPast(
                loss=loss / (targets.numel() if count is None else count),
                past_key_values=output.past_key_values,
                hidden_states=output.hidden_states,
            )
            return bare.to_tuple() if return_dict is False else bare
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

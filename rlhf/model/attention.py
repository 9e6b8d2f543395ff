"""Self-attention with a cache: which tokens attend to which, the norm of queries and keys, and position encodings
without parameters: rotary, which rotates queries and keys, and sinusoids, which are added.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from rlhf.model.gpt_config import SCALING, GPTConfig
from rlhf.model.linear import Linear, ResidualLinear
from rlhf.ops.masked import computed_in

Rope = tuple[Tensor, Tensor]


def rotary_factors(positions: Tensor, config: Any, dtype: torch.dtype) -> Rope:
    """cos and signed sin of position / theta^(2i/R), each (…, 1, head_dim) for positions (…); made in float32.

    R = rotary_share head_dim channels of a head are rotated; the others have angle 0. The sine's first half is negated,
    so that `rotate` is x cos + roll(x) sin.
    """
    turning = int(config.head_dim * config.rotary_share)
    half = torch.arange(0, turning, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / config.rope_theta ** (half / turning)
    if config.rotary_scaling:
        frequencies = scale_frequencies(frequencies, config.rotary_scaling)
    frequencies = F.pad(frequencies, (0, (config.head_dim - turning) // 2))
    angles = positions[..., None].float() * frequencies  # (…, head_dim/2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1).unsqueeze(-2), torch.cat((-sin, sin), -1).unsqueeze(-2)


def scale_frequencies(frequencies: Tensor, scaling: dict[str, float]) -> Tensor:
    """Frequencies of Llama 3.1's longer context: slow ones are divided by `factor`, fast ones stay, those between are
    interpolated.

    f (1 - s + s factor) / factor, with s = (turns - low) / (high - low) from 0 to 1, and turns = f context / 2 pi in
    the original context; low and high: `low_freq_factor` and `high_freq_factor`.
    Source: Dubey et al. 2024 (the released code, apply_scaling).
    """
    factor, low, high, context = (scaling[name] for name in SCALING)
    turns = context / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair (x_i, x_{i + head_dim/2}) of x (…, heads, head_dim) by its position's angle."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Sinusoids(nn.Module):
    """PE(position, 2i) = sin(position / 10000^(2i/D)), PE(position, 2i + 1) = cos of the same; made in float32.
    Source: Vaswani et al. 2017, section 3.5.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, positions: Tensor) -> Tensor:
        """(…, D) of positions (…)."""
        even = torch.arange(0, self.width, 2, dtype=torch.float32, device=positions.device)
        angles = positions[..., None].float() / 10000.0 ** (even / self.width)
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)


# On a CPU the backward pass of torch's attention in bfloat16 takes up to 4 times as long as in float32 below this number of
# tokens (docs/PERFORMANCE.md). Its results are rounded to bfloat16 either way.
SHORT = 192


def select(x: Tensor, kept: Tensor | None) -> Tensor:
    """The tokens (N, D) of x (B, T, D) that `kept` (N,) names by row * T + position; all of x without it."""
    return x if kept is None else x.flatten(0, 1).index_select(0, kept)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool = True) -> Tensor:
    """softmax(q k^T / sqrt(D/H)) v (B, H, T, D/H) of q (B, H, T, D/H) and k, v (B, KV, keys, D/H). causal: without a mask."""
    if q.device.type == "cpu" and q.shape[2] < SHORT and q.requires_grad and (kind := computed_in(q)).itemsize < 4:
        with torch.autocast("cpu", enabled=False):
            return attend(q.float(), k.float(), v.float(), mask, dropout, causal).to(kind)
    causal, groups = causal and mask is None and q.shape[2] > 1, q.shape[1] // k.shape[1]
    if groups > 1 and mask is not None and q.is_cuda:  # there the kernels that take masks take no groups
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=q.shape[1] != k.shape[1])


class QKNorm(nn.Module):
    """RMS norm over each head of the queries and keys, one learned scale for queries and one for keys.
    Source: Henry et al. 2020 (norms of queries and keys); Dehghani et al. 2023, section 2.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.n_kv_head, self.eps = config.n_head, config.n_kv_head, config.norm_eps
        self.weight = nn.Parameter(torch.ones(2, config.head_dim))

    def forward(self, qk: Tensor) -> Tensor:
        q, k = self.weight[:1].expand(self.n_head, -1), self.weight[1:].expand(self.n_kv_head, -1)
        return F.rms_norm(qk, qk.shape[-1:], eps=self.eps) * torch.cat((q, k))


class Attention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v W_out, causal except in an encoder, with n_kv_head keys and values for n_head
    queries.

    Its mask limits a banded layer to the last `window` tokens. Source: Vaswani et al. 2017, equation 1; Ainslie et al.
    2023 (grouped queries), of which one key head is Shazeer 2019 (PaLM); Brown et al. 2020, section 2.1 (dense and
    locally banded layers in alternation); Child et al. 2019.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.dropout, self.causal = layer, config.dropout, config.causal
        self.window = config.window if (layer + 1) % config.window_every == 0 else None  # None: all tokens
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim = config.head_dim
        self.qkv = Linear(config.width, (self.n_head + 2 * self.n_kv_head) * self.head_dim, bias=config.qkv_bias)
        self.out = ResidualLinear(self.n_head * self.head_dim, config.width, bias=config.bias)
        self.qk_norm = QKNorm(config) if config.qk_norm else None

    def project(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, H, D/H), k and v (B, T, KV, D/H) of x (B, T, D), rotated by their positions."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2 KV, D/H)
        if self.qk_norm is None and rope is None:  # one split, so that gradients are concatenated once
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
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0, self.causal)
        return self.out(select(y.transpose(1, 2).flatten(2), kept))  # (B, T, D) or (N, D)


def make_positions(x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, past: int) -> Tensor:
    """Positions (B or 1, T) of the tokens of x (B, T, D) after `past` cached ones; without position_ids they count the
    real tokens.
    """
    if position_ids is not None:
        return position_ids
    if attention_mask is not None and attention_mask.dim() == 2:
        counted = attention_mask.long().cumsum(-1) - 1  # (B, past + T)
        return counted[:, past : past + x.shape[1]].clamp(min=0)
    return torch.arange(past, past + x.shape[1], device=x.device)[None]


def make_attention_mask(
    x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None, past: int, causal: bool
) -> Tensor | None:
    """Bool mask (B or 1, 1, T, keys), True = may attend; None if the plain kernel, causal or not, is enough."""
    if attention_mask is not None and attention_mask.dim() == 4:
        # else it is what is added to scores
        return attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    length = x.shape[1]
    keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
    fresh = keys == length  # a first call: the keys are those of the queries
    if attention_mask is not None:
        hides_later = fresh and causal  # padding on the right
        later, earlier = attention_mask[:, 1:], attention_mask[:, :-1]
        if bool((later <= earlier).all() if hides_later else attention_mask.all()):
            attention_mask = None
    segments = None  # the number of the example (B or 1, T) that each token belongs to, if there are several
    if fresh and length > 1 and position_ids is not None:
        starts = (position_ids[:, 1:] < position_ids[:, :-1]) | (position_ids[:, 1:] == 0)
        segments = F.pad(starts.long().cumsum(-1), (1, 0)) if bool(starts.any()) else None
    if attention_mask is None and segments is None and keys == past + length and (fresh or length == 1):
        return None
    query = torch.arange(length, device=x.device)[:, None] + past  # (T, 1)
    key = torch.arange(keys, device=x.device)
    mask = ((key <= query) | (not causal))[None]  # (1, T, keys)
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    if attention_mask is not None:
        real = F.pad(attention_mask.bool(), (0, max(0, keys - attention_mask.shape[1])))[:, None, :keys]
        mask = mask & (real | (key == query))  # padding attends to itself: softmax needs at least one key
    return mask[:, None]


def as_bias(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """A bool mask as what is added to the scores, which torch would make in each layer and keep for backward; on a CPU
    in half precision, where short attention is computed in float32, the mask itself.
    """
    kind = computed_in(x)
    if mask is None or (kind.itemsize < 4 and x.device.type == "cpu"):
        return mask
    return torch.zeros_like(mask, dtype=kind).masked_fill_(~mask, -torch.inf)


def narrow(mask: Tensor | None, window: int, queries: int, past: int, device: torch.device) -> Tensor | None:
    """The mask of a layer in which `queries` tokens after `past` cached ones attend to the last `window` keys.

    mask: of a layer that attends to all. Distances are between columns; they equal those between positions if padding
    is on one side and the examples of packed rows are complete.
    """
    keys = past + queries if mask is None else mask.shape[-1]
    if keys <= window:
        return mask
    query = torch.arange(queries, device=device)[:, None] + past
    key = torch.arange(keys, device=device)
    near = key > query - window
    return (near & (key <= query))[None, None] if mask is None else mask & near

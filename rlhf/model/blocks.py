"""The blocks of a GPT: the order of norms, attention and MLP; and the top-1 mixture of experts in place of an MLP
(Fedus et al. 2021, Switch Transformer).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.model.attention import Attention, Rope, select
from rlhf.model.gpt_config import GPTConfig
from rlhf.model.linear import Float32Linear, Linear, ResidualLinear


class MLP(nn.Module):
    """relu, gelu: down(f(up x)); swiglu: down(silu(gate x) * up x), gate and up in one matrix.
    Source: Vaswani et al. 2017, equation 2 (ReLU); Hendrycks and Gimpel 2016 (GELU); Shazeer 2020 (SwiGLU).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.swiglu, self.relu = config.mlp == "swiglu", config.mlp == "relu"
        self.approximate = "none" if config.mlp == "gelu_erf" else "tanh"
        self.up = Linear(config.width, config.mlp_width * (2 if self.swiglu else 1), bias=config.bias)
        self.down = ResidualLinear(config.mlp_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.swiglu:
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        up = self.up(x)
        return self.down(F.relu(up) if self.relu else F.gelu(up, approximate=self.approximate))


class SwitchMLP(nn.Module):
    """y = p_i(x) E_i(x), with i = argmax_j p_j(x) and p(x) = softmax(W_r x) (equations 1 and 2 with k = 1).

    Each token goes to its expert, whatever the rest of the batch. Only in pretraining, within `limited_experts`, each
    expert has room for `expert_capacity` T / experts tokens of each row of T tokens (equation 3); later ones are
    dropped: their y is 0 and only the residual stream continues (section 2.2). Room is counted per row from its first
    token on, so results do not depend on other rows, the split, or later tokens.
    Source: Fedus et al. 2021, sections 2.1 and 2.2; Lepikhin et al. 2020, section 2.2 (room counted in groups of
    tokens).
    Differs: a group is a row, where the paper's is the share of a batch on one core. No noise in the router.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.router = Float32Linear(config.width, config.experts, bias=False)  # section 2.4, selective precision
        self.experts = nn.ModuleList(MLP(config) for _ in range(config.experts))
        self.capacity = config.expert_capacity
        self.limited = False
        self.balance: Tensor | None = None  # (B,) of the last forward while limited

    def forward(self, x: Tensor) -> Tensor:
        probs = self.router(x).softmax(-1)  # (…, E)
        gate, chosen = probs.max(-1)
        self.balance = None
        count = len(self.experts)
        if self.limited:
            self.balance = compute_balance(probs, chosen)
            room = math.ceil(self.capacity * x.shape[1] / count)
            of_expert = F.one_hot(chosen, count)  # (B, T, E)
            place = (of_expert.cumsum(1) * of_expert).sum(-1)  # 1 for the first token of its expert in the row
            chosen = chosen.masked_fill(place > room, count)  # no expert
        flat, chosen = x.flatten(0, -2), chosen.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=count + 1).tolist()
        parts = flat[order].split(counts)
        # every expert is called, even with no token, so that each rank gathers each weight and has a gradient for it
        results = [expert(part) for expert, part in zip(self.experts, parts[:-1], strict=True)]
        results.append(torch.zeros_like(parts[-1], dtype=results[0].dtype))
        y = torch.cat(results)[order.argsort()] * gate.flatten()[:, None].to(results[0].dtype)
        return y.view_as(x)


def compute_balance(probs: Tensor, chosen: Tensor) -> Tensor:
    """E sum_i f_i P_i (B,), of each row: 1 if its T tokens are spread evenly, E if all go to one expert.

    f_i is the share of the row's tokens whose expert is i, P_i the mean of p_i over them. probs (B, T, E),
    chosen (B, T).
    Source: Fedus et al. 2021, equations 4 to 6.
    """
    count = probs.shape[-1]
    return count * (F.one_hot(chosen, count).float().mean(1) * probs.mean(1)).sum(-1)


def balance_loss(model: Any, labels: Tensor, ignored: int, count: Any) -> Tensor | float:
    """balance_coef sum over experts' layers and rows of n_row balance_row / N, to be added to the loss; N as in that
    loss.

    n_row is the number of labels of a row, so the parts of a batch add up to the balance loss of the whole. 0 outside
    `limited_experts`.
    """
    layers = (layer for layer in model.modules() if isinstance(layer, SwitchMLP))
    balances = [layer.balance for layer in layers if layer.balance is not None]
    if not balances:
        return 0.0
    counted = (labels[:, 1:] != ignored).sum(1)
    total = (torch.stack(balances).sum(0) * counted).sum()
    return model.config.balance_coef * total / (counted.sum() if count is None else count)


@contextmanager
def limited_experts(model: nn.Module) -> Iterator[None]:
    """A context in which experts have limited room, and losses contain the balance loss: pretraining."""
    layers = [layer for layer in model.modules() if isinstance(layer, SwitchMLP)]
    try:
        for layer in layers:
            layer.limited = True
        yield
    finally:
        for layer in layers:
            layer.limited, layer.balance = False, None


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


class Block(GradientCheckpointingLayer):
    """Pre-norm (GPT-2, Llama): x + attention(norm_1 x) = y; y + mlp(norm_2 y).
    Source: Radford et al. 2019, section 2.3.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.norm_1, self.attention = make_norm(config), Attention(config, layer)
        self.norm_2: nn.Module = make_norm(config)
        routed = config.experts and (layer + 1) % config.expert_every == 0  # Fedus et al. 2021, table 1
        self.mlp = SwitchMLP(config) if routed else MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rope: Rope | None = None,
        mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        attended = self.attention(self.before_attention(x), rope, mask, past_key_values, kept)
        return self.after_attention(select(x, kept), attended)

    def before_attention(self, x: Tensor) -> Tensor:
        """The attention's input, from the residual stream x."""
        return self.norm_1(x)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output, from the residual stream x and the attention's output."""
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.norm_2(x)))


class PostNormBlock(Block):
    """The original Transformer and GPT-1: norm_1(x + attention x) = y; norm_2(y + mlp y). No norm follows the last
    block.
    Source: Vaswani et al. 2017, section 3.1; Radford et al. 2018, section 4.1.
    """

    def before_attention(self, x: Tensor) -> Tensor:
        return x

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.norm_1(x + self.dropout(attended))
        return self.norm_2(x + self.dropout(self.mlp(x)))


class ParallelBlock(Block):
    """GPT-NeoX: x + attention(norm_1 x) + mlp(norm_2 x). Source: Black et al. 2022, section 2.1.2."""

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        return x + self.dropout(attended) + self.dropout(self.mlp(self.norm_2(x)))


class OneNormBlock(ParallelBlock):
    """PaLM and GPT-J: x + attention(norm_1 x) + mlp(norm_1 x).
    Source: Chowdhery et al. 2022, section 2, "Parallel Layers".
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.norm_2 = nn.Identity()

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        return x + self.dropout(attended) + self.dropout(self.mlp(self.norm_1(x)))


BLOCKS = {"pre": Block, "post": PostNormBlock, "parallel": ParallelBlock, "one_norm": OneNormBlock}

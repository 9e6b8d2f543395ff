"""The blocks of a GPT: the order of norms, attention and MLP."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.model.attention import Attention, Rope, select
from rlhf.model.gpt_config import GPTConfig
from rlhf.model.masks import Mask
from rlhf.model.mlp import MLP, SwitchMLP


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
        self.mlp = SwitchMLP(config) if config.has_experts(layer) else MLP(config)
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
        return self.after_attention(select(x, kept), attended)

    def before_attention(self, x: Tensor) -> Tensor:
        """The attention's input, from the residual stream x."""
        return self.norm_1(x)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output, from the residual stream x and the attention's output."""
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.norm_2(x)))


class PostNormBlock(Block):
    """The original Transformer and GPT-1: norm_1(x + attention x) = y; norm_2(y + mlp y). No norm follows the last block.

    Source: Vaswani et al. 2017, section 3.1; Radford et al. 2018, section 4.1.
    """

    def before_attention(self, x: Tensor) -> Tensor:
        return x

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.norm_1(x + self.dropout(attended))
        return self.norm_2(x + self.dropout(self.mlp(x)))


class ParallelBlock(Block):
    """GPT-NeoX: x + attention(norm_1 x) + mlp(norm_2 x).

    Source: Black et al. 2022, section 2.1.2.
    """

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

"""The parts of a block against their equations, written out token by token."""

import math

import pytest
import torch
import torch.nn.functional as F

from rlhf.model import GPTConfig
from rlhf.model.attention import Attention, Sinusoids, narrow
from rlhf.model.blocks import OneNormBlock

SIZES = {"vocab_size": 61, "context_length": 48, "n_layer": 2, "n_head": 4, "width": 32}


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-6)


def test_sinusoids_are_the_papers():
    table = Sinusoids(6)(torch.tensor([[0, 3]]))
    assert table.shape == (1, 2, 6)
    assert table[0, 0].tolist() == [0, 1, 0, 1, 0, 1]
    # i = 1: 3 / 10000^(2/6) = 3 / 21.5443 = 0.139248
    assert table[0, 1, :2].tolist() == pytest.approx([math.sin(3), math.cos(3)], abs=1e-6)
    assert table[0, 1, 2:4].tolist() == pytest.approx([math.sin(0.139248), math.cos(0.139248)], abs=1e-6)


@torch.no_grad()
def test_attention_and_mlp_read_the_same_norm():
    torch.manual_seed(0)
    block = OneNormBlock(GPTConfig(**SIZES, block="one_norm", bias=False, positions="rotary"), 0)
    block.norm_1.weight.copy_(torch.randn(32))
    x = torch.randn(2, 5, 32)
    normed = F.layer_norm(x, (32,), block.norm_1.weight)
    rope = (torch.ones(1, 5, 1, 8), torch.zeros(1, 5, 1, 8))
    assert close(block(x, rope), x + block.attention(normed, rope, None, None) + block.mlp(normed))
    assert sum("norm" in name for name, _ in block.named_parameters()) == 1


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 3, 20])
def test_a_banded_layer_sees_the_last_tokens_only(window):
    torch.manual_seed(0)
    attention = Attention(GPTConfig(**SIZES, window=window), 1)
    x = torch.randn(1, 9, 32)
    y = attention(x, None, narrow(None, window, 9, 0, x.device), None)
    for last in range(9):  # the same tokens, alone
        alone = attention(x[:, max(0, last - window + 1) : last + 1], None, None, None)
        assert close(y[:, last], alone[:, -1])


def test_every_kind_of_mask_is_narrowed():
    cpu = torch.device("cpu")
    assert narrow(None, 4, 1, 3, cpu) is None  # four keys: the band hides none
    assert narrow(None, 4, 1, 4, cpu).tolist() == [[[[False, True, True, True, True]]]]
    given = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    given[..., 2, 1] = False
    narrowed = narrow(given, 2, 3, 0, cpu)[0, 0].tolist()
    assert narrowed == [[True, False, False], [True, True, False], [False, False, True]]

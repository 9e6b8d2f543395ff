import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.ops.logprobs import entropy, token_logprobs
from tests import oracles


def test_by_hand():
    # softmax of log 1, log 2, log 5 is 1/8, 2/8, 5/8
    logits = torch.log(torch.tensor([[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]]))
    logp = token_logprobs(logits, torch.tensor([2, 0]))
    assert logp.tolist() == pytest.approx([math.log(5 / 8), math.log(1 / 3)], abs=1e-6)
    # 1/8 log 8 + 1/4 log 4 + 5/8 log 8/5
    by_hand = math.log(8) / 8 + math.log(4) / 4 + 5 / 8 * math.log(8 / 5)
    assert entropy(logits).tolist() == pytest.approx([by_hand, math.log(3)], abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.sampled_from([0.1, 1.0, 30.0])
)
def test_agrees_with_the_oracle(seed, B, T, V, scale):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(B, T, V, generator=generator)
    tokens = torch.randint(V, (B, T), generator=generator)
    expected = oracles.token_logprobs(logits.numpy(), tokens.numpy())
    np.testing.assert_allclose(token_logprobs(logits, tokens).numpy(), expected, atol=1e-5, rtol=1e-5)
    H = entropy(logits)
    np.testing.assert_allclose(H.numpy(), oracles.entropy(logits.numpy()), atol=1e-5, rtol=1e-5)
    assert (H >= 0).all() and (math.log(V) + 1e-5 >= H).all()


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    assert token_logprobs(logits, torch.tensor([0])).item() == 0.0
    assert token_logprobs(logits, torch.tensor([2])).item() == -2e4
    assert entropy(logits).item() == 0.0


def test_forbidden_tokens_add_nothing_to_the_entropy_or_its_gradient():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    H = entropy(logits)
    H.sum().backward()
    assert H.item() == pytest.approx(math.log(2))
    assert torch.isfinite(logits.grad).all()


def test_half_precision_logits_give_float32():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.tensor([0, 1, 2, 299])
    logp = token_logprobs(logits, tokens)
    assert logp.dtype == torch.float32 and entropy(logits).dtype == torch.float32
    # a sum in bfloat16 would be off by 1e-2
    expected = oracles.token_logprobs(logits.double().numpy(), tokens.numpy())
    np.testing.assert_allclose(logp.numpy(), expected, atol=1e-5)


def test_gradients():
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 1, 3], [2, 2, 0]])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, tokens), logits)
    assert torch.autograd.gradcheck(entropy, logits)

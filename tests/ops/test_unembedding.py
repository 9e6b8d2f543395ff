import math

import pytest
import torch

from rlhf.ops import unembedding
from rlhf.ops.logprobs import entropy, token_logprobs
from rlhf.ops.unembedding import unembedded_logprobs
from tests.ops.confident import confident_batch, relative_error


def test_by_hand():
    # logits of row 0: log 1, log 2, log 5 (h = 1, W = those): p = 1/8, 2/8, 5/8; of row 1 (h = 0) all 0: p = 1/3 each
    weight = torch.log(torch.tensor([[1.0], [2.0], [5.0]]))
    hidden = torch.tensor([[1.0], [0.0]], requires_grad=True)
    logp, spread = unembedded_logprobs(hidden, weight, torch.tensor([2, 0]), with_entropy=True)
    assert logp.tolist() == pytest.approx([math.log(5 / 8), math.log(1 / 3)], abs=1e-6)
    assert spread.tolist() == pytest.approx(
        [math.log(8) / 8 + math.log(4) / 4 + 5 / 8 * math.log(8 / 5), math.log(3)], abs=1e-6
    )
    logp[0].backward()  # d logp / d h = w_2 - sum p w = log 5 - (1/4 log 2 + 5/8 log 5)
    assert hidden.grad[0].item() == pytest.approx(math.log(5) - math.log(2) / 4 - 5 / 8 * math.log(5), abs=1e-6)
    assert hidden.grad[1].item() == 0.0


@pytest.mark.parametrize("kept", [2**26, 0])
@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_equals_the_plain_path(monkeypatch, kept, shift):
    monkeypatch.setattr(unembedding, "_KEPT", kept)
    monkeypatch.setattr(unembedding, "_CPU_CHUNK", 64 * 37)  # three chunks of 64 rows, the last one short
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(150, 8, generator=generator)
    hidden[:, 0] = 1.0
    weight = torch.randn(37, 8, generator=generator)
    weight[:, 0] += shift  # all logits are large, which softmax does not see
    hidden.requires_grad_()
    weight.requires_grad_()
    tokens = torch.randint(37, (150,), generator=generator)
    incoming = torch.randn(150, generator=generator)
    plain = token_logprobs(hidden @ weight.t(), tokens)
    fast, spread = unembedded_logprobs(hidden, weight, tokens, with_entropy=True)
    tolerance = 1e-5 if shift == 0 else 1e-3  # at 300 a float32 logit itself is known to 3e-5 only
    torch.testing.assert_close(fast, plain, atol=tolerance, rtol=0)
    torch.testing.assert_close(spread, entropy((hidden @ weight.t()).detach()), atol=tolerance, rtol=0)
    assert not spread.requires_grad
    wanted = torch.autograd.grad(plain, (hidden, weight), incoming)
    found = torch.autograd.grad(fast, (hidden, weight), incoming)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance * max(1.0, shift), rtol=1e-4)


def test_what_needs_no_gradient_gets_none():
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    logp, spread = unembedded_logprobs(hidden, weight, torch.arange(5))
    assert spread is None
    logp.sum().backward()
    assert hidden.grad is not None and weight.grad is None
    logp, spread = unembedded_logprobs(torch.zeros(0, 4), weight, torch.zeros(0, dtype=torch.int64), True)
    assert logp.shape == spread.shape == (0,)


def half_precision_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (40, 32) and weights (300, 32) in bfloat16 whose logits lie near -80, as GPT-2's may; tokens (40,)."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(40, 32, generator=generator), 0.3 * torch.randn(300, 32, generator=generator)
    hidden[:, 0], weight[:, 0] = 8.0, -10.0
    return hidden.bfloat16(), weight.bfloat16(), torch.randint(300, (40,), generator=generator)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_factors_have_float32_logits(autocast):
    hidden, weight, tokens = half_precision_batch()
    logits = hidden.double() @ weight.double().t()
    rounded = token_logprobs((hidden @ weight.t()).float(), tokens)
    assert logits.mean() < -75 and (rounded - token_logprobs(logits, tokens)).abs().max() > 0.1
    # autocast rounds them to what they are
    factors = (hidden.float(), weight.float()) if autocast else (hidden, weight)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logp, spread = unembedded_logprobs(*factors, tokens, with_entropy=True)
    torch.testing.assert_close(logp.double(), token_logprobs(logits, tokens).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(spread.double(), entropy(logits).double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("p", [0.5, 0.99, 0.9999])
@pytest.mark.parametrize(
    ("autocast", "kept", "entropy_coef"),
    [(False, 2**26, None), (True, 0, None), (True, 2**26, 0.0), (False, 0, 0.0), (False, 2**26, 0.5), (True, 0, 0.5)],
)
def test_gradients_in_bfloat16_of_confident_tokens(monkeypatch, p, autocast, kept, entropy_coef):
    """A probability that is rounded before 1 is subtracted leaves nothing of 1 - p."""
    monkeypatch.setattr(unembedding, "_KEPT", kept)
    hidden, weight, tokens = confident_batch(p)
    incoming = torch.linspace(-1.0, 1.0, len(tokens)) / len(tokens)
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = exact[0] @ exact[1].t()
    assert token_logprobs(logits, tokens).exp().mean().item() == pytest.approx(p, rel=0.05)
    loss = (token_logprobs(logits, tokens) * incoming).sum() - (entropy_coef or 0.0) * entropy(logits).mean()
    wanted = torch.autograd.grad(loss, exact)
    extra = () if entropy_coef is None else (True,)
    kind = torch.float32 if autocast else torch.bfloat16
    factors = [x.detach().to(kind).requires_grad_() for x in (hidden, weight)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logp, spread = unembedded_logprobs(*factors, tokens, entropy_coef is not None, *extra)
    loss = (logp * incoming).sum() - (entropy_coef * spread.mean() if entropy_coef else 0.0)
    for found, right in zip(torch.autograd.grad(loss, factors), wanted, strict=True):
        assert relative_error(found, right) < 0.01  # each term is rounded by 2^-9 at most


@pytest.mark.parametrize("kept", [2**26, 0])
def test_the_entropy_has_a_gradient_on_request(monkeypatch, kept):
    monkeypatch.setattr(unembedding, "_CPU_CHUNK", 64 * 37)
    monkeypatch.setattr(unembedding, "_KEPT", kept)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(150, 8, generator=generator, requires_grad=True)
    weight = torch.randn(37, 8, generator=generator, requires_grad=True)
    tokens, incoming = torch.randint(37, (150,), generator=generator), torch.randn(2, 150, generator=generator)
    logits = hidden @ weight.t()
    plain = token_logprobs(logits, tokens) @ incoming[0] + entropy(logits) @ incoming[1]
    logp, spread = unembedded_logprobs(hidden, weight, tokens, True, entropy_gradient=True)
    ours = logp @ incoming[0] + spread @ incoming[1]
    assert ours.item() == pytest.approx(plain.item(), abs=1e-4)
    wanted = torch.autograd.grad(plain, (hidden, weight))
    for a, b in zip(torch.autograd.grad(ours, (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_no_token_has_no_entropy_and_a_gradient_of_zero():
    """A process whose micro-batch has no token that counts still goes through the loss."""
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(37, 8, requires_grad=True)
    logp, spread = unembedded_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), True, entropy_gradient=True)
    assert logp.shape == spread.shape == (0,)
    (logp.sum() + spread.sum()).backward()
    assert not weight.grad.any()

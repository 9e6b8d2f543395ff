"""The loss without logits and the loss of a ragged batch, against one padded forward with all logits."""

import pytest
import torch

from rlhf.model import GPTForCausalLM
from rlhf.model.batching import by_length
from rlhf.model.fused_loss import NextToken
from rlhf.ops import unembedding
from tests.model.test_generate import KINDS
from tests.ops.confident import confident_batch, relative_error
from tests.presets import make_gpt

LENGTHS = torch.tensor([9, 3, 17, 24, 5, 5, 11, 2, 20])


def make(tied: bool = True, **kind) -> GPTForCausalLM:
    fields = {"vocab_size": 41, "n_head": 4, "initializer_range": 0.3, "tie_word_embeddings": tied}
    return make_gpt(**fields | kind).train()


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens, and labels of what comes after each row's first two tokens."""
    tokens = torch.randint(1, 41, (len(LENGTHS), 24), generator=torch.Generator().manual_seed(1))
    place = torch.arange(24)
    tokens = torch.where(place < LENGTHS[:, None], tokens, 0)
    return tokens, torch.where((place >= 2) & (place < LENGTHS[:, None]), tokens, -100)


def gradients(model: GPTForCausalLM, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same(model: GPTForCausalLM, fast: torch.Tensor, plain: torch.Tensor) -> None:
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=0)
    for a, b in zip(gradients(model, fast), gradients(model, plain), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def ragged_loss(model, tokens, labels, lengths, count=None, rows=8):
    """The loss of a batch in parts of similar length, as the stages compute it; each part is cut to its longest row."""
    count, loss = int((labels[:, 1:] != -100).sum()) if count is None else count, NextToken(model)
    parts = []
    for group in by_length(lengths.tolist(), rows):
        width = int(lengths[group].max())
        parts.append(loss(labels[group, :width], count, input_ids=tokens[group, :width]))
    return torch.stack(parts).sum()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("count", [None, 50])
@pytest.mark.parametrize("rows", [64, 4096])
def test_the_loss_without_logits(monkeypatch, tied, count, rows):
    monkeypatch.setattr(unembedding, "_CPU_CHUNK", rows * 41)  # chunks of so many rows
    model, (tokens, labels) = make(tied), make_batch()
    more = {} if count is None else {"num_items_in_batch": count}
    plain = model(input_ids=tokens, labels=labels, **more)
    fast = NextToken(model)(labels, count or int((labels[:, 1:] != -100).sum()), input_ids=tokens)
    assert_same(model, fast, plain.loss)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_block(kind):
    model, (tokens, labels) = make(**KINDS[kind]), make_batch()
    plain = model(input_ids=tokens, labels=labels).loss
    assert_same(model, ragged_loss(model, tokens, labels, LENGTHS, rows=2), plain)
    loss = ragged_loss(model, tokens, labels, LENGTHS, rows=2)
    assert all(float(gradient.abs().sum()) > 0 for gradient in gradients(model, loss))


@pytest.mark.parametrize("rows", [1, 2, 4, 100])
@pytest.mark.parametrize("count", [None, 70])
def test_a_ragged_batch(rows, count):
    model, (tokens, labels) = make(), make_batch()
    more = {} if count is None else {"num_items_in_batch": count}
    plain = model(input_ids=tokens, labels=labels, **more).loss
    assert_same(model, ragged_loss(model, tokens, labels, LENGTHS, count, rows=rows), plain)


def test_a_batch_without_labels_gives_zero_and_a_gradient():
    model, (tokens, labels) = make(), make_batch()
    loss = ragged_loss(model, tokens, torch.full_like(labels, -100), LENGTHS, count=10)
    loss.backward()
    assert loss.item() == 0.0 and all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99, 0.999, 0.9999])
def test_gradients_of_the_loss_without_logits_in_bfloat16_of_confident_labels(p):
    hidden, weight, labels = confident_batch(p)
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="sum")
    wanted = torch.autograd.grad(loss, exact)
    factors = [x.detach().requires_grad_() for x in (hidden, weight)]
    found = torch.autograd.grad(unembedding.unembedded_cross_entropy(*factors, labels), factors)
    for one, right in zip(found, wanted, strict=True):
        assert relative_error(one, right) < 0.01  # each term is rounded by 2^-9 at most

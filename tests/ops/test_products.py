import pytest
import torch
import torch.nn.functional as F

from rlhf.cpu import products
from rlhf.cpu.products import PIECES, onednn_product, product

# if a torch with oneDNN lacks this product, these tests fail
needs_product = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="built without oneDNN")


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    monkeypatch.setattr(products, "is_faster", lambda: True)


def tensors(rows: int, inputs: int = 256, outputs: int = 320) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((rows, inputs), (outputs, inputs), (outputs,)))
    return x, weight / 16, bias


@needs_product
@pytest.mark.parametrize("rows", [PIECES[-1], 65, 3 * 64 + 7, 2048 + 256 + 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_torchs(rows, with_bias, monkeypatch):
    calls, multiply = [], onednn_product()
    monkeypatch.setattr(products, "onednn_product", lambda: lambda *a: calls.append(len(a[0])) or multiply(*a))
    x, weight, bias = tensors(rows)
    found, wanted = [], []
    for f, into in ((product, found), (F.linear, wanted)):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = f(leaves[0].view(1, rows, -1), leaves[1], leaves[2] if with_bias else None)
        y.square().sum().backward()
        into += [y, *(t.grad for t in leaves if t.grad is not None)]
    assert calls, "or nothing was tested"
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=2e-5 * theirs.abs().max().item())

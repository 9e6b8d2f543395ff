import pytest
import torch

from rlhf.cpu import products
from rlhf.cpu.products import by_torch_alone
from rlhf.engines.sampling import packed, sample
from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.model.linear import products_cast

# if a torch with oneDNN lacks the packed product, these tests fail
without = not torch.backends.mkldnn.is_available()
needs_product = pytest.mark.skipif(without, reason="this torch is built without oneDNN")
PROMPTS = [[2 + i, 3, 5 + i % 7] * (1 + i % 3) for i in range(12)]


@pytest.fixture(autouse=True)
def as_with_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed on processors with AVX-512 is packed on all of them here."""
    monkeypatch.setattr(products, "PACKED_WIDTH", 256)
    monkeypatch.setattr(products, "PACKED_ROWS", 256)


def make_model(width: int = 256, **more: object) -> GPTForCausalLM:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 4, "vocab_size": 600, "context_length": 64, "initializer_range": 0.06}
    return GPTForCausalLM(GPTConfig(width=width, **shape | more)).eval()


def answers(model: GPTForCausalLM, new: int = 24):
    return sample(model, PROMPTS, max_new_tokens=new, eos_token_id=1, pad_token_id=0, seed=3)


def plain_answers(model: GPTForCausalLM, monkeypatch: pytest.MonkeyPatch, new: int = 24):
    with monkeypatch.context() as patch:
        patch.setattr(products, "onednn_product", lambda: None)
        return answers(model, new)


@needs_product
@pytest.mark.parametrize("shape", [
    {}, {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": False}, {"tie_word_embeddings": False},
], ids=["gelu", "swiglu", "untied"])  # fmt: skip
def test_packed_answers_are_the_plain_ones(shape, monkeypatch):
    model = make_model(**shape)
    ours, plain = answers(model), plain_answers(model, monkeypatch)
    assert ours.responses == plain.responses
    assert torch.allclose(ours.logprobs, plain.logprobs, atol=1e-5, rtol=0.0)
    with packed(model, 8) as count:
        assert count == len(products._packed) == 9, "or nothing was tested"


SHAPES = {
    "many heads": {}, "one key head": {"n_kv_head": 1}, "banded": {"window": 8},
    "grouped, rotary": {"width": 96, "n_head": 6, "n_kv_head": 2, "positions": "rotary", "norm": "rmsnorm"},
    "post-norm": {"block": "post", "positions": "sinusoidal", "mlp": "relu"},
    "PaLM": {"block": "one_norm", "positions": "rotary", "n_kv_head": 1, "head_dim": 48, "mlp": "swiglu", "bias": False},
    "NeoX": {"block": "parallel", "positions": "rotary", "rotary_share": 0.5, "head_dim": 64},
    "experts, packed": {"experts": 4, "qk_norm": True, "width": 256},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_answers_of_the_compiled_loops_are_torchs(shape):
    model = make_model(**{"width": 128, **shape})
    plan = {"max_new_tokens": 24, "eos_token_id": 1, "pad_token_id": 0, "seed": 3, "temperature": 0.8}
    ours = sample(model, PROMPTS, **plan)
    with by_torch_alone():
        plain = sample(model, PROMPTS, **plan)
    assert ours.responses == plain.responses
    assert torch.allclose(ours.logprobs, plain.logprobs, atol=1e-5, rtol=0.0)


def test_under_autocast_only_weights_that_are_cast_are_packed():
    model = make_model()
    x, layer = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)), model.model.layers[0].mlp.up
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with packed(model, 8) as count:
            assert count == 0
        with products_cast(model):
            plain = layer(x)
            with packed(model, 24) as count:
                found = layer(x)
    assert bool(count) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # sums in another order are rounded to bfloat16's 8 bits
    assert found.dtype == plain.dtype and (found - plain).abs().max() < 0.02 * plain.abs().max()
    assert {p.dtype for p in model.parameters()} == {torch.float32}

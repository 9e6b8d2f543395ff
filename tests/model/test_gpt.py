"""The GPT against transformers' classes, and against itself padded, packed, cached and reloaded."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from rlhf.model import GPTConfig, GPTForCausalLM, GPTModel
from rlhf.model.attention import SHORT, attend
from rlhf.model.convert import from_transformers
from rlhf.model.interface import lm
from tests.model.checkpoints import CHECKPOINTS, make_checkpoint
from tests.model.test_generate import KINDS
from tests.presets import preset

VOCAB = 61
SMALL = {"vocab_size": VOCAB, "context_length": 48, "n_layer": 3, "n_head": 4, "width": 32}


def make(kind: str = "llama", **overrides) -> GPTForCausalLM:
    torch.manual_seed(0)
    model = GPTForCausalLM(preset("tiny", **{**SMALL, **KINDS[kind], **overrides})).eval()
    for parameter in model.parameters():  # far from the initial biases of 0 and scales of 1
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(7))


@pytest.fixture(params=CHECKPOINTS)
def pair(request):
    """(transformers' model, ours with its weights)."""
    theirs = make_checkpoint(request.param)
    return theirs, from_transformers(theirs)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_logits_equal_transformers(pair, side):
    theirs, ours = pair
    tokens, mask = random_tokens(3, 12), torch.ones(3, 12, dtype=torch.long)
    for row, pads in enumerate((0, 3, 5)):
        if side == "left":
            mask[row, :pads] = 0
        elif side == "right":
            mask[row, 12 - pads :] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # transformers does not count them itself in a plain forward
    expected = theirs(tokens, attention_mask=mask, position_ids=positions).logits
    assert close(ours(tokens, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])
    assert close(ours(tokens, attention_mask=mask, position_ids=positions).logits[mask.bool()], expected[mask.bool()])


@torch.no_grad()
def test_packed_logits_equal_transformers_one_by_one(pair):
    theirs, ours = pair
    examples = [random_tokens(1, n) for n in (5, 1, 9)]
    packed = torch.cat(examples, dim=1)
    positions = torch.cat([torch.arange(e.shape[1]) for e in examples])[None]
    expected = torch.cat([theirs(e).logits for e in examples], dim=1)
    assert close(ours(packed, position_ids=positions).logits, expected)


def test_loss_and_gradient_equal_transformers(pair):
    theirs, ours = pair
    tokens = random_tokens(2, 10)
    labels = tokens.clone()
    labels[0, :4] = -100
    losses = [model(tokens, labels=labels).loss for model in pair]
    assert close(*losses)
    for loss in losses:
        loss.backward()
    assert close(ours.lm_head.weight.grad, theirs.lm_head.weight.grad)


def test_initialisation():
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(vocab_size=500, n_layer=8, n_head=4, width=128, context_length=16))
    block = model.model.layers[3]  # n draws know their deviation to 1 / sqrt(2 n): 0.6% of the fewest, 16,384
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.025)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.025)
    for projection in (block.attention.out, block.mlp.down):  # 0.02 / sqrt(2 * 8) = 0.005
        assert projection.weight.std().item() == pytest.approx(0.005, rel=0.025)
    assert block.mlp.up.bias.abs().max() == 0 and (block.norm_1.weight == 1).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_packed_examples_do_not_see_each_other(kind):
    model, tokens = make(kind), random_tokens(2, 14)
    extra = {"position_ids": torch.cat([torch.arange(6), torch.arange(8)]).expand(2, -1)}
    changed = tokens.clone()
    changed[:, :6] = (tokens[:, :6] + 1) % VOCAB
    before, after = (model(t, **extra).logits for t in (tokens, changed))
    assert close(before[:, 6:], after[:, 6:])
    assert not close(before[:, :6], after[:, :6])
    without = [model(t).logits[:, 6:] for t in (tokens, changed)]
    assert not close(*without)  # the same tokens, unpacked, do see each other


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_padding_side_and_amount_change_nothing(kind):
    model, tokens = make(kind), random_tokens(1, 9)
    expected = model(tokens).logits
    for left, right in ((4, 0), (0, 4), (3, 6)):
        padded = F.pad(tokens, (left, right), value=5)
        mask = F.pad(torch.ones_like(tokens), (left, right))
        logits = model(padded, attention_mask=mask).logits
        assert torch.isfinite(logits).all()
        assert close(logits[:, left : left + 9], expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_cache_equals_no_cache(kind):
    model, tokens = make(kind), random_tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    expected = model(tokens, attention_mask=mask).logits
    cache, parts = None, []
    for start, end in ((0, 5), (5, 9), (9, 10), (10, 12)):
        output = model(tokens[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert close(torch.cat(parts, 1)[mask.bool()], expected[mask.bool()])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt2", "llama", "banded", "switch"])
def test_generate_under_left_padding_equals_greedy_by_hand(kind):
    model, prompts = make(kind), [random_tokens(1, n) for n in (4, 7)]
    tokens = torch.cat([F.pad(p, (7 - p.shape[1], 0)) for p in prompts])
    mask = torch.tensor([[0] * 3 + [1] * 4, [1] * 7])
    out = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for row, prompt in enumerate(prompts):
        for _ in range(6):
            prompt = torch.cat([prompt, model(prompt).logits[:, -1:].argmax(-1)], dim=1)
        assert out[row, 7:].tolist() == prompt[0, -6:].tolist()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind, tmp_path):
    model, tokens = make(kind, pad_token_id=0, eos_token_id=1), random_tokens(2, 8)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again, trunk = AutoModelForCausalLM.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)
    assert type(again) is GPTForCausalLM and type(trunk) is GPTModel
    tied = again.lm_head.weight is again.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    assert close(again(tokens).logits, model(tokens).logits)
    assert close(trunk(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    assert again.generation_config.eos_token_id == 1 or again.config.eos_token_id == 1


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [40, SHORT])
def test_attention_in_bfloat16_is_float64s_to_rounding(length, masked):
    """Forward and gradients, on both sides of the length from which on torch's kernel runs in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64) for heads in (6, 2, 2))
    weights = torch.randn(2, 6, length, 8, generator=generator, dtype=torch.float64)
    mask = torch.ones(length, length, dtype=torch.bool).tril()

    def run(kind: torch.dtype, autocast: bool) -> list[Tensor]:
        inputs = [x.detach().to(torch.float32 if autocast else kind).requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = attend(*inputs, mask if masked else None, 0.0)
        assert y.dtype == (torch.bfloat16 if autocast else kind)
        (y.double() * weights).sum().backward()
        return [y, *(x.grad for x in inputs)]

    exact = run(torch.float64, False)
    for rounded in (run(torch.bfloat16, False), run(torch.bfloat16, True)):
        for got, wanted in zip(rounded, exact, strict=True):
            assert (got - wanted).abs().max() < 0.04 * wanted.abs().max()


KEPT = torch.tensor([2, 3, 4, 12 + 7, 24 + 0, 24 + 11])  # of three rows of 12, by row * 12 + position


def states_and_gradients(model: GPTForCausalLM, tokens: torch.Tensor, weights: torch.Tensor, whole: bool):
    model.zero_grad()
    if whole:
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)[KEPT]
    else:
        hidden = lm(model.model).hidden(tokens, KEPT)
    (hidden * weights).sum().backward()
    return hidden.detach(), [p.grad.clone() for p in model.model.parameters()]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_of_some_tokens_are_those_of_a_whole_forward(kind, checkpointed):
    model = make(kind).double().train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens = random_tokens(3, 12)
    weights = torch.randn(len(KEPT), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    whole, expected = states_and_gradients(model, tokens, weights, whole=True)
    some, found = states_and_gradients(model, tokens, weights, whole=False)
    assert some.shape == (len(KEPT), 32)
    torch.testing.assert_close(some, whole, atol=1e-12, rtol=0)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=0)


def test_hidden_states_of_some_tokens_of_another_trunk(pair):
    theirs, ours = pair
    tokens = random_tokens(3, 12)
    with torch.no_grad():
        found, expected = lm(theirs.base_model).hidden(tokens, KEPT), lm(ours.model).hidden(tokens, KEPT)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

"""The LSTM of the study of transfer: its size, causality, loss, and the Auto classes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import rlhf.model  # noqa: F401 (registers it)
from rlhf.model.interface import lm
from rlhf.model.lstm import LSTMConfig, LSTMForCausalLM
from rlhf.ops.logprobs import token_logprobs


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LSTMForCausalLM(LSTMConfig.sized(60_000, vocab_size=300, context_length=32)).eval()


@pytest.mark.parametrize(("parameters", "vocabulary"), [(60_000, 300), (935_040, 1024), (117_000_000, 40_000)])
def test_it_has_the_size_of_the_transformer(parameters, vocabulary):
    with torch.device("meta"):
        made = LSTMForCausalLM(LSTMConfig.sized(parameters, vocab_size=vocabulary))
    assert sum(p.numel() for p in made.parameters()) == pytest.approx(parameters, rel=0.02)


def test_a_token_sees_only_those_before_it(model):
    tokens = torch.randint(0, 300, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 300
    a, b = model(tokens).logits, model(changed).logits
    assert torch.equal(a[:, :7], b[:, :7]) and not torch.allclose(a[:, 7:], b[:, 7:])


def test_loss_and_reading_back(model, tmp_path):
    tokens = torch.randint(0, 300, (2, 12))
    found = model(tokens, labels=tokens)
    wanted = -token_logprobs(found.logits[:, :-1], tokens[:, 1:]).mean()
    assert found.loss.item() == pytest.approx(wanted.item(), abs=1e-5) and lm(model).plain
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, found.logits)

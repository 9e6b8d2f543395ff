"""Whole weights of a plain module, and a folder that is read back; ZeRO's are in test_sharding.py and test_zero.py."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.errors import UserError
from rlhf.model.gpt import GPTForCausalLM
from rlhf.training import state as gather
from tests.presets import preset


@pytest.fixture
def model() -> GPTForCausalLM:
    return GPTForCausalLM(preset("tiny", n_layer=1, vocab_size=64))


def test_a_tied_embedding_is_there_once_and_the_copy_shares_nothing(model, monkeypatch):
    """Only the first process receives it."""
    state = gather.gathered_state(model)
    assert "model.embed_tokens.weight" in state and "lm_head.weight" not in state
    assert sum(t.numel() for t in state.values()) == sum(p.numel() for p in model.parameters())
    before = state["model.norm.weight"].clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(7)
    assert torch.equal(state["model.norm.weight"], before)
    monkeypatch.setenv("RANK", "1")
    assert gather.gathered_state(model) is None


def test_the_folder_states_the_type_of_its_weights(model, tmp_path):
    """As where bfloat16 weights are trained and their float32 masters are saved."""
    state = gather.gathered_state(model)
    gather.save_model_checked(model.to(torch.bfloat16), tmp_path, state)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32 and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in state.items())
    for wrong, told in (
        ({"model.norm.weight": state["model.norm.weight"] + 1}, "model.norm.weight differ after reading back"),
        ({"more": torch.zeros(1)}, "more differ"),
    ):
        with pytest.raises(UserError, match=told):
            gather.check_saved(tmp_path, state | wrong)

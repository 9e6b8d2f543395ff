"""A model is loaded whole: no weight stays random, none is dropped, and equal models are equal files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.errors import UserError
from rlhf.model.adopt import load_weights
from rlhf.model.checkpoint import read_checkpoint
from rlhf.model.classifier import load_reward_model
from rlhf.model.gpt import GPTConfig, GPTForCausalLM
from rlhf.model.heads import RewardModel
from rlhf.training.setup import load_policy

CPU = torch.device("cpu")


@pytest.fixture
def policy(tmp_path):
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(vocab_size=32, n_layer=2, n_head=2, width=16, context_length=16))
    model.save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def loaders(policy, tmp_path):
    """Whatever reads a policy, or the reward model in tmp_path / "reward"."""
    return (
        lambda: load_policy(policy),
        lambda: load_reward_model(tmp_path / "reward", CPU),
        lambda: load_weights(read_checkpoint(policy)),
    )


def edit(path, **values):
    config = json.loads((path / "config.json").read_text())
    (config.get("trunk") or config).update(values)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("layers", "told"), [(3, "missing from the file"), (1, "not in the model of config.json")])
def test_other_numbers_of_layers_are_refused(policy, tmp_path, layers, told):
    reward = RewardModel.from_causal_lm(str(policy))
    reward.save_pretrained(str(tmp_path / "reward"))
    assert load_policy(policy) is not None and load_reward_model(tmp_path / "reward", CPU) is not None
    for folder in (policy, tmp_path / "reward"):
        edit(folder, n_layer=layers)
    with pytest.raises(UserError, match=told):
        load_policy(policy)
    with pytest.raises(UserError, match=told):
        RewardModel.from_causal_lm(str(policy))
    with pytest.raises(UserError, match=told):
        load_reward_model(tmp_path / "reward", CPU)


@pytest.mark.parametrize(("file", "content"), [
    ("config.json", b"null"), ("config.json", b"[]"), ("config.json", b'{"a":' * 50_000), ("config.json", None),
    ("model.safetensors", b""), ("model.safetensors", b"\xff" * 64), ("model.safetensors", None)],
    ids=["null", "list", "deep", "folder", "empty weights", "torn weights", "folder of weights"])  # fmt: skip
def test_a_damaged_file_is_one_line_whichever_model_reads_it(policy, tmp_path, file, content):
    RewardModel.from_causal_lm(str(policy)).save_pretrained(str(tmp_path / "reward"))
    for folder in (policy, tmp_path / "reward"):
        (folder / file).unlink()
        (folder / file).mkdir() if content is None else (folder / file).write_bytes(content)
    for load in loaders(policy, tmp_path):
        with pytest.raises(UserError) as told:
            load()
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(policy, tmp_path, value):
    RewardModel.from_causal_lm(str(policy)).save_pretrained(str(tmp_path / "reward"))
    for folder in (policy, tmp_path / "reward"):
        weights = load_file(folder / "model.safetensors")
        weights[max(weights)].view(-1)[1] = value  # one of them
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for load in loaders(policy, tmp_path):
        with pytest.raises(UserError, match="has values that are not finite: use an earlier or another model"):
            load()

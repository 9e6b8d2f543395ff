"""What training takes: operations by the papers' formula, known peaks, and metrics that leave out what is not known."""

import pytest
import torch
from torch import nn

from rlhf.config import Config
from rlhf.config.model import ModelConfig
from rlhf.model.gpt import GPTConfig, GPTForCausalLM
from rlhf.planning import formulas
from rlhf.planning.formulas import make_shape
from rlhf.training.usage import forward_flops, known_peak, update_flops, usage_metrics

CPU = torch.device("cpu")
SHAPE = {"n_layer": 2, "n_head": 2, "width": 32, "context_length": 16}


def make_model() -> GPTForCausalLM:
    return GPTForCausalLM(GPTConfig(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2, **SHAPE))


def test_operations_are_those_of_the_plan_and_by_hand() -> None:
    shape, model = make_shape(ModelConfig(**SHAPE), 50), make_model()
    assert forward_flops(model, 100, 16) == formulas.shape_flops(shape, 100, 16)
    # 3 x 5 and 5 x 1 weights, 2 operations a weight and a token, no attention: 2 * 20 * 7
    model = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    assert forward_flops(model, 7, 100) == 280


def test_an_update_of_ppo_by_hand() -> None:
    policy, critic = nn.Linear(10, 10, bias=False), nn.Linear(10, 1, bias=False)
    # a token: policy 200, critic 20 operations. Sampling 200, reference 200, scoring by the critic 20; two passes of 3 x 220
    found = update_flops([policy, policy, critic], [policy, critic], 5, 5, passes=2)
    assert found == 5 * (200 + 200 + 20 + 2 * 3 * 220)


def test_peaks_by_name() -> None:
    peaks = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12}
    assert {name: known_peak(name, True) for name in peaks} == peaks
    assert known_peak("NVIDIA A100-SXM4-80GB", False) == 19.5e12 and known_peak("Some Other GPU", True) is None


def test_on_a_cpu_the_share_needs_a_setting() -> None:
    config = Config()
    assert usage_metrics(config, CPU, 1e12, 2.0).keys() == {"memory/peak_rss_mb"}
    config.tracking.peak_tflops = 2.0
    # 10^12 operations within 2 s, on 2 processes that could do 2 x 10^12 a second each: 0.5 / 4
    found = usage_metrics(config, CPU, 1e12, 2.0, processes=2)
    assert found["time/mfu"] == pytest.approx(0.125) and found["memory/peak_rss_mb"] > 50

"""Bytes by part: hand arithmetic, figures of the papers, and what autograd really keeps; and what training takes."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlhf.config import DEEPSPEED, Config
from rlhf.config.model import ModelConfig
from rlhf.engines.decoder import Decoder
from rlhf.model.gpt import GPTConfig, GPTForCausalLM, GPTModel
from rlhf.model.heads import RewardModel
from rlhf.ops import unembedding
from rlhf.planning import formulas
from rlhf.planning.formulas import make_shape, model_state_bytes
from rlhf.training.engine import shard_frozen
from rlhf.training.usage import forward_flops, known_peak, update_flops, usage_metrics


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 135.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1_of_the_zero_paper(zero, gigabytes):
    # 7.5e9 parameters, 64 GPUs, K = 12: 16 P there, 18 P under autocast, whose gradients are float32;
    # 4 P + 12 P/64 = 31.4; 2 P + 14 P/64 = 16.6; 16 P/64 = 1.875
    held = model_state_bytes(7_500_000_000, 64, zero, "bf16")
    assert round(sum(held.values()) / 1e9, 1) == gigabytes and held["host"] == 0


def test_parts_by_hand():
    # 10 parameters over 4 ranks: a share is 3 (rounded up); by ZeRO stage, precision and offload: weights, gradients, optimizer, host
    held = {
        (0, "bf16", False): (20, 40, 120, 0), (1, "bf16", False): (20, 20, 36, 0), (2, "bf16", False): (20, 6, 36, 0),
        (3, "bf16", False): (6, 6, 36, 0), (3, "fp32", False): (12, 12, 36, 0), (2, "bf16", True): (20, 0, 0, 42),
        (3, "bf16", True): (0, 0, 0, 48),
    }  # fmt: skip
    for (zero, dtype, offload), wanted in held.items():
        assert tuple(model_state_bytes(10, 4, zero, dtype, offload=offload).values()) == wanted


@given(st.integers(0, 10**12), st.integers(1, 5000), st.integers(0, 3), st.sampled_from(["bf16", "fp32"]))
def test_shards_make_a_whole_and_more_never_hold_more(parameters, world, zero, dtype):
    held, alone = model_state_bytes(parameters, world, zero, dtype), model_state_bytes(parameters, 1, zero, dtype)
    each = {(False, "bf16"): 18, (False, "fp32"): 16, (True, "bf16"): 16, (True, "fp32"): 20}[zero > 0, dtype]
    assert sum(alone.values()) == each * parameters
    for part, divided in (("weights", zero == 3), ("gradients", zero >= 2), ("optimizer", zero >= 1)):
        each = held[part] * (world if divided else 1)
        assert alone[part] <= each < alone[part] + 12 * world
    assert sum(model_state_bytes(parameters, world + 1, zero, dtype).values()) <= sum(held.values())


@pytest.mark.parametrize(("heads", "width"), [(96, 12288), (16, 2048)])
def test_a_block_of_the_paper_keeps_34_bytes(heads, width):
    # Korthikanti et al. 2022, equation 1 without its term of attention probabilities: s b h 34; in addition the log-sums of fused
    # attention, and what the paper leaves out: norms' statistics, 16 bytes
    shape = make_shape(ModelConfig(n_head=heads, width=width), 50257)
    assert formulas.block_activation_bytes(shape, "bf16", dropout=0.1) == 34 * width + 4 * heads + 16


def measure_saved(model, tokens) -> int:
    """Bytes of distinct storages that autograd keeps of the trunk, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = model(input_ids=tokens, use_cache=False).last_hidden_state
        model.last = hidden * model.embed_tokens.weight[0]  # an unembedding keeps the last norm's output
    return sum(kept.values())


KINDS = [
    {}, {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": False}, {"n_kv_head": 2}, {"positions": "rotary"},
    {"norm": "rmsnorm"}, {"mlp": "swiglu", "mlp_width": 100}, {"n_kv_head": 1, "positions": "rotary"},
    {"head_dim": 24}, {"window": 16},
]  # fmt: skip
# Kinds that keep less than the closed form counts, and by how much at most.
LESS = [
    ({"block": "one_norm"}, 0.07), ({"block": "parallel"}, 0.07), ({"block": "post"}, 0.03), ({"mlp": "relu"}, 0.35),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "less"), [*((kind, 0.0) for kind in KINDS), *LESS], ids=str)
def test_activations_are_what_autograd_keeps(kind, less):
    settings = ModelConfig(n_layer=3, n_head=8, width=128, context_length=64, **kind)
    fields = {k: v for k, v in asdict(settings).items() if k not in ("pretrained", "native", "dropout")}
    config = GPTConfig(vocab_size=64, **fields)
    rows, length = 4, 64
    tokens = torch.randint(0, 64, (rows, length))
    measured = measure_saved(GPTModel(config).train(), tokens)
    shape = make_shape(settings, 64)
    counted = formulas.activation_bytes(shape, rows * length, "fp32", checkpointing=False)
    assert 0.995 <= counted / measured <= 1.005 + less  # the rest: token ids, positions, rotary factors


def test_checkpointing_keeps_inputs_and_one_block():
    shape = make_shape(ModelConfig(n_layer=10, n_head=4, width=64), 50)
    whole = formulas.activation_bytes(shape, 1, "bf16", checkpointing=False)
    less = formulas.activation_bytes(shape, 1, "bf16", checkpointing=True)
    block = formulas.block_activation_bytes(shape, "bf16")
    # 10 blocks + the last norm's input and output (2 * 128); 10 inputs of 128, the one block less its own input, the same
    assert (whole, less) == (10 * block + 256, 10 * 128 + block - 128 + 256)


def test_cache_logits_and_buffers_by_hand():
    shape = make_shape(ModelConfig(n_layer=3, n_head=4, n_kv_head=2, width=8), 100)
    # 2 (keys, values) * 3 layers * 2 heads * 2 wide * 5 rows * 7 tokens * 2 bytes
    assert formulas.kv_cache_bytes(shape, 5, 7, "bf16") == 2 * 3 * 4 * 35 * 2 == 1680
    assert formulas.logit_bytes(10, 100) == 12_000
    assert (formulas.CHUNK, formulas.GPU_CHUNK) == (unembedding._CPU_CHUNK, unembedding._GPU_CHUNK)
    assert formulas.sampling_logit_bytes(5, 100, "bf16") == 500 * 18
    assert formulas.frozen_bytes(10, 8, 4, 2, "bf16") == 20 and formulas.frozen_bytes(10, 8, 4, 3, "bf16") == 6
    # without ZeRO the 2 parameters outside linear layers stay in float32
    assert formulas.frozen_bytes(10, 8, 4, 0, "bf16") == 24 and formulas.frozen_bytes(10, 8, 4, 0, "fp32") == 40
    assert formulas.buffer_bytes(1000, 1, 0, "bf16", 100) == 0  # one process sends nothing
    assert formulas.buffer_bytes(1000, 2, 0, "bf16", 100) == 4000  # all gradients once more
    found = [formulas.buffer_bytes(1000, 2, zero, dtype, 100) for zero, dtype in ((2, "bf16"), (3, "fp32"))]
    assert found == [600, 400]
    assert formulas.gathered_bytes(shape, "bf16") == 2 * (2 * shape.block_size + 800)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_cache_is_what_the_sampler_allocates(dtype, monkeypatch):
    # the loops in C keep float32, a GPU does not
    monkeypatch.setattr("rlhf.ops.fast.can_attend", lambda queries: False)
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "width": 32, "context_length": 64}
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        decoder = Decoder(GPTForCausalLM(GPTConfig(vocab_size=64, **sizes)))
        decoder.reserve(2, 60)  # in blocks of 64
    planned = formulas.kv_cache_bytes(make_shape(ModelConfig(**sizes), 64), 2, 64, dtype)
    assert planned == decoder.whole.untyped_storage().nbytes()


@pytest.mark.parametrize(("precision", "deepspeed", "tied"), [("float32", "none", True), ("bfloat16", "none", False),
                                                              ("bfloat16", "zero1", True)])  # fmt: skip
def test_frozen_models_hold_what_is_planned(precision, deepspeed, tied):
    sizes = {"n_layer": 2, "n_head": 4, "width": 32, "context_length": 64, "tie_word_embeddings": tied}
    settings, policy = ModelConfig(**sizes), GPTForCausalLM(GPTConfig(vocab_size=64, **sizes))
    reward = RewardModel.from_causal_lm(policy)
    shape, config = make_shape(settings, 64), Config(precision=precision, deepspeed=deepspeed)
    unembedding = 0 if tied else shape.embedding
    counts = [(shape.language_model, shape.linear_layers + unembedding), (shape.scalar_model, shape.linear_layers)]
    for model, (parameters, linear) in zip((policy, reward), counts, strict=True):
        shard_frozen(config, model, torch.device("cpu"))
        allocated = sum(p.untyped_storage().nbytes() for p in model.parameters())
        zero, dtype = DEEPSPEED[deepspeed][0], "bf16" if precision == "bfloat16" else "fp32"
        assert allocated == formulas.frozen_bytes(parameters, linear, 1, zero, dtype)


CPU = torch.device("cpu")
SHAPE = {"n_layer": 2, "n_head": 2, "width": 32, "context_length": 16}


def make_model() -> GPTForCausalLM:
    return GPTForCausalLM(GPTConfig(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2, **SHAPE))


def test_operations_of_a_forward_and_of_an_update_of_ppo_by_hand():
    shape, model = make_shape(ModelConfig(**SHAPE), 50), make_model()
    assert forward_flops(model, 100, 16) == formulas.shape_flops(shape, 100, 16)
    # 3 x 5 and 5 x 1 weights, 2 operations a weight and a token, no attention: 2 * 20 * 7
    model = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    assert forward_flops(model, 7, 100) == 280
    policy, critic = nn.Linear(10, 10, bias=False), nn.Linear(10, 1, bias=False)
    # a token: policy 200, critic 20 operations. Sampling 200, reference 200, scoring by the critic 20; two passes of 3 x 220
    found = update_flops([policy, policy, critic], [policy, critic], 5, 5, passes=2)
    assert found == 5 * (200 + 200 + 20 + 2 * 3 * 220)


def test_peaks_by_name_or_by_a_setting():
    peaks = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12}
    assert {name: known_peak(name, True) for name in peaks} == peaks
    assert known_peak("NVIDIA A100-SXM4-80GB", False) == 19.5e12 and known_peak("Some Other GPU", True) is None
    config = Config()
    assert usage_metrics(config, CPU, 1e12, 2.0).keys() == {"memory/peak_rss_mb"}
    config.tracking.peak_tflops = 2.0
    # 10^12 operations within 2 s, on 2 processes that could do 2 x 10^12 a second each: 0.5 / 4
    found = usage_metrics(config, CPU, 1e12, 2.0, processes=2)
    assert found["time/mfu"] == pytest.approx(0.125) and found["memory/peak_rss_mb"] > 50

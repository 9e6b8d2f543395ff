"""Closed-form parameter counts against the model itself on the meta device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config import compose
from rlhf.config.model import ModelConfig, shape_of
from rlhf.planning.shapes import make_shape


def preset(name: str):
    config = compose.compose_config([f"model={name}"])
    return config.model, config.tokenizer.vocab_size


def count(model: ModelConfig, vocab_size: int) -> tuple[int, int]:
    """Parameters of the language model and of the reward model, built on the meta device."""
    from rlhf.model.gpt import GPTConfig, GPTForCausalLM
    from rlhf.model.heads import RewardConfig, RewardModel

    shape = GPTConfig(vocab_size=vocab_size, **shape_of(model))
    with torch.device("meta"):
        built = GPTForCausalLM(shape), RewardModel(RewardConfig(trunk=shape))
    language, scalar = (sum(p.numel() for p in {id(p): p for p in one.parameters()}.values()) for one in built)
    return language, scalar


@pytest.mark.parametrize(
    "name",
    ["gpt1", "gpt2", "gpt3-xl", "palm-8b", "llama-7b", "llama-2-70b", "tiny", "gpt1-tiny", "palm-tiny", "switch-tiny"],
)
def test_the_closed_form_counts_what_the_model_has(name):
    model, vocab_size = preset(name)
    shape = make_shape(model, vocab_size)
    assert (shape.language_model, shape.scalar_model) == count(model, vocab_size)


def test_the_settings_defaults_are_the_models_own():
    from rlhf.model.gpt import GPTConfig

    wanted = {**shape_of(ModelConfig()), "n_kv_head": 12, "head_dim": 64, "mlp_width": 3072}
    assert {name: getattr(GPTConfig(), name) for name in wanted} == wanted


def test_gpt2_by_hand():
    # 50257*768 + 1024*768 + 12*(12*768^2 + 13*768) + 2*768 = 38,597,376 + 786,432 + 85,054,464 + 1,536
    assert make_shape(ModelConfig(), 50257).language_model == 124_439_808


@settings(max_examples=25, deadline=None)
@given(
    n_layer=st.integers(1, 3),
    heads=st.sampled_from([(4, None), (4, 1), (4, 2), (6, 3)]),
    factor=st.integers(1, 9),
    mlp_width=st.none() | st.integers(1, 70),
    positions=st.sampled_from(["learned", "rotary", "sinusoidal"]),
    norm=st.sampled_from(["layernorm", "rmsnorm"]),
    mlp=st.sampled_from(["gelu", "relu", "swiglu"]),
    bias=st.booleans(),
    tie_word_embeddings=st.booleans(),
    vocab_size=st.integers(1, 300),
    context_length=st.integers(1, 64),
    head_dim=st.none() | st.sampled_from([2, 6]),
    block=st.sampled_from(["pre", "post", "parallel", "one_norm"]),
    qk_norm=st.booleans(),
    experts=st.integers(0, 3),
    expert_every=st.integers(1, 3),
    window=st.none() | st.just(4),
)
def test_any_shape_is_counted_exactly(heads, factor, vocab_size, **kinds):
    model = ModelConfig(n_head=heads[0], n_kv_head=heads[1], width=heads[0] * 2 * factor, **kinds)
    shape = make_shape(model, vocab_size)
    assert (shape.language_model, shape.scalar_model) == count(model, vocab_size)

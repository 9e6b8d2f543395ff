"""Sampling on a pretended GPU: the samples of the CPU, few waits."""

import contextlib

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from rlhf.engines.choosing import Choice, Sampling
from rlhf.engines.running import Response, RunningBatch
from rlhf.engines.sampling import sample, sampler_for
from rlhf.model import GPTForCausalLM
from tests.gpu.pretended import Pretended
from tests.presets import preset

PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 4, 3, 4, 3, 4, 3, 4], [21, 22, 23]] * 2
KINDS = {
    "gpt3": {}, "llama": {"preset": "llama-tiny"}, "grouped": {"preset": "llama-tiny", "n_kv_head": 2},
    "window": {"window": 6}, "palm": {"preset": "palm-tiny"}, "switch": {"preset": "switch-tiny"},
}  # fmt: skip
SETTINGS = {"max_new_tokens": 12, "eos_token_id": [20, 22, 23, 25, 27, 33], "pad_token_id": 0, "seed": 3}


def make(kind: str = "gpt3") -> GPTForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "context_length": 600, "n_layer": 2, "n_head": 4, "width": 64}
    changes = dict(KINDS[kind])
    return GPTForCausalLM(preset(changes.pop("preset", "tiny"), **(sizes | changes))).eval()


def change(model: GPTForCausalLM) -> None:
    """What an optimizer does between two updates: other values at the same addresses."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p.device))


def with_adapters(model: GPTForCausalLM) -> GPTForCausalLM:
    model = inject_adapter_in_model(LoraConfig(r=4, target_modules=["qkv"], init_lora_weights=False), model)
    return model


def check_equal(found, wanted) -> None:
    assert found.responses == wanted.responses
    assert torch.allclose(found.logprobs.cpu(), wanted.logprobs, atol=2e-5, rtol=0.0)


@pytest.mark.parametrize(("kind", "adapters"), [*((kind, False) for kind in KINDS), ("llama", True)])
def test_the_samples_are_those_of_the_cpu_before_and_after_an_update(kind, adapters):
    model, other = (with_adapters(make(kind)) if adapters else make(kind) for _ in "ab")
    wanted = [sample(model, PROMPTS, **SETTINGS)]
    change(model)
    wanted.append(sample(model, PROMPTS, **SETTINGS))
    assert wanted[0].responses != wanted[1].responses
    with Pretended():
        other = other.to("cuda")
        engine = sampler_for(other, Sampling(**SETTINGS))
        check_equal(engine.sample(PROMPTS), wanted[0])
        change(other)
        check_equal(engine.sample(PROMPTS), wanted[1])


@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "bfloat16 weights"])
def test_half_precision_samples_with_the_new_weights_after_an_update(cast):
    """In bfloat16 tokens may differ from the CPU's; so each update's log-probs are compared with a fresh engine's."""
    with Pretended(), torch.autocast("cuda", torch.bfloat16, enabled=cast):
        model = make("llama").to("cuda")
        model = model if cast else model.bfloat16()
        engine = sampler_for(model, Sampling(**SETTINGS))
        first = engine.sample(PROMPTS)
        change(model)
        found, fresh = engine.sample(PROMPTS), sample(model, PROMPTS, **SETTINGS)
        assert found.responses == fresh.responses != first.responses
        assert torch.equal(found.logprobs, fresh.logprobs)


def test_sampling_waits_once_in_eight_tokens():
    with Pretended() as gpu:
        sampler_for(make().to("cuda"), Sampling(**SETTINGS | {"eos_token_id": [20]})).sample(PROMPTS)
    per_step = sum(n for at, n in gpu.log.sync_places.items() if "sampling.py" in at or "drop" in at or "step" in at)
    assert per_step <= 8, gpu.log.sync_places


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_a_servers_batch_gives_the_samplers_tokens(half):
    model = make("llama")
    wanted = sample(model, PROMPTS[:5], **SETTINGS | {"eos_token_id": None})
    with Pretended(), torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext():
        batch = RunningBatch(model.to("cuda"), 8)
        ones = [Response(p, Choice(), 3, i, 12, frozenset()) for i, p in enumerate(PROMPTS[:5])]
        batch.advance(ones[:2])
        batch.advance(ones[2:])
        while len(batch):
            for one in [one for one in batch.responses if one.finished]:
                batch.leave(one)
            if len(batch):
                batch.advance()
    if not half:
        assert [one.tokens for one in ones] == wanted.responses
    assert all(len(one.tokens) == 12 for one in ones)

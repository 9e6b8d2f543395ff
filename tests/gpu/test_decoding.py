"""Sampling through recorded graphs on a pretended GPU: the samples of the CPU, few recordings, few waits."""

import contextlib
from collections import Counter

import pytest
import torch

from rlhf.engines import decoder
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
    "post-norm": {"block": "post", "positions": "sinusoidal", "mlp": "relu"},
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
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=4, target_modules=["qkv"], init_lora_weights=False), model)


def check_equal(found, wanted) -> None:
    assert found.responses == wanted.responses
    assert torch.allclose(found.logprobs.cpu(), wanted.logprobs, atol=2e-5, rtol=0.0)


@pytest.mark.parametrize(("kind", "adapters"), [*((kind, False) for kind in KINDS), ("llama", True)])
def test_recorded_steps_give_the_samples_of_the_cpu_before_and_after_an_update(kind, adapters):
    model, other = (with_adapters(make(kind)) if adapters else make(kind) for _ in "ab")
    wanted = [sample(model, PROMPTS, **SETTINGS)]
    change(model)
    wanted.append(sample(model, PROMPTS, **SETTINGS))
    assert wanted[0].responses != wanted[1].responses
    with Pretended() as gpu:
        other = other.to("cuda")
        engine = sampler_for(other, Sampling(**SETTINGS))
        check_equal(engine.sample(PROMPTS), wanted[0])
        change(other)
        check_equal(engine.sample(PROMPTS), wanted[1])
        held = sum(graph is not None for graph in engine.lasting.graphs.values())
        assert gpu.log.captures == held, "a graph was thrown away"
        assert bool(held) == (kind != "switch")


@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "bfloat16 weights"])
def test_half_precision_samples_with_the_new_weights_after_an_update(cast):
    """In bfloat16 tokens may differ from the CPU's; so each update's log-probs are compared with a fresh engine's."""
    with Pretended() as gpu, torch.autocast("cuda", torch.bfloat16, enabled=cast):
        model = make("llama").to("cuda")
        model = model if cast else model.bfloat16()
        engine = sampler_for(model, Sampling(**SETTINGS))
        first = engine.sample(PROMPTS)
        captures = gpu.log.captures
        change(model)
        found, fresh = engine.sample(PROMPTS), sample(model, PROMPTS, **SETTINGS)
        assert gpu.log.captures > captures > 0  # the fresh engine's
        assert found.responses == fresh.responses != first.responses
        # bfloat16 has 8 bits, so batches of other shapes round differently: 0.001 apart under autocast, 0 with bfloat16 weights
        assert torch.allclose(found.logprobs.cpu(), fresh.logprobs.cpu(), atol=0.02, rtol=0.0)


def test_one_run_records_few_graphs_and_waits_once_in_eight_tokens():
    with Pretended() as gpu:
        engine = sampler_for(make().to("cuda"), Sampling(**SETTINGS | {"eos_token_id": [20]}))
        for _ in range(2):
            engine.sample(PROMPTS)
        recorded, before = gpu.log.captures, gpu.log.snapshot()
        waits = Counter(gpu.log.sync_places)
        engine.sample(PROMPTS)
        after = gpu.log.since(before)
    assert recorded <= 4  # powers of two up to 8 rows, one block of columns
    assert after["captures"] == 0 and after["replays"] >= 11
    stepping = Counter(gpu.log.sync_places) - waits
    per_step = sum(n for place, n in stepping.items() if "sampling.py" in place or "drop" in place or "step" in place)
    assert per_step <= 5, stepping  # one look in 12 steps, with up to five waits if it drops rows
    launched = after["kernels"] / SETTINGS["max_new_tokens"]
    assert launched < 60, launched  # choosing a token; the model's own operations are in the replays


def test_another_model_or_other_addresses_are_never_written_to():
    """ZeRO-3 gives the whole weights at other addresses each time; another model's weights must stay as they are."""
    model, other = make(), make()
    change(other)
    wanted = [sample(m, PROMPTS, **SETTINGS) for m in (model, other, model)]
    with Pretended():
        model, other = model.to("cuda"), other.to("cuda")
        before = [p.clone() for m in (model, other) for p in m.parameters()]
        engine = sampler_for(model, Sampling(**SETTINGS))
        for one, want in zip((model, other, model), wanted, strict=True):
            engine.load(one)
            check_equal(engine.sample(PROMPTS), want)
        after = [p for m in (model, other) for p in m.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_a_servers_batch_records_and_gives_the_samplers_tokens(half):
    model = make("llama")
    wanted = sample(model, PROMPTS[:5], **SETTINGS | {"eos_token_id": None})
    with Pretended() as gpu, torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext():
        batch = RunningBatch(model.to("cuda"), 8)
        ones = [Response(p, Choice(), 3, i, 12, frozenset()) for i, p in enumerate(PROMPTS[:5])]
        batch.advance(ones[:2])
        batch.advance(ones[2:])
        while len(batch):
            for one in [one for one in batch.responses if one.finished]:
                batch.leave(one)
            if len(batch):
                batch.advance()
        assert gpu.log.captures <= 4 and gpu.log.replays >= 6
    if not half:
        assert [one.tokens for one in ones] == wanted.responses
    assert all(len(one.tokens) == 12 for one in ones)


def test_a_cache_that_grew_has_new_graphs():
    """In rows, then in columns; the shapes of smaller batches come again."""
    model, calls = make(), ((1, 12), (2, 12), (1, 12), (1, 70), (1, 12))
    wanted = [sample(model, PROMPTS * copies, **SETTINGS | {"max_new_tokens": n}) for copies, n in calls]
    with Pretended() as gpu:
        engine = sampler_for(model.to("cuda"), Sampling(**SETTINGS))
        for want, (copies, steps) in zip(wanted, calls, strict=True):
            check_equal(engine.sample(PROMPTS * copies, max_new_tokens=steps), want)
        assert engine.lasting.rows == 16 and engine.lasting.columns >= 78
        captures = gpu.log.captures
        engine.sample(PROMPTS)
        assert gpu.log.captures == captures


def test_blocks_of_columns_end(monkeypatch):
    monkeypatch.setattr(decoder, "COLUMN_BLOCK", 8)
    model = make("window")
    wanted = sample(model, PROMPTS, **SETTINGS)
    with Pretended():
        check_equal(sample(model.to("cuda"), PROMPTS, **SETTINGS), wanted)

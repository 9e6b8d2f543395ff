"""The running batch of a server: the same tokens as `sample`, whatever joins and leaves meanwhile."""

import random

import pytest
import torch
from transformers import BambaConfig, BambaForCausalLM

from rlhf.cpu import kernels, products
from rlhf.engines.choosing import Choice
from rlhf.engines.running import Response, RunningBatch
from rlhf.engines.sampling import packed, sample
from tests.model.test_generate import ALL, make
from tests.presets import make_gpt

EOS, NEW = (7, 12, 27), 20


def prompts(count: int, vocabulary: int = 40) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 11))] for _ in range(count)]


def drawn_by_batch(model, asked, rows: int, chance: float, seed: int = 5, **choice) -> list[list[int]]:
    """Responses of a running batch; requests join at random times, and some others leave before they are finished."""
    rng = random.Random(1)
    batch, waiting = RunningBatch(model, rows), list(enumerate(asked))
    out: dict[int, list[int]] = {}
    while waiting or len(batch):
        new = []
        while waiting and len(batch) + len(new) < rows - 1 and rng.random() < chance:
            place, prompt = waiting.pop(0)
            new.append(Response(prompt, Choice(**choice), seed, place, NEW, frozenset(EOS)))
        if rng.random() < 0.2 and len(batch) + len(new) < rows:  # a client that will leave
            new.append(Response([3, 4], Choice(1.5), 9, "leaver", NEW, frozenset()))
        if new or len(batch):
            batch.advance(new)
        for one in list(batch.responses):
            if one.finished or (one.key == "leaver" and rng.random() < 0.3):
                batch.leave(one)
                out[one.key] = one.tokens
    return [out[i] for i in range(len(asked))]


@pytest.mark.parametrize(("kind", "compiled"), [*((kind, True) for kind in ALL), ("llama", False)])
def test_a_response_is_the_samplers_whatever_joins_and_leaves(kind, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(kernels, "compiled", lambda: None)
    model, asked = make(kind), prompts(14)
    for choice in ({}, {"temperature": 1.3, "top_p": 0.8}, {"greedy": True}):
        expected = sample(model, asked, max_new_tokens=NEW, eos_token_id=EOS, pad_token_id=0, seed=5, **choice)
        assert len(set(map(len, expected.responses))) > 3
        assert drawn_by_batch(model, asked, 5, 0.6, **choice) == expected.responses


def test_packed_weights_and_many_sequences(monkeypatch):
    monkeypatch.setattr(products, "PACKED_WIDTH", 256)  # without AVX-512 too
    model = make_gpt(vocab_size=512, context_length=64, n_head=4, width=256)
    asked = prompts(100, 512)
    settings = {"max_new_tokens": NEW, "eos_token_id": EOS, "pad_token_id": 0, "seed": 5}
    expected = sample(model, asked, **settings).responses
    with packed(model, 13):
        assert drawn_by_batch(model, asked, 13, 0.8) == expected
    assert sample(model, asked, **settings, batch_size=7).responses == expected


@torch.no_grad()
def test_a_class_that_counts_positions_in_each_call_is_told_where_its_token_stands():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "attn_layer_indices": [1],
        "num_attention_heads": 2, "num_key_value_heads": 2,
        "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    }  # fmt: skip
    model = BambaForCausalLM(BambaConfig(**sizes)).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    one = Response([3, 4, 5, 6, 7, 8], Choice(greedy=True), 0, 0, 6, frozenset())
    batch = RunningBatch(model, 1)
    batch.advance([one])
    while not one.finished:
        batch.advance([])
    text = torch.tensor([one.prompt + one.tokens])
    expected = model(text, use_cache=False).logits[0, 5:-1].log_softmax(-1)[range(6), one.tokens]
    torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-5, rtol=0)

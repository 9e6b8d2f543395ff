"""The sampler against forwards without a cache, against the softmax it draws from, and against its own
batching.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from rlhf.config.compose import compose_config
from rlhf.engines import decoder
from rlhf.engines.choosing import Choice, _cut, choose_tokens, make_uniforms
from rlhf.engines.sampling import make_sampler, sample
from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.model.fused_loss import response_logprobs
from tests.presets import make_gpt

VOCAB, NEW, PAD = 40, 12, 0
KINDS = {
    "gpt2": {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True},
    "llama": {"n_kv_head": 2},
    "qk_norm": {"qk_norm": True, "n_kv_head": 1, "tie_word_embeddings": False},
    "post_norm": {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "block": "post"},
    "parallel": {"norm": "layernorm", "mlp": "gelu_erf", "bias": True, "block": "parallel", "rotary_share": 0.5},
    "wide_heads": {"head_dim": 20, "n_kv_head": 2, "qkv_bias": True},
    "sinusoidal": {"positions": "sinusoidal", "norm": "layernorm", "mlp": "relu", "block": "post"},
    "banded": {"positions": "learned", "window": 3},
    "one_norm": {"norm": "layernorm", "block": "one_norm", "n_kv_head": 1, "head_dim": 12},
    "switch": {"experts": 4, "qk_norm": True},
}
PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 4, 3, 4, 3, 4, 3, 4], [21, 22, 23], [9, 8, 7, 6, 5], [30, 2]]


def make(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "transformers":
        sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    else:
        model = make_gpt(vocab_size=VOCAB, n_head=4, width=64, **KINDS[kind])
    for parameter in model.parameters():  # far from uniform, so that choices differ
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


ALL = [*KINDS, "transformers"]
SETTINGS = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": PAD}


@torch.no_grad()
def logprobs_by_forward(model, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(len(response), V) log-probs before each response token, one row, no cache, no padding."""
    logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


@torch.no_grad()
def greedy_by_forward(model, prompt: list[int], eos: int | None) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ALL)
def test_greedy_equals_token_by_token(kind):
    model = make(kind)
    plain = [greedy_by_forward(model, prompt, None) for prompt in PROMPTS]
    eos = plain[2][4]  # a token that ends one response in the middle
    expected = [greedy_by_forward(model, prompt, eos) for prompt in PROMPTS]
    assert len({len(response) for response in expected}) > 1
    out = sample(model, PROMPTS, **{**SETTINGS, "eos_token_id": eos}, greedy=True)
    assert out.responses == expected
    assert out.ended.tolist() == [response[-1] == eos for response in expected]
    assert out.mask.sum(1).tolist() == [len(response) for response in expected]
    assert out.logprobs.shape == out.mask.shape == (len(PROMPTS), max(map(len, expected)))
    assert out.logprobs.dtype == torch.float32 and (out.logprobs[~out.mask] == 0).all()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_logprobs_equal_a_forward(kind, temperature):
    model = make(kind)
    ends = [7, 13, 20, 27, 35]
    out = sample(model, PROMPTS, **{**SETTINGS, "eos_token_id": ends}, temperature=temperature, seed=3)
    assert out.ended.any() and not out.mask.all()
    for prompt, response, logp, mask in zip(PROMPTS, out.responses, out.logprobs, out.mask, strict=True):
        expected = logprobs_by_forward(model, prompt, response, temperature)
        expected = expected.gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert torch.allclose(logp[mask], expected, rtol=0, atol=1e-4)
        assert not any(token in ends for token in response[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_read_in_parts_change_nothing(kind, monkeypatch):
    model = make(kind)
    whole = sample(model, PROMPTS, **SETTINGS, seed=3)
    empty = torch.Tensor.new_empty  # what a new cache holds may be anything, not a number among it
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **more: empty(x, *size, **more).fill_(torch.nan))
    monkeypatch.setattr(decoder, "scoring_tokens", lambda model: 12)
    parts = sample(model, PROMPTS, **SETTINGS, seed=3)
    assert parts.responses == whole.responses
    assert torch.allclose(parts.logprobs, whole.logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_asked_several_times_is_read_once(kind, monkeypatch):
    model, keys = make(kind), [(i, j) for i in range(len(PROMPTS)) for j in range(1 + i % 3)]
    asked = [PROMPTS[i] for i, _ in keys]
    alone = [sample(model, [p], keys=[key], **SETTINGS, seed=3) for p, key in zip(asked, keys, strict=True)]
    empty, read = torch.Tensor.new_empty, []
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **more: empty(x, *size, **more).fill_(torch.nan))
    model.model.embed_tokens.register_forward_hook(lambda module, given, _: read.append(given[0]))
    found = sample(model, asked, keys=keys, **SETTINGS, seed=3)
    assert found.responses == [one.responses[0] for one in alone]
    assert torch.allclose(found.logprobs, torch.cat([one.logprobs for one in alone]), atol=1e-5)
    assert sum(len(tokens) for tokens in read if tokens.dim() == 2) == len(PROMPTS)


@pytest.mark.parametrize("vocabulary", [40, 64, 65, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.2])
def test_the_search_in_blocks_is_the_search_in_all(vocabulary, top_p):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(500, vocabulary, generator=generator)
    logits[:, 5] = -torch.inf
    uniforms = torch.rand(500, generator=generator)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-24])
    choice = Choice(temperature=1.3, top_p=top_p)
    tokens, logp = choose_tokens(logits, uniforms, choice)
    reference = torch.log_softmax(logits.double() / 1.3, -1)
    kept = _cut(reference.exp().float(), top_p)
    cumulative = kept.double().cumsum(-1)
    plain = torch.searchsorted(cumulative, uniforms[:, None].double() * cumulative[:, -1:], right=True)[:, 0]
    # a number that falls within rounding of a boundary may go either way
    assert (tokens == plain).float().mean() > 0.995
    assert (kept.gather(-1, tokens[:, None]) > 0).all(), "a token that was cut, or impossible, was chosen"
    torch.testing.assert_close(logp, reference.gather(-1, tokens[:, None])[:, 0].float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ALL)
def test_samples_depend_on_neither_batch_nor_order(kind):
    model, keys = make(kind), [(4, i) for i in range(len(PROMPTS))]
    settings = {**SETTINGS, "eos_token_id": 7, "seed": 2}
    whole = sample(model, PROMPTS, keys=keys, **settings)
    split = sample(model, PROMPTS, keys=keys, batch_size=2, **settings)
    assert split.responses == whole.responses
    assert torch.allclose(split.logprobs, whole.logprobs, atol=1e-5)
    order = [3, 0, 5, 1, 4, 2]
    moved = sample(model, [PROMPTS[i] for i in order], keys=[keys[i] for i in order], **settings)
    assert moved.responses == [whole.responses[i] for i in order]
    assert torch.allclose(moved.logprobs, whole.logprobs[order], atol=1e-5)
    alone = sample(model, PROMPTS[2:3], keys=keys[2:3], **settings)
    assert alone.responses[0] == whole.responses[2]


def test_the_cache_takes_an_eighth_of_the_memory_budget_at_most():
    model, tokenizer = make(ALL[0]), SimpleNamespace(eos_token_id=7, pad_token_id=PAD, init_kwargs={})
    wide, narrow = (
        make_sampler(compose_config(["rollout.max_new_tokens=4", *budget]), model, tokenizer)
        for budget in ([], ["memory.budget_gb=4e-5"])
    )
    # keys and values of 2 layers of width 64, or less with fewer heads, and 4 bytes: 5,000 bytes hold at most a few rows of 12
    assert narrow.settings.cache_bytes == 5_000 and narrow.most_rows(12) < 8 < wide.most_rows(12)
    assert narrow.sample(PROMPTS).responses == wide.sample(PROMPTS).responses


def test_seed_and_key_choose_the_sample():
    model, prompts = make("llama"), [PROMPTS[0]] * 3
    out = sample(model, prompts, **SETTINGS, keys=[1, 1, 2])
    assert out.responses[0] == out.responses[1] != out.responses[2]

    assert sample(model, prompts, **SETTINGS, keys=[1, 1, 2], seed=1).responses != out.responses
    torch.manual_seed(123)  # the global generator plays no part, and is not touched
    state = torch.get_rng_state()
    assert sample(model, prompts, **SETTINGS, keys=[1, 1, 2]).responses == out.responses
    assert torch.equal(torch.get_rng_state(), state)


def test_uniforms_are_uniform_and_uncorrelated():
    u = make_uniforms(0, range(2000), 20).double()
    assert u.min() >= 0 and u.max() < 1
    # 40000 draws: the standard error of the mean is sqrt(1/12/40000) = 0.0014, of the variance 0.0004
    assert abs(u.mean() - 0.5) < 4 * 0.0014 and abs(u.var() - 1 / 12) < 4 * 0.0004
    flat = u - 0.5
    for a, b in ((flat[:, 1:], flat[:, :-1]), (flat[1:], flat[:-1])):  # neighbours in step and in key
        assert abs((a * b).mean() * 12) < 4 / math.sqrt(a.numel())


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected)[expected > 0].sum())


@pytest.mark.parametrize("kind", ["llama", "transformers"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_follow_the_softmax(kind, temperature):
    model, draws = make(kind), 4000
    out = sample(model, [PROMPTS[3]] * draws, **{**SETTINGS, "max_new_tokens": 1}, temperature=temperature)
    counts = torch.bincount(torch.tensor(out.responses)[:, 0], minlength=VOCAB).double()
    probs = logprobs_by_forward(model, PROMPTS[3], [0], temperature)[0].exp().double()
    # 39 degrees of freedom: mean 39, deviation sqrt(78) = 8.8; rare tokens (expected < 1) are pooled
    rare = probs * draws < 1
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    probs = torch.cat([probs[~rare], probs[rare].sum()[None]])
    assert chi_square(counts, probs) < 39 + 4 * 8.8
    assert chi_square(counts, torch.full_like(probs, 1 / len(probs))) > 39 + 4 * 8.8  # the test can fail


def test_cuts_keep_the_likeliest():
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    logits, u = probs.log().expand(1000, -1), torch.arange(1000) / 1000
    # 0.4 + 0.3 covers 0.69
    for top_p, kept in ((0.69, [0, 1]), (0.71, [0, 1, 2]), (0.4, [0]), (1.0, [0, 1, 2, 3, 4])):
        choice = Choice(top_p=top_p)
        tokens, logp = choose_tokens(logits, u, choice)
        assert tokens.unique().tolist() == kept
        shares = torch.bincount(tokens, minlength=5) / 1000
        renormalised = torch.zeros(5)
        renormalised[kept] = probs[kept] / probs[kept].sum()
        # of 1000 evenly spaced numbers an interval contains its length times 1000, or up to one more or less
        torch.testing.assert_close(shares, renormalised, atol=1e-3, rtol=1e-5)
        assert torch.allclose(logp, probs.log()[tokens])  # of the full softmax


def test_rounding_never_chooses_an_impossible_token():
    logits = torch.randn(4000, 30, generator=torch.Generator().manual_seed(0))  # totals on both sides of 1
    logits[:, 0] = logits[:, 20:] = -torch.inf
    for u, possible in ((0.0, 1), (1 - 2**-24, 19)):
        for choice in (Choice(), Choice(top_p=0.999999)):
            tokens, logp = choose_tokens(logits, torch.full((4000,), u), choice)
            assert torch.isfinite(logp).all()
            assert tokens.unique().tolist() == [possible] or choice.top_p < 1


@pytest.mark.parametrize("kind", ["llama", "transformers"])
def test_the_model_is_left_as_it_was(kind):
    model = make(kind).train()
    frozen = next(module for module in model.modules() if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm))
    frozen.eval()
    model.generation_config = GenerationConfig(repetition_penalty=9.0, top_k=3)
    out = sample(model, PROMPTS, **SETTINGS, seed=4)
    assert model.training and not frozen.training and model.generation_config.repetition_penalty == 9.0
    model.generation_config = GenerationConfig()
    assert sample(model, PROMPTS, **SETTINGS, seed=4).responses == out.responses  # its own penalties do not apply
    tokens = torch.tensor([PROMPTS[0]])
    model(tokens, labels=tokens).loss.backward()  # nothing of inference mode is left behind


def test_under_autocast_the_sampler_computes_logits_as_training_does():
    """In bfloat16 logits near -80 would be off by up to 0.25 nats, and the tokens drawn from another distribution."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "width": 64, "vocab_size": 300, "context_length": 32}
    model = GPTForCausalLM(GPTConfig(**sizes, tie_word_embeddings=False)).eval()
    model.model.norm.bias.data.fill_(1.0)
    model.lm_head.weight.data.normal_(0.0, 0.3).sub_(80 / 64)
    prompts = [[3 + i, 4, 5][: 1 + i % 3] for i in range(24)]
    with torch.autocast("cpu", torch.bfloat16):
        samples = sample(model, prompts, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
        mask = samples.mask
        rows = [p + r for p, r in zip(prompts, samples.responses, strict=True)]
        gaps = []
        for i, row in enumerate(rows):
            tokens, start = torch.tensor([row]), torch.tensor([len(prompts[i])])
            with torch.no_grad():
                gaps.append((response_logprobs(model, tokens, start, mask[i : i + 1])[0] - samples.logprobs[i]).abs())
    assert model(torch.tensor(rows[:1])).logits.mean() < -70
    # hidden states of 8 bits; logits of 8 bits would be off by up to 0.25
    assert torch.cat(gaps).mean() < 0.01 and torch.cat(gaps).max() < 0.1


def test_each_step_has_a_random_number_of_its_own():
    """If every token is as likely as any other, one number for all steps would repeat one token."""
    model = make("llama")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    (response,) = sample(model, [PROMPTS[0]], max_new_tokens=16, eos_token_id=None, pad_token_id=0).responses
    assert len(set(response)) > 8

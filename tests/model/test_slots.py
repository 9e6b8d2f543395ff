"""The running batch of a server: the same tokens as `sample`, whatever joins and leaves meanwhile."""

import math
import random

import pytest
import torch

from rlhf.cpu import kernels
from rlhf.engines import settled, slots
from rlhf.engines.choosing import Choice, _cut
from rlhf.engines.sampler import sample
from rlhf.engines.settled import CLOSE, _draw, gumbel_noise, make_noise_seeds
from rlhf.engines.slots import Response, RunningBatch
from rlhf.model import GPTForCausalLM, packed
from rlhf.model.packed import packed_weights
from tests.model.test_generate import ALL, make
from tests.presets import preset

EOS, NEW = (7, 12, 27), 20


def prompts(count: int, vocabulary: int = 40) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 11))] for _ in range(count)]


def drawn_by_batch(model, asked, rows: int, chance: float, seed: int = 5, **choice) -> list[list[int]]:
    """The responses of a running batch that requests join at random; some others leave before they are finished."""
    rng = random.Random(1)
    batch, waiting = RunningBatch(model, rows), list(enumerate(asked))
    out: dict[int, list[int]] = {}
    while waiting or len(batch):
        new = []
        while waiting and len(batch) + len(new) < rows - 1 and rng.random() < chance:
            place, prompt = waiting.pop(0)
            new.append(Response(prompt, Choice(settled=True, **choice), seed, place, NEW, frozenset(EOS)))
        if rng.random() < 0.2 and len(batch) + len(new) < rows:  # a client that will leave
            new.append(Response([3, 4], Choice(1.5, settled=True), 9, "leaver", NEW, frozenset()))
        if new or len(batch):
            batch.advance(new)
        for one in list(batch.responses):
            if one.finished or (one.key == "leaver" and rng.random() < 0.3):
                batch.leave(one)
                out[one.key] = one.tokens
    return [out[i] for i in range(len(asked))]


WAYS = ["together", "one at a time", "by torch"]


def read_by(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in one pass with the others' tokens, in passes of their own if there is more than one token, or by torch alone."""
    if way == "one at a time":
        monkeypatch.setattr(slots, "TOGETHER", 1)
    if way == "by torch":
        monkeypatch.setattr(kernels, "compiled", lambda: None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ALL)
def test_a_response_is_the_samplers_whatever_joins_and_leaves(kind, way, monkeypatch):
    read_by(way, monkeypatch)
    model, asked = make(kind), prompts(14)
    for choice in ({}, {"temperature": 1.3, "top_p": 0.8}, {"greedy": True}):
        expected = sample(
            model, asked, max_new_tokens=NEW, eos_token_id=EOS, pad_token_id=0, seed=5, settled=True, **choice
        )
        assert len(set(map(len, expected.responses))) > 3
        assert drawn_by_batch(model, asked, 5, 0.6, **choice) == expected.responses


@pytest.mark.parametrize("way", WAYS)
def test_equal_prompts_are_read_once(way, monkeypatch):
    read_by(way, monkeypatch)
    model, asked = make("llama"), [[3, 4, 5], [6, 7], [3, 4, 5], [8, 9, 10, 11], [6, 7], [3, 4, 5]]
    expected = sample(model, asked, max_new_tokens=NEW, eos_token_id=EOS, pad_token_id=0, seed=5, settled=True)
    rows: list[int] = []
    batch = RunningBatch(model, 8)
    for name in ("_read_together", "_read_prompts"):
        read = getattr(batch.slots, name)
        monkeypatch.setattr(batch.slots, name, lambda *a, read=read: (rows.append(len(a[-1])), read(*a))[1])
    batch.advance([Response([1, 2], Choice(settled=True), 9, "before", NEW, frozenset())])
    made = [Response(p, Choice(settled=True), 5, i, NEW, frozenset(EOS)) for i, p in enumerate(asked)]
    batch.advance(made)
    while len(batch):
        for one in [one for one in batch.responses if one.finished]:
            batch.leave(one)
        if len(batch):
            batch.advance()
    assert rows == [1, 3] and [one.tokens for one in made] == expected.responses


@pytest.mark.parametrize("way", WAYS)
def test_packed_weights_and_hundreds_of_sequences(way, monkeypatch):
    read_by(way, monkeypatch)
    monkeypatch.setattr(packed, "LEAST_WIDTH", 256)  # without AVX-512 too
    torch.manual_seed(0)
    model = GPTForCausalLM(preset("tiny", vocab_size=512, context_length=64, n_layer=2, n_head=4, width=256)).eval()
    asked = prompts(300, 512)
    settings = {"max_new_tokens": NEW, "eos_token_id": EOS, "pad_token_id": 0, "seed": 5, "settled": True}
    expected = sample(model, asked, **settings).responses
    with packed_weights(model, 13):
        assert drawn_by_batch(model, asked, 13, 0.8) == expected
    assert sample(model, asked, **settings, batch_size=7).responses == expected


def test_in_bfloat16_the_log_probs_are_those_of_a_whole_forward():
    model = make("llama")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        batch = RunningBatch(model, 4)
        made = [Response(p, Choice(settled=True), 5, i, 8, frozenset()) for i, p in enumerate(prompts(4))]
        batch.advance(made)
        for _ in range(7):
            batch.advance()
        for one in made:
            logits = model(torch.tensor([one.prompt + one.tokens[:-1]])).logits[0, len(one.prompt) - 1 :].float()
            expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(one.tokens)[:, None])[:, 0]
            assert (torch.tensor(one.logprobs) - expected).abs().max() < 0.05  # bfloat16 has 8 bits


CHOICES = [
    Choice(),
    Choice(1.3),
    Choice(0.5, top_p=0.7),
    Choice(top_p=0.8),
    Choice(greedy=True),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_rounding_changes_only_draws_that_are_known_to_be_close(choice):
    """Noise far above the rounding of float32 logits moves some tokens: each of them was said to be close."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(300_000, 8, generator=generator)
    logits[:, 4:] = logits[:, :4] + 5e-4 * torch.randn(300_000, 4, generator=generator)  # pairs that are nearly alike
    seeds = make_noise_seeds(0, list(range(300_000)), 1)[:, 0]
    noisy = logits + 4e-4 * (2 * torch.rand(logits.shape, generator=generator) - 1)
    before, _, close = _draw(logits, seeds, choice, CLOSE)
    moved = before != _draw(noisy, seeds, choice, 0.0)[0]
    assert moved.any() and close[moved].all()
    if choice == Choice():
        assert close.float().mean() < 2e-3


@pytest.mark.parametrize("choice", CHOICES[:-1])
def test_the_noise_draws_from_the_softmax(choice):
    """Frequencies of 50,000 draws, over keys and over steps: within 5 standard errors of each probability."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 2
    probs, count = _cut(torch.softmax(logits / choice.temperature, -1)[None], choice.top_p)[0], 50_000
    probs = probs / probs.sum()
    for seeds in (make_noise_seeds(3, list(range(count)), 1)[:, 0], make_noise_seeds(3, ["one"], count)[0]):
        tokens, logp, _ = _draw(logits.expand(count, -1), seeds, choice, 0.0)
        found = torch.bincount(tokens, minlength=12) / count
        assert ((found - probs).abs() <= 5 * (probs * (1 - probs) / count).sqrt()).all()
        expected = torch.log_softmax(logits / choice.temperature, -1)[tokens]
        torch.testing.assert_close(logp, expected)


def test_the_noise_is_gumbels_and_every_number_counts():
    noise = gumbel_noise(make_noise_seeds(0, list(range(200)), 1)[:, 0], 5000)
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.005 and abs(noise.var() - math.pi**2 / 6) < 0.01
    assert (noise[:, 1:] * noise[:, :-1]).mean() - noise.mean() ** 2 < 0.005, "neighbours are independent"
    assert (noise[1:] * noise[:-1]).mean() - noise.mean() ** 2 < 0.005
    seeds = make_noise_seeds(0, ["a", "b"], 3)
    assert len({tuple(pair) for pair in seeds.flatten(0, 1).tolist()}) == 6
    assert torch.equal(seeds[1], make_noise_seeds(0, ["b"], 3)[0])
    assert not torch.equal(seeds, make_noise_seeds(1, ["a", "b"], 3))


def test_a_close_draw_is_settled_the_same_way_in_every_batch(monkeypatch):
    """If every draw counted as close, every token would come from a batch of one: the answers are those."""
    model, asked = make("llama"), prompts(6)
    settings = {"max_new_tokens": 9, "eos_token_id": EOS, "pad_token_id": 0, "seed": 5, "settled": True}
    plain = sample(model, asked, **settings).responses
    calls = []
    monkeypatch.setattr(settled, "CLOSE", 1e9)
    alone = settled.logits_alone
    monkeypatch.setattr(settled, "logits_alone", lambda *given: calls.append(given[1].tolist()) or alone(*given))
    assert sample(model, asked, **settings).responses == plain
    tokens = sum(map(len, plain))
    assert len(calls) == tokens and [*asked[0], *plain[0][:-1]] in calls
    assert drawn_by_batch(model, asked, 4, 0.7)[0][:9] == plain[0][:9]

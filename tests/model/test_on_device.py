"""What a GPU computes by other kernels than a CPU: `scripts/gpu/run.sh tests` runs this file with RLHF_TEST_DEVICE=cuda.

Unless that variable names a device, everything is on the CPU, as other tests have it too. Sizes suit both.
"""

import importlib
import os
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf.engines.sampling import sample
from rlhf.model.convert import from_transformers
from rlhf.ppo.update import SAMPLER
from tests.model.test_ragged import ragged_loss
from tests.presets import make_gpt

pytestmark = [pytest.mark.gpu, pytest.mark.long]
DEVICE = os.environ.get("RLHF_TEST_DEVICE", "cpu")
BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 4, 3, 4, 3, 4, 3, 4], [21, 22, 23]] * 3
HALF = pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])


def products(half: bool) -> AbstractContextManager:
    return torch.autocast(DEVICE, torch.bfloat16, enabled=half)


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 64, "n_layer": 2, "n_head": 4, "n_embd": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    for parameter in model.parameters():  # far from uniform, so that choices differ
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval().to(DEVICE)


@torch.no_grad()
def test_greedy_sampling_is_generate(gpt2):
    """Ragged prompts at once, against transformers' model on one prompt at a time."""
    ours = from_transformers(gpt2).eval().to(DEVICE)
    out = sample(ours, PROMPTS, max_new_tokens=24, eos_token_id=None, pad_token_id=0, greedy=True)
    for prompt, response in zip(PROMPTS[:4], out.responses, strict=False):
        tokens = torch.tensor([prompt], device=DEVICE)
        theirs = gpt2.generate(tokens, do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0)
        assert theirs[0, len(prompt) :].tolist() == response


@HALF
@torch.no_grad()
def test_the_samplers_logprobs_are_a_forwards(gpt2, half):
    """bf16 has the bound of PPO's first-update check: the mean gap in standard deviations of the log-probs."""
    ours = from_transformers(gpt2).eval().to(DEVICE)
    gaps, spread = [], []
    with products(half):
        out = sample(ours, PROMPTS, max_new_tokens=24, eos_token_id=None, pad_token_id=0, seed=3)
        for prompt, response, logp in zip(PROMPTS, out.responses, out.logprobs.cpu(), strict=True):
            tokens = torch.tensor([prompt + response], device=DEVICE)
            wanted = torch.log_softmax(ours(tokens).logits[0, len(prompt) - 1 : -1].float(), -1)
            wanted = wanted.gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()
            gaps += (logp - wanted).abs().tolist()
            spread += wanted.tolist()
    assert len(gaps) == 24 * len(PROMPTS)
    if half:
        assert statistics.mean(gaps) < SAMPLER * statistics.pstdev(spread)
    else:
        assert max(gaps) < 1e-4


@HALF
def test_a_ragged_batch_is_a_padded_one(half):
    """Loss, and gradient as a whole; in bf16 both sides round by 2^-9, but a loss of 4.2 is a mean over 87 tokens."""
    model = make_gpt(vocab_size=64, width=64).to(DEVICE).train()
    lengths = torch.tensor([9, 3, 17, 24, 5, 5, 11, 2, 20], device=DEVICE)
    place = torch.arange(24, device=DEVICE)
    tokens = torch.randint(1, 64, (9, 24), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    labels = torch.where(place < lengths[:, None], tokens, -100)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten().float() for g in torch.autograd.grad(loss, list(model.parameters()))])

    with products(half):
        plain = model(input_ids=tokens, labels=labels, use_cache=False).loss
        fast = ragged_loss(model, tokens, labels, lengths)
    torch.testing.assert_close(fast.float(), plain.float(), atol=1e-3 if half else 1e-5, rtol=0)
    wanted = gradient(plain)
    # a gradient in bf16 is a sum of rounded terms: 2% of its norm, where a wrong mask is off by its whole size
    assert (gradient(fast) - wanted).norm() < (0.02 if half else 1e-4) * wanted.norm()


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """accelerate keeps the first precision of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class TwoTurns:
    """What a benchmark's contestant does its repeats by."""

    def __init__(self) -> None:
        self.figures: list[dict[str, float]] = []

    def __iter__(self):
        return iter([None, None])

    def done(self, **figures: float) -> None:
        self.figures.append(figures)


@HALF
@pytest.mark.usefixtures("fresh_accelerator")
def test_the_first_update_passes_its_checks(half, tmp_path, monkeypatch):
    """PPO refuses to train if its invariants fail on the first update: the sampler, the reference, ratios of 1."""
    monkeypatch.syspath_prepend(str(BENCH))
    harness, ppo = importlib.import_module("harness"), importlib.import_module("ppo")
    ppo.make_tokenizer(tmp_path, "quick")
    spec = {
        "size": "quick", "reward": "shallow", "shape": harness.SIZES["quick"], "episodes": 8, "prompt": 16, "new": 12,
        "epochs": 2, "micro": 4, "tokenizer": str(tmp_path), "vocabulary": 300, "device": DEVICE, "threads": 1,
        "precision": "bfloat16" if half else "float32",
    }  # fmt: skip
    turns = TwoTurns()
    ppo.ours(spec, turns)
    first, second = turns.figures
    assert 0 < first["units"] <= 8 * 12 and first["processed"] == first["units"] + 8 * 16
    assert abs(first["kl"]) < (1e-2 if half else 1e-5) and second["kl"] != first["kl"]

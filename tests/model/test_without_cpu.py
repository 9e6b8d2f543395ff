"""Without rlhf/cpu torch does the same: sampling, and the losses and gradients of SFT and of PPO."""

import json
import subprocess
import sys

import pytest
import torch

from rlhf.engines.sampling import sample
from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.ops import fast
from rlhf.ops.ppo import policy_loss
from rlhf.ops.unembedding import unembedded_cross_entropy, unembedded_logprobs

HIDDEN = """
import json, sys
sys.modules["rlhf.cpu"] = None  # as if the folder were deleted
from tests.model.test_without_cpu import results
print(json.dumps(results()))
"""


def results() -> dict:
    """Sampled tokens with log-probs; loss and gradient norm of an SFT step and of a PPO step on them."""
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 4, "width": 256, "vocab_size": 600, "context_length": 64}
    model = GPTForCausalLM(GPTConfig(**shape, initializer_range=0.06)).eval()
    prompts = [[2 + i, 3, 5 + i % 7] for i in range(8)]
    drawn = sample(model, prompts, max_new_tokens=24, eos_token_id=None, pad_token_id=0, seed=3)
    found = {"cpu": fast.attend is not None, "tokens": drawn.responses, "logp": drawn.logprobs.tolist()}
    rows = torch.tensor([p + r for p, r in zip(prompts, drawn.responses, strict=True)])
    for name in ("sft", "ppo"):
        model.zero_grad()
        hidden = model.model(rows, use_cache=False).last_hidden_state[:, 2:-1].flatten(0, 1)
        tokens, weight = rows[:, 3:].flatten(), model.lm_head.weight
        if name == "sft":
            loss = unembedded_cross_entropy(hidden, weight, tokens) / len(tokens)
        else:
            logp = unembedded_logprobs(hidden, weight, tokens)[0].view_as(drawn.logprobs)
            advantages = torch.linspace(-1, 1, logp.numel()).view_as(logp)
            loss, _ = policy_loss(logp, drawn.logprobs, advantages, drawn.mask, clip_range=0.2)
        loss.backward()
        found[name] = [loss.item(), torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()]
    return found


@pytest.mark.long  # a process that imports the libraries; the numbers: test_packed.py, with `by_torch_alone`
def test_results_are_the_same_up_to_rounding():
    answer = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True, check=True)
    without, usual = json.loads(answer.stdout.splitlines()[-1]), results()
    assert usual["cpu"] and not without["cpu"]
    assert without["tokens"] == usual["tokens"]
    assert torch.allclose(torch.tensor(without["logp"]), torch.tensor(usual["logp"]), atol=1e-5, rtol=0.0)
    for name in ("sft", "ppo"):
        assert without[name] == pytest.approx(usual[name], rel=1e-4, abs=1e-6)

"""Sampling that rounding cannot change: the same token for the same prompt and seed, whatever else is in the batch.

The last bits of a row's logits depend on the other rows, through the shapes of the products. With inverse transform sampling
that can change a token if the uniform number is next to an edge, and among unlikely tokens every number is. So a token
is drawn as the largest of logit + Gumbel noise (Gumbel 1954, Maddison et al. 2014), with noise that depends on (seed,
key, step, token) only: it can change only if the two largest are nearly equal. For such rows, a few in ten thousand, the
logits are computed again from the row's tokens alone, in a batch of one with the weights as they are; every way of sampling
then decides by the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhf.cpu import kernels
from rlhf.engines.choosing import Choice, Key, choose_tokens, make_words, words_at
from rlhf.model.gpt import GPTForCausalLM

# Between logits in float32: closer ones may swap by rounding. Measured over 400 tokens each, 16 to 32 rows against one
# alone: two logits' difference moved by at most 1.6e-4 in SmolLM2-135M (median 8e-5, logits up to 39) and by 2.3e-5 in the gold
# world's model; this is six times that, for deeper models. In bfloat16 it moves by .1 to .4: there the batch may decide.
CLOSE = 1e-3


def make_noise_seeds(seed: int, keys: Sequence[Key], steps: int) -> Tensor:
    """Seeds (len(keys), steps, 2) int32 of the noise of a step, a function of (seed, key, step) only."""
    return _as_seeds(make_words(seed, keys, steps))


def noise_seeds_at(hashes: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Seeds (B, 2) int32 of the noise of one step per row; hashes: `hashed(seed, key)`."""
    return _as_seeds(words_at(np.array(hashes, dtype=np.uint64), np.array(steps, dtype=np.uint64)))


def _as_seeds(words: Any) -> Tensor:
    return torch.from_numpy(words[..., None].view("int32"))


def choose_settled(
    logits: Tensor, numbers: Tensor, choice: Choice, tokens_of: Callable[[int], Tensor], model: Any
) -> tuple[Tensor, Tensor]:
    """Tokens (B,) and their log-probs (B,), by `choose_tokens` unless `choice` is settled.

    numbers: uniforms (B,), or noise seeds (B, 2) if settled. tokens_of: the tokens (T,) of a row so far, whose last one the
    logits follow.
    """
    if not choice.settled:
        return choose_tokens(logits, numbers, choice)
    tokens, logp, close = _draw(logits, numbers, choice, CLOSE)
    for row in close.nonzero()[:, 0].tolist():
        part = slice(row, row + 1)
        tokens[part], logp[part], _ = _draw(logits_alone(model, tokens_of(row)), numbers[part], choice, 0.0)
    return tokens, logp


def _draw(logits: Tensor, seeds: Tensor, choice: Choice, slack: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B,), log-probs (B,), and whether logits that are off by slack / 2 could give another token, (B,) bool."""
    slack = slack / min(choice.temperature, 1.0)
    if (choice.greedy or choice.top_p == 1) and kernels.can_draw(logits):
        tokens, logp, leads = kernels.draw(logits, seeds, choice.temperature, choice.greedy)
        return tokens, logp, leads < slack
    logits = logits.float() / choice.temperature
    logprobs = torch.log_softmax(logits, -1)
    noisy = logits if choice.greedy else logits + gumbel_noise(seeds, logits.shape[-1])
    sure = None
    if not choice.greedy and choice.top_p < 1:
        sure, possible = _kept(logprobs, choice.top_p, slack)
        noisy = noisy.masked_fill(~possible, -torch.inf)
    best, tokens = noisy.topk(2, dim=-1)
    close, chosen = best[:, 0] - best[:, 1] < slack, tokens[:, :1]
    if sure is not None:
        close |= ~sure.gather(-1, chosen)[:, 0]
    return chosen[:, 0], logprobs.gather(-1, chosen)[:, 0], close


def _kept(logprobs: Tensor, top_p: float, slack: float) -> tuple[Tensor, Tensor]:
    """The tokens that top_p certainly keeps, and those that it may keep by rounding, both (B, V) bool."""
    ordered = logprobs.sort(dim=-1, descending=True).values
    probs = ordered.exp()
    before = probs.cumsum(-1) - probs  # mass of the likelier tokens
    floors = []
    for margin in (-slack, slack):
        kept = before < (top_p + margin) * probs.sum(-1, keepdim=True)
        kept[:, 0] = True
        floors.append(ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True))
    alone_at_the_top = (logprobs == ordered[:, :1]) & (ordered[:, :1] - ordered[:, 1:2] >= slack)
    return (logprobs >= floors[0] + slack) | alone_at_the_top, logprobs >= floors[1] - slack


def gumbel_noise(seeds: Tensor, size: int) -> Tensor:
    """-log(-log U) (B, size) float32 for seeds (B, 2) int32, U from a hash of seed and place."""
    place = torch.arange(size, dtype=torch.int32, device=seeds.device) * -1640531535  # 2^32 / golden ratio, odd
    bits = _mix(_mix(place + seeds[:, :1]) ^ seeds[:, 1:])
    # U = 1 - v, so that small v, which give large noise, have the finest resolution
    v = (bits.float() + (2.0**31 + 0.5)) * 2.0**-32
    return -(-torch.log1p(-v.clamp(2.0**-33, 1 - 2.0**-24))).log()


def _mix(x: Tensor) -> Tensor:
    """A bijection of int32 that changes half of the bits if one changes (Wellons 2018, lowbias32)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def logits_alone(model: Any, tokens: Tensor) -> Tensor:
    """Logits (1, V) after the tokens (T,), of one forward over them alone."""
    last = {"logits_to_keep": 1} if isinstance(model, GPTForCausalLM) else {}
    with unpacked(model):
        return model(tokens[None], use_cache=False, **last).logits[:, -1]


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """A context in which layers that multiply by packed copies of their weights use the weights themselves."""
    packed = [(vars(module), vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]
    for values, _ in packed:
        del values["forward"]
    try:
        yield
    finally:
        for values, forward in packed:
            values["forward"] = forward

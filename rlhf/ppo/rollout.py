"""Rollouts: prompts -> responses, log-probs, values, scores. `Rollout` is the data of one update.

A right-padded row contains prompt and response. Tensors over response tokens are left-aligned in (B, A): column t is
response token t, whatever the prompt's length. The logits of response token t, and the value before it, are computed
one token earlier, at position prompt_length + t - 1.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.data.records import PromptRecord
from rlhf.model.batching import by_length, right_pad
from rlhf.model.fused_loss import is_plain
from rlhf.model.generate import Samples, sample
from rlhf.model.trunk import hidden_at, logits_at, multiplies_plainly
from rlhf.ops.logprobs import entropy, token_logprobs
from rlhf.ops.unembedding import unembedded_logprobs
from rlhf.ppo.rewards import Episodes, Reward


class Rollout(NamedTuple):
    """B episodes with up to T tokens, of which up to A are response tokens."""

    tokens: Tensor  # (B, T) int64, prompt + response, right-padded
    prompt_lengths: Tensor  # (B,) int64
    lengths: Tensor  # (B,) int64, prompt + response
    response_mask: Tensor  # (B, A) bool
    ended: Tensor  # (B,) bool, the response has its end token
    logp_sampled: Tensor  # (B, A) float32 nats, from the sampler; 0 outside the mask
    logp_old: Tensor  # (B, A) float32 nats, of the policy that sampled: in bfloat16 recomputed, else the sampler's
    logp_ref: Tensor  # (B, A) float32 nats, of the SFT model
    values: Tensor  # (B, A) float32, before each response token was chosen
    scores: Tensor  # (B,) float32, from the reward

    def rows(self, index: Tensor | list[int]) -> "Rollout":
        """The episodes of `index`, cut to their own longest row and response."""
        picked = Rollout(*(field[index] for field in self))
        width, answer = int(picked.lengths.max()), int(picked.response_mask.sum(1).max())
        by_token = ("response_mask", "logp_sampled", "logp_old", "logp_ref", "values")
        cut = {name: getattr(picked, name)[:, :answer] for name in by_token}
        return picked._replace(tokens=picked.tokens[:, :width], **cut)


class Experience(NamedTuple):
    """What an update trains on: B episodes, and the advantage and the return of each response token."""

    rollout: Rollout
    advantages: Tensor  # (B, A) float32
    returns: Tensor  # (B, A) float32

    def rows(self, index: list[int]) -> "Experience":
        """The episodes of `index`, cut as `Rollout.rows` cuts them."""
        rollout = self.rollout.rows(index)
        columns = rollout.response_mask.shape[1]
        return Experience(rollout, self.advantages[index, :columns], self.returns[index, :columns])

    def without_tokens(self) -> "Experience":
        """The same episodes, in which no token counts."""
        nothing = torch.zeros_like(self.rollout.response_mask)
        return self._replace(rollout=self.rollout._replace(response_mask=nothing))


def before_responses(prompt_lengths: Tensor, width: int, mask: Tensor) -> Tensor:
    """(N,) positions of the token before each response token of mask (B, A), as row * width + position."""
    device = mask.device
    position = prompt_lengths[:, None] - 1 + torch.arange(mask.shape[1], device=device)  # (B, A)
    return (position + width * torch.arange(len(mask), device=device)[:, None])[mask]


def response_logprobs(
    policy: Any,
    tokens: Tensor,
    prompt_lengths: Tensor,
    mask: Tensor,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (B, A) float32 of the response tokens, 0 outside the mask, and their full-softmax entropy.

    Only response positions go through the last block's MLP and the unembedding, so no logits (B, T, V) are made.
    """
    before = before_responses(prompt_lengths, tokens.shape[1], mask)
    chosen = tokens.flatten()[before + 1]
    if multiplies_plainly(policy):
        hidden = hidden_at(policy.base_model, tokens, before)  # (N, D)
        return logprobs_of_hidden(policy, hidden, chosen, mask, with_entropy, entropy_gradient)
    return logprobs_of_logits(logits_at(policy, tokens, before), chosen, mask, with_entropy, entropy_gradient)


def logprobs_of_hidden(
    policy: Any, hidden: Tensor, chosen: Tensor, mask: Tensor, with_entropy: bool, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor | None]:
    """As `response_logprobs`, of the tokens `chosen` (N,) after hidden states (N, D), N the tokens in mask (B, A).

    The entropy has a gradient only on request.
    """
    head = policy.get_output_embeddings()
    if not is_plain(head):
        return logprobs_of_logits(head(hidden), chosen, mask, with_entropy, entropy_gradient)
    logp, entropies = unembedded_logprobs(hidden, head.weight, chosen, with_entropy, entropy_gradient)
    return unpacked(logp, mask), None if entropies is None else unpacked(entropies, mask)


def logprobs_of_logits(
    logits: Tensor, chosen: Tensor, mask: Tensor, with_entropy: bool, entropy_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """As `logprobs_of_hidden`, from logits (N, V)."""
    logp = unpacked(token_logprobs(logits, chosen), mask)
    if not with_entropy:
        return logp, None
    return logp, unpacked(entropy(logits if entropy_gradient else logits.detach()), mask)


def unpacked(values: Tensor, mask: Tensor) -> Tensor:
    """(B, A) float32 from one value per token in mask (B, A), as (N,); 0 outside the mask."""
    return torch.zeros(mask.shape, device=mask.device, dtype=torch.float32).masked_scatter(mask, values)


def response_values(values: Callable[..., Tensor], tokens: Tensor, prompt_lengths: Tensor, mask: Tensor) -> Tensor:
    """V_t before response token t was chosen (B, A), 0 outside the mask.

    values(tokens, kept): values (N,) after the tokens in `kept`.
    """
    return unpacked(values(tokens, before_responses(prompt_lengths, tokens.shape[1], mask)), mask)


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """The models of a rollout, as functions, and how responses are drawn."""

    policy: Callable[[], AbstractContextManager[Any]]  # a context whose value is the model that samples
    # Log-probs (B, A) of (tokens, prompt_lengths, mask). recompute: of the policy, if the sampler's differ from a training
    # forward's (None in float32: they do not). reference: of the SFT model.
    recompute: Callable[..., Tensor] | None
    reference: Callable[..., Tensor]
    # (tokens, kept) -> values (N,) after the tokens in `kept`; None: no critic
    values: Callable[..., Tensor] | None
    reward: Reward  # see `rlhf.ppo.rewards`
    texts: Callable[[list[list[int]]], list[str]]  # responses as text
    seed: int
    max_new_tokens: int
    eos: int | list[int]  # any of them ends a response
    pad: int
    decode_batch: int  # responses decoded at once
    forward_batch: int  # episodes per forward
    # (tokens, prompt_lengths, mask) -> the results of `recompute` and `response_values`, if one forward computes both
    recompute_with_values: Callable[..., tuple[Tensor, Tensor]] | None = None


Prompts = list[tuple[PromptRecord, list[int]]]  # each prompt as a record and as tokens


@torch.no_grad()
def sample_responses(setup: RolloutSetup, prompts: Prompts, keys: Sequence[tuple]) -> Samples:
    """One response to each prompt at temperature 1. keys: one per prompt; (seed, key) fixes a sample, however the batch is
    split."""
    with setup.policy() as sampler:
        return sample(
            sampler,
            [tokens for _, tokens in prompts],
            max_new_tokens=setup.max_new_tokens,
            eos_token_id=setup.eos,
            pad_token_id=setup.pad,
            seed=setup.seed,
            keys=keys,
            batch_size=setup.decode_batch,
        )


@torch.no_grad()
def score_responses(setup: RolloutSetup, prompts: Prompts, samples: Samples) -> Rollout:
    """Reference log-probs, values and scores of sampled responses. Without a critic all values are 0."""
    device = samples.mask.device
    prompt_ids = [ids for _, ids in prompts]
    tokens, lengths = right_pad([p + r for p, r in zip(prompt_ids, samples.responses, strict=True)], setup.pad)
    tokens, lengths = tokens.to(device), lengths.to(device)
    prompt_lengths = torch.tensor([len(ids) for ids in prompt_ids], device=device)
    logp_old = samples.logprobs.clone()
    logp_ref, values = torch.zeros_like(logp_old), torch.zeros_like(logp_old)
    for group in by_length(lengths.tolist(), setup.forward_batch):
        width = int(lengths[group].max())
        answer = int(samples.mask[group].sum(1).max())
        part, mask, starts = tokens[group, :width], samples.mask[group, :answer], prompt_lengths[group]
        logp_ref[group, :answer] = setup.reference(part, starts, mask)
        if setup.recompute_with_values is not None:
            logp_old[group, :answer], values[group, :answer] = setup.recompute_with_values(part, starts, mask)
            continue
        if setup.recompute is not None:
            logp_old[group, :answer] = setup.recompute(part, starts, mask)
        if setup.values is not None:
            values[group, :answer] = response_values(setup.values, part, starts, mask)
    records, texts = [record for record, _ in prompts], setup.texts(samples.responses)
    scores = setup.reward(Episodes(records, prompt_ids, samples.responses, texts, samples.ended))
    return Rollout(
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        response_mask=samples.mask.clone(),
        ended=samples.ended.clone(),
        logp_sampled=samples.logprobs.clone(),
        logp_old=logp_old,
        logp_ref=logp_ref,
        values=values,
        scores=scores,
    )

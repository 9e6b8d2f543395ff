"""Rollouts: prompts -> responses, log-probs, values, scores. `Rollout` is the data of one update.

A right-padded row contains prompt and response. Tensors over response tokens are left-aligned in (B, A): column t is
response token t, whatever the prompt's length. The logits of response token t, and the value before it, are computed
one token earlier, at position prompt_length + t - 1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.data.records import PromptRecord
from rlhf.engines.sampler import Samples
from rlhf.model.batching import by_length, right_pad
from rlhf.model.fused_loss import is_plain
from rlhf.model.interface import lm
from rlhf.ops.logprobs import entropy, token_logprobs
from rlhf.ops.unembedding import unembedded_logprobs
from rlhf.ppo.rewards import Episodes, Reward, score_by_token


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
    token_scores: Tensor  # (B, A) float32, what each token earns of the score (ppo.score_by_token); else 0

    def rows(self, index: Tensor | list[int]) -> "Rollout":
        """The episodes of `index`, cut to their own longest row and response."""
        picked = Rollout(*(field[index] for field in self))
        width, answer = int(picked.lengths.max()), int(picked.response_mask.sum(1).max())
        by_token = ("response_mask", "logp_sampled", "logp_old", "logp_ref", "values", "token_scores")
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
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (B, A) float32 of the response tokens, 0 outside the mask, and their full-softmax entropy.

    Only response positions go through the last block's MLP and the unembedding, so no logits (B, T, V) are made. The
    entropy has a gradient only on request. hidden: the hidden states (N, D) before the tokens in mask (B, A), if already
    computed.
    """
    before = before_responses(prompt_lengths, tokens.shape[1], mask)
    chosen = tokens.flatten()[before + 1]
    model, head = lm(policy), policy.get_output_embeddings()
    plain = model.plain
    if hidden is None and plain:
        hidden = model.hidden(tokens, before)
    if hidden is not None and plain and is_plain(head):
        logp, entropies = unembedded_logprobs(hidden, head.weight, chosen, with_entropy, entropy_gradient)
    else:
        logits = head(hidden) if plain else model.logits(tokens, before)  # (N, V)
        logp = token_logprobs(logits, chosen)
        entropies = entropy(logits if entropy_gradient else logits.detach()) if with_entropy else None
    return unpacked(logp, mask), None if entropies is None else unpacked(entropies, mask)


def unpacked(values: Tensor, mask: Tensor) -> Tensor:
    """(B, A) float32 from one value per token in mask (B, A), as (N,); 0 outside the mask."""
    return torch.zeros(mask.shape, device=mask.device, dtype=torch.float32).masked_scatter(mask, values)


Prompts = list[tuple[PromptRecord, list[int]]]  # each prompt as a record and as tokens


@torch.no_grad()
def score_responses(
    prompts: Prompts,
    samples: Samples,
    texts: list[str],
    pad: int,
    batch: int,
    *,
    evaluate: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]],
    reference: Callable[..., Tensor],
    reward: Reward,
    by_token: bool = False,
) -> Rollout:
    """Log-probs, values and scores of sampled responses. Without a critic all values are 0.

    texts: the responses without their end tokens. batch: episodes per forward. evaluate: `ActorCritic.evaluate` of (tokens,
    prompt_lengths, mask); it gives log-probs if the sampler's differ from a training forward's. reference: of the same
    arguments, the SFT model's log-probs (B, A). by_token: divide the scores among the tokens, as far as the reward can.
    """
    device = samples.mask.device
    prompt_ids = [ids for _, ids in prompts]
    tokens, lengths = right_pad([p + r for p, r in zip(prompt_ids, samples.responses, strict=True)], pad)
    tokens, lengths = tokens.to(device), lengths.to(device)
    prompt_lengths = torch.tensor([len(ids) for ids in prompt_ids], device=device)
    logp_old = samples.logprobs.clone()
    logp_ref, values = torch.zeros_like(logp_old), torch.zeros_like(logp_old)
    for group in by_length(lengths.tolist(), batch):
        width = int(lengths[group].max())
        answer = int(samples.mask[group].sum(1).max())
        part, mask, starts = tokens[group, :width], samples.mask[group, :answer], prompt_lengths[group]
        logp_ref[group, :answer] = reference(part, starts, mask)
        logp, _, of_tokens = evaluate(part, starts, mask)
        if logp is not None:
            logp_old[group, :answer] = logp
        if of_tokens is not None:
            values[group, :answer] = of_tokens
    records = [record for record, _ in prompts]
    episodes = Episodes(records, prompt_ids, samples.responses, texts, samples.ended)
    token_scores = torch.zeros_like(logp_old)
    if by_token:
        scores, parts = score_by_token(reward, episodes)
        token_scores[:, : parts.shape[1]] = parts
    else:
        scores = reward(episodes)
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
        token_scores=token_scores,
    )

"""Rollouts: prompts -> responses, log-probs, values, scores. What PPO learns from, as one type with a shape a field.

Prompt and response stand together in right-padded rows; everything that belongs to response tokens is left-aligned in
(B, A), so that column t is response token t whatever the prompt's length. The logits that chose response token t, and
the value before it was chosen, stand one token earlier: at position prompt_length + t - 1.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.data.batching import by_length, right_pad
from rlhf.data.records import PromptRecord
from rlhf.model.generate import sample
from rlhf.model.gpt import is_plain
from rlhf.ops.logprobs import entropy, token_logprobs
from rlhf.ops.unembedding import unembedded_logprobs
from rlhf.rewards import Episodes, Reward


class Rollout(NamedTuple):
    """B episodes with up to T tokens, of which up to A are response tokens."""

    tokens: Tensor  # (B, T) int64, prompt + response, right-padded
    prompt_lengths: Tensor  # (B,) int64
    lengths: Tensor  # (B,) int64, prompt + response
    response_mask: Tensor  # (B, A) bool
    ended: Tensor  # (B,) bool, the response has its end token
    logp_old: Tensor  # (B, A) float32 nats, of the policy that sampled; 0 outside the mask
    logp_ref: Tensor  # (B, A) float32 nats, of the SFT model
    values: Tensor  # (B, A) float32, before each response token was chosen
    last_values: Tensor  # (B,) float32, after the last response token: of what would come if it went on
    scores: Tensor  # (B,) float32, as the reward pays them

    def rows(self, index: Tensor | list[int]) -> "Rollout":
        """The episodes of `index`, cut to their own longest row and response."""
        picked = Rollout(*(field[index] for field in self))
        width, answer = int(picked.lengths.max()), int(picked.response_mask.sum(1).max())
        cut = {name: getattr(picked, name)[:, :answer] for name in ("response_mask", "logp_old", "logp_ref", "values")}
        return picked._replace(tokens=picked.tokens[:, :width], **cut)


def response_positions(prompt_lengths: Tensor, width: int, columns: int) -> Tensor:
    """(B, A) position of the token before each response token, kept within the row where there is none."""
    return (prompt_lengths[:, None] - 1 + torch.arange(columns, device=prompt_lengths.device)).clamp(max=width - 1)


def response_logprobs(
    policy: Any, tokens: Tensor, prompt_lengths: Tensor, mask: Tensor, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (B, A) float32 of the response tokens, 0 outside the mask, and their full-softmax entropy.

    Only response positions go through the unembedding, a chunk of them at a time: logits are never (B, T, V).
    """
    hidden = policy.base_model(input_ids=tokens, use_cache=False).last_hidden_state  # (B, T, D)
    return logprobs_of_hidden(policy, hidden, tokens, prompt_lengths, mask, with_entropy)


def logprobs_of_hidden(
    policy: Any, hidden: Tensor, tokens: Tensor, prompt_lengths: Tensor, mask: Tensor, with_entropy: bool,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `response_logprobs`, from the trunk's hidden states (B, T, D). The entropy has a gradient only on request."""
    before = response_positions(prompt_lengths, tokens.shape[1], mask.shape[1])  # (B, A)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(before)[mask]  # (N,)
    at = before[mask]
    head, chosen = policy.get_output_embeddings(), tokens[rows, at + 1]
    if is_plain(head) and not (with_entropy and entropy_gradient):
        logp, spread = unembedded_logprobs(hidden[rows, at], head.weight, chosen, with_entropy)
    else:
        logits = head(hidden[rows, at])  # (N, V)
        logp = token_logprobs(logits, chosen)
        spread = entropy(logits if entropy_gradient else logits.detach()) if with_entropy else None
    empty = torch.zeros(mask.shape, device=tokens.device, dtype=torch.float32)
    return empty.masked_scatter(mask, logp), None if spread is None else empty.masked_scatter(mask, spread)


def response_values(values: Tensor, prompt_lengths: Tensor, lengths: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """From values after every token (B, T): V_t before response token t was chosen (B, A), 0 outside the mask; and V
    after the last response token (B,)."""
    before = response_positions(prompt_lengths, values.shape[1], mask.shape[1])
    return torch.where(mask, values.gather(1, before), 0.0), values.gather(1, lengths[:, None] - 1)[:, 0]


@torch.no_grad()
def collect_rollout(
    records: Sequence[PromptRecord],
    prompts: list[list[int]],
    keys: Sequence[tuple],
    *,
    policy: AbstractContextManager[Any],
    recompute: Callable[..., Tensor] | None,
    reference: Callable[..., Tensor],
    values: Callable[..., Tensor] | None,
    reward: Reward,
    texts: Callable[[list[list[int]]], list[str]],
    seed: int,
    max_new_tokens: int,
    eos: int,
    pad: int,
    decode_batch: int,
    forward_batch: int,
    clock: Any,
) -> Rollout:
    """Sample one response a prompt at temperature 1, then compute reference log-probs, values and scores.

    policy: a context whose value is the model that samples, needed no longer afterwards.
    records, prompts: the prompts as they came and as tokens. keys: one a prompt; (seed, key) fixes a sample, however
    the batch is split. reference(tokens, prompt_lengths, mask): log-probs (B, A); recompute likewise, of the policy,
    where the sampler's own are not those of a training forward (None: they are, in float32). values(tokens): values
    after every token (B, T), or None without a critic: all 0 then. reward: see `rlhf.rewards`. clock: called with
    "rollout" and "score" when that phase is over.
    """
    with policy as sampler:
        samples = sample(
            sampler, prompts, max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=pad, seed=seed, keys=keys,
            batch_size=decode_batch,
        )  # fmt: skip
    clock("rollout")
    device = samples.mask.device
    tokens, lengths = right_pad([p + r for p, r in zip(prompts, samples.responses, strict=True)], pad)
    tokens, lengths = tokens.to(device), lengths.to(device)
    prompt_lengths = torch.tensor([len(p) for p in prompts], device=device)
    logp_old = samples.logprobs.clone()
    logp_ref, old_values = torch.zeros_like(logp_old), torch.zeros_like(logp_old)
    last_values = torch.zeros(len(prompts), device=device)
    for group in by_length(lengths.tolist(), forward_batch):
        width = int(lengths[group].max())
        answer = int(samples.mask[group].sum(1).max())
        part, mask, starts = tokens[group, :width], samples.mask[group, :answer], prompt_lengths[group]
        logp_ref[group, :answer] = reference(part, starts, mask)
        if recompute is not None:
            logp_old[group, :answer] = recompute(part, starts, mask)
        if values is not None:
            old_values[group, :answer], last_values[group] = response_values(values(part), starts, lengths[group], mask)
    scores = reward(Episodes(list(records), prompts, samples.responses, texts(samples.responses), samples.ended))
    clock("score")
    return Rollout(
        tokens, prompt_lengths, lengths, samples.mask.clone(), samples.ended.clone(), logp_old, logp_ref, old_values,
        last_values, scores,
    )  # fmt: skip

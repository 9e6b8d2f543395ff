"""Per token of a response: its log-prob, and the KL to another model at this position."""

from typing import Any

import torch

from rlhf.model.packed import unpacked


@torch.inference_mode()
def shade(policy: Any, reference: Any, prompt: list[int], response: list[int]) -> dict[str, Any]:
    """log pi(token) in nats, and KL(pi || reference) over the vocabulary at its position; reference may be None."""
    logp = _logprobs(policy, prompt, response)
    tokens = torch.tensor(response, device=logp.device)[:, None]
    body: dict[str, Any] = {"logprobs": logp.gather(-1, tokens)[:, 0].tolist()}
    if reference is not None:
        other = _logprobs(reference, prompt, response)
        body["kl"] = (logp.exp() * (logp - other)).sum(-1).clamp(min=0).tolist()
    return body


def _logprobs(policy: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """(T, V) before each token of the response."""
    tokens = torch.tensor([prompt + response], device=next(policy.parameters()).device)
    with unpacked(policy):
        logits = policy(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)

"""Per token of a response: its log-prob, and how far the model is from another one there."""

from typing import Any

import torch

from rlhf.model.settled import unpacked
from rlhf.serving.drawing import RefusedError
from rlhf.serving.models import ServedModel


@torch.inference_mode()
def shade(model: ServedModel, reference: ServedModel | None, prompt: list[int], response: list[int]) -> dict[str, Any]:
    """The text of each token, log pi(token) in nats, and KL(pi || reference) over the vocabulary at its place.

    Raises: RefusedError for tokens that the model does not have, or that do not fit its context.
    """
    if len(prompt) + len(response) > model.context or any(
        not 0 <= i < model.policy.config.vocab_size for i in response
    ):
        raise RefusedError(400, "the response does not fit this model", "token_ids")
    if reference is not None and reference.policy.config.vocab_size != model.policy.config.vocab_size:
        raise RefusedError(400, "the two models have different vocabularies", "reference")
    logp = _logprobs(model.policy, prompt, response)
    tokens = torch.tensor(response, device=logp.device)[:, None]
    decode = model.tokenizer.backend_tokenizer.decode
    body: dict[str, Any] = {
        "tokens": [decode([i], skip_special_tokens=False) for i in response],
        "logprobs": logp.gather(-1, tokens)[:, 0].tolist(),
    }
    if reference is not None:
        other = _logprobs(reference.policy, prompt, response)
        body["kl"] = (logp.exp() * (logp - other)).sum(-1).clamp(min=0).tolist()
    return body


def _logprobs(policy: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """(T, V) before each token of the response."""
    tokens = torch.tensor([prompt + response], device=next(policy.parameters()).device)
    with unpacked(policy):
        logits = policy(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)

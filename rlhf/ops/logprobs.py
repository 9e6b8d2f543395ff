"""Log-probabilities of chosen tokens, the entropy of a distribution, and the losses of knowledge distillation, from
logits.

Logits and tokens come aligned: logits[..., t, :] is the distribution from which tokens[..., t] was drawn, so a caller
with a whole sequence passes logits[:, :-1] and tokens[:, 1:]. There is no temperature.
"""

import torch.nn.functional as F
from torch import Tensor

from rlhf.ops.masked import upcast


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token under the softmax of its logits, in nats.

    token_logprobs[...] = logits[..., tokens] - log sum_v exp(logits[..., v])

    logits (…, V) of any float type, tokens (…) int64; returns (…) float32 (float64 for float64 logits). Half-precision
    logits are raised to float32 before the sum. No log-softmax of size (…, V) is made: float32 logits are what the
    backward pass keeps.
    Source: Radford et al. 2018, section 3.1 (the summand of eq. 1).
    """
    if tokens.shape != logits.shape[:-1]:
        raise ValueError(
            f"token_logprobs: logits {tuple(logits.shape)}, tokens {tuple(tokens.shape)}: give (…, V), (…)"
        )
    wide = upcast(logits)  # so that the gradient onehot - p is rounded only once, at the end
    return wide.gather(-1, tokens[..., None]).squeeze(-1) - wide.logsumexp(-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax over the whole vocabulary, in nats.

    entropy[...] = -sum_v p_v log p_v        p = softmax(logits);  0 <= entropy <= log V

    logits (…, V) of any float type; -inf (a forbidden token) adds nothing; returns (…) float32 (float64 for float64).
    Source: Shannon 1948, eq. for H in section 6.
    """
    wide = upcast(logits)
    logp = wide - wide.logsumexp(-1, keepdim=True)
    p = logp.exp()
    return -(p * logp.masked_fill(p == 0, 0.0)).sum(-1)  # 0 log 0 = 0; the product alone would be NaN at -inf


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """T^2 times the cross-entropy of the student under the teacher, and the KL between them, both at temperature T.

    p = softmax(teacher_logits / T);  q = softmax(logits / T)
    ce = -T^2 sum_v p_v log q_v;  kl = sum_v p_v log(p_v / q_v)

    logits, teacher_logits (…, V) of any float type; returns (…) float32 (float64 for float64 logits), in nats. T^2
    keeps the size of the gradient at any T. The teacher gets no gradient, and the KL gives none.
    Source: Hinton et al. 2015, section 2; Sanh et al. 2019, section 2.
    """
    logq = F.log_softmax(upcast(logits) / temperature, -1)
    logp = F.log_softmax(upcast(teacher_logits.detach()) / temperature, -1)
    p = logp.exp()
    ce = -(p * logq).sum(-1)
    return temperature**2 * ce, (p * (logp - logq.detach())).sum(-1)

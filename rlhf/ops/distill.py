"""The losses of knowledge distillation, per token."""

import torch.nn.functional as F
from torch import Tensor

from rlhf.ops.masked import upcast


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """T^2 times the cross-entropy of the student under the teacher, and the KL between them, both at temperature T.

    p = softmax(teacher_logits / T);  q = softmax(logits / T);  ce = -T^2 sum_v p_v log q_v;  kl = sum_v p_v log(p_v / q_v)

    logits, teacher_logits (…, V) of any float type; returns (…) float32 (float64 for float64 logits), in nats. T^2 keeps the
    size of the gradient at any T. The teacher gets no gradient, and the KL gives none.

    Source: Hinton et al. 2015, section 2; Sanh et al. 2019, section 2.
    """
    logq = F.log_softmax(upcast(logits) / temperature, -1)
    logp = F.log_softmax(upcast(teacher_logits.detach()) / temperature, -1)
    p = logp.exp()
    ce = -(p * logq).sum(-1)
    return temperature**2 * ce, (p * (logp - logq.detach())).sum(-1)


def hidden_cosine(hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """cos(h, h_teacher) (…) of hidden states (…, D); the loss is 1 minus it (Sanh et al. 2019, section 2)."""
    return F.cosine_similarity(upcast(hidden), upcast(teacher_hidden.detach()), dim=-1)

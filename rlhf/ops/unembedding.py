"""Log-probabilities, entropies and cross-entropies from hidden states and the unembedding, without a copy of the
logits.

The results of `logprobs.token_logprobs` and `logprobs.entropy` for logits = hidden weight^T, computed in chunks of rows
that fit the processor's cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf.ops.fast import outer, plain_product
from rlhf.ops.logprobs import entropy, token_logprobs
from rlhf.ops.masked import computed_in, upcast

# Elements of the logits per chunk: about a CPU's cache; on a GPU enough to use it fully.
_CPU_CHUNK, _GPU_CHUNK = 2**20, 2**27
# Most elements of probabilities kept for the backward pass; above that it computes them again.
_KEPT = 2**26


def unembedding_factor(weight: Tensor) -> Tensor:
    """The weight for `unembed`: in half precision only on a GPU, where such a product can sum in float32."""
    return weight if weight.dtype.itemsize >= 4 or weight.device.type == "cuda" else weight.float()


def unembed(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits (N, V) float32 = hidden weight^T of hidden (N, D) and an `unembedding_factor` (V, D).

    The sums are not rounded to bfloat16 even for bfloat16 factors: a rounded logit near 100 is off by up to 0.25 nats.
    No gradient.
    """
    if weight.dtype.itemsize < 4:  # on a GPU: see `unembedding_factor`
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return plain_product(hidden.to(weight.dtype), weight).float()


def unembedded_logprobs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, with_entropy: bool = False, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token, and the entropy of its distribution, in nats.

    logits = hidden weight^T;  logp[i] = logits[i, tokens[i]] - log sum_v exp(logits[i, v])

    hidden (N, D), weight (V, D), tokens (N,) int64. Returns (N,) float32, twice, or None for the entropy. Gradients
    flow from the log-probabilities to hidden and weight, and from the entropy only with entropy_gradient.
    Source: Radford et al. 2018, section 3.1; Shannon 1948, section 6.
    """
    if not (with_entropy and entropy_gradient):
        logp, entropies = _Unembedding.apply(hidden, weight, tokens, with_entropy)
        return logp, entropies if with_entropy else None
    h, w = _as_multiplied(hidden, weight)

    def measure(h: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(h.device.type, enabled=False):
            logits = upcast(h) @ upcast(w).t()
            return token_logprobs(logits, tokens), entropy(logits)

    chunks = _chunks(len(h), w) or [slice(0, 0)]  # a rank may have no token that counts
    parts = [checkpoint(measure, h[rows], tokens[rows], use_reentrant=False) for rows in chunks]
    logp, entropies = map(torch.cat, zip(*parts, strict=True))
    return logp, entropies


class _Unembedding(torch.autograd.Function):
    """d logp_i / d logits_i = onehot(token_i) - p_i: the backward pass needs p alone, and reads it in two products.

    In half precision p - onehot is kept and multiplied, because rounding p = 0.998 would lose 1 - p. In float32 p
    itself is kept, and the one-hot part is added to the products.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
        h, w = _as_multiplied(hidden, weight)
        factor, count = unembedding_factor(w), len(h)
        wanted = any(ctx.needs_input_grad) and count * len(w) <= _KEPT
        kept = h.new_empty(count, len(w)) if wanted else None
        logp = torch.empty(count, device=h.device, dtype=torch.float32)
        entropies = torch.zeros_like(logp)
        with torch.autocast(h.device.type, enabled=False):
            for rows in _chunks(count, w):
                logits = unembed(h[rows], factor)
                logits -= logits.amax(-1, keepdim=True)
                p = torch.softmax(logits, -1)
                log_sum = -p.amax(-1).log()  # the largest probability is one over the sum, and never 0
                logp[rows] = logits.gather(-1, tokens[rows, None])[:, 0] - log_sum
                if kept is not None:
                    kept[rows] = _less_tokens(p, h.dtype, tokens[rows])
                if with_entropy:
                    entropies[rows] = log_sum - p.mul_(logits).sum(-1)
        ctx.save_for_backward(h, w, tokens, kept)
        ctx.kinds = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_logp: Tensor, _: Any) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        h, w, tokens, kept = ctx.saved_tensors
        d = d_logp[:, None].to(h.dtype)
        scaled = h * d  # (N, D)
        factor = unembedding_factor(w) if kept is None else w
        d_hidden, d_weight = _gradients(ctx, h, w)
        with torch.autocast(h.device.type, enabled=False):
            for rows in [slice(0, len(h))] if kept is not None else _chunks(len(h), w):
                p = kept
                if p is None:
                    p = _less_tokens(torch.softmax(unembed(h[rows], factor), -1), h.dtype, tokens[rows])
                if d_hidden is not None:
                    d_hidden[rows] = ((w[tokens[rows]] if _is_exact(h) else 0) - plain_product(p, w.t())) * d[rows]
                if d_weight is not None:
                    d_weight -= outer(p, scaled[rows])
            if d_weight is not None and _is_exact(h):
                d_weight.index_add_(0, tokens, scaled.to(d_weight.dtype))
        return None if d_hidden is None else d_hidden.to(ctx.kinds[0]), d_weight, None, None


def unembedded_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """-sum_i log softmax(hidden weight^T)[i, labels[i]], a float32 scalar in nats.

    hidden (N, D), weight (V, D), labels (N,) int64. The forward pass does the backward's work: only the gradients of
    hidden and weight outlive a chunk, so that nothing of the size (N, V) is ever made.
    """
    return _CrossEntropy.apply(hidden, weight, labels)


class _CrossEntropy(torch.autograd.Function):
    """d loss / d logits = p - onehot(label): a chunk's logits become its probabilities and then its gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        h, w = _as_multiplied(hidden, weight)
        factor = unembedding_factor(w)
        loss = torch.zeros((), dtype=torch.float32, device=h.device)
        ctx.kinds = hidden.dtype, weight.dtype
        d_hidden, d_weight = _gradients(ctx, h, w)
        with torch.autocast(h.device.type, enabled=False):
            for rows in _chunks(len(h), w):
                part, chosen = h[rows], labels[rows, None]
                logits = unembed(part, factor)  # (rows, V)
                top, chosen_logits = logits.amax(-1, keepdim=True), logits.gather(-1, chosen)
                p = torch.softmax(logits, -1)
                # the normaliser comes from the most probable token: its probability is never 0, unlike the label's
                loss += (top - p.amax(-1, keepdim=True).log() - chosen_logits).sum()
                if _is_exact(h):
                    gradient = p.scatter_add_(-1, chosen, p.new_full((), -1.0).expand_as(chosen))
                else:
                    gradient = _less_one_hot(p, labels[rows]).to(h.dtype)
                if d_hidden is not None:
                    d_hidden[rows] = plain_product(gradient, w.t())
                if d_weight is not None:  # chunks add up in the weight's own precision
                    outer(gradient, part, d_weight)
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        # in place: (V, D) is large
        d_hidden, d_weight = (None if d is None else d.mul_(d_loss) for d in ctx.saved_tensors)
        return None if d_hidden is None else d_hidden.to(ctx.kinds[0]), d_weight, None


def _as_multiplied(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the precision of the products: autocast's if it is on, else the hidden states'."""
    kind = computed_in(hidden)
    return hidden.to(kind), weight.to(kind)


def _is_exact(x: Tensor) -> bool:
    return x.dtype.itemsize >= 4


def _less_tokens(p: Tensor, kind: torch.dtype, tokens: Tensor) -> Tensor:
    """p (N, V) in a precision, in half precision less onehot(tokens (N,))."""
    return p.to(kind) if kind.itemsize >= 4 else _less_one_hot(p.to(kind), tokens)


def _less_one_hot(p: Tensor, tokens: Tensor) -> Tensor:
    """p - onehot of p (N, V), in place: the token's entry is minus the sum of the others.

    1 - p for p near 1 would be mostly rounding error: even in float32 a softmax over thousands of tokens has
    1 - p = 1e-4 only to a few percent.
    """
    p.scatter_(-1, tokens[:, None], 0.0)
    return p.scatter_(-1, tokens[:, None], -p.sum(-1, keepdim=True, dtype=torch.float32).to(p.dtype))


def _gradients(ctx: Any, h: Tensor, w: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Buffers for the gradients of hidden and weight, if needed; the weight's in its own precision."""
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    return (
        torch.empty_like(h) if needs_hidden else None,
        torch.zeros(w.shape, device=w.device, dtype=ctx.kinds[1]) if needs_weight else None,
    )


def _chunks(count: int, weight: Tensor) -> list[slice]:
    """Slices of rows whose logits fit a CPU's cache; on a GPU, enough to use it fully."""
    size = max(256, (_CPU_CHUNK if weight.device.type == "cpu" else _GPU_CHUNK) // len(weight))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]

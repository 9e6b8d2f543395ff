"""FLOPs and hours of pretraining and PPO. Pure functions; a multiply-add counts as two operations."""

from rlhf.planning.shapes import Shape


def forward_flops(
    shape: Shape, tokens: float, context: float, *, logits: float | None = None, scalar: bool = False
) -> float:
    """Operations of a forward pass over `tokens` tokens, each of which attends to `context` positions.

    2 N per token, N the parameters that multiply: blocks, and the unembedding at `logits` tokens (all if not given; a scalar
    head instead with `scalar`); of several experts one counts. Attention adds 4 n_layer D context per token, D the width of
    the queries; banded layers count as dense ones, because they are computed so.

    Source: Kaplan et al. 2020, table 1 and equation 2.2; Chowdhery et al. 2022, appendix B.
    """
    head = shape.width * tokens if scalar else shape.embedding * (tokens if logits is None else logits)
    blocks = (shape.n_layer * shape.block_matrices + shape.routers) * tokens
    return 2.0 * (blocks + head) + 4.0 * shape.n_layer * shape.query_width * context * tokens


def training_flops(shape: Shape, tokens: float, context: float, **how: float | bool | None) -> float:
    """Operations of forward and backward: three forwards, 6 N + 12 n_layer D context per token (Chowdhery et al., B).

    Operations that checkpointing repeats are not counted, by the definition of MFU: set a lower MFU instead.
    """
    return 3.0 * forward_flops(shape, tokens, context, **how)  # type: ignore[arg-type]


def generation_flops(shape: Shape, rows: float, prompt: int, answer: int) -> float:
    """Operations of sampling `rows` responses with a KV cache: every token is computed once and attends to those before it."""
    tokens = prompt + answer
    return rows * forward_flops(shape, tokens, (tokens + 1) / 2, logits=answer)


def decode_seconds(
    shape: Shape,
    rows: int,
    prompt: int,
    answer: int,
    weight_bytes: float,
    cache_bytes: float,
    *,
    flops: float,
    bandwidth: float,
) -> float:
    """Seconds in which one GPU samples one batch of `rows` responses.

    The prompt runs at `flops` operations per second; each of the `answer` steps then takes as long as its operations or as
    reading the weights and the cache (half full on average beyond the prompt), whichever is longer. cache_bytes: of the
    full cache; bandwidth: bytes per second.

    Source: Pope et al. 2022, section 2 (the roofline of a decoding step).
    """
    prefill = forward_flops(shape, rows * prompt, prompt, logits=rows) / flops
    middle = prompt + answer / 2
    read = (weight_bytes + cache_bytes * middle / (prompt + answer)) / bandwidth
    return prefill + answer * max(read, forward_flops(shape, rows, middle) / flops)

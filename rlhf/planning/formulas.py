"""Parameters, operations and bytes of a GPT as closed formulas of its sizes, for `rlhf plan`, the memory budget of a
stage and the MFU that training logs. Nothing is built; `tests/planning` compares the counts with the model itself on
the meta device.

A multiply-add counts as two operations. Bytes are those on one GPU; not counted: the CUDA context, the allocator's
fragmentation and the optimizer's temporaries, for which `memory_margin` keeps a share free.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from rlhf.config.model import ModelConfig, default_mlp_width

# Bytes per parameter: weights and gradients in the precision of forward and backward, and AdamW's states (in mixed
# precision also its float32 weights). Source: Rajbhandari et al. 2020, section 3.1.
STATE_BYTES = {"bf16": (2, 2, 4 + 4 + 4), "fp32": (4, 4, 4 + 4)}
ELEMENT = {"bf16": 2, "fp32": 4}
# A forward and a backward take as many operations as this many forwards (Chowdhery et al. 2022, appendix B).
TRAINING_PASSES = 3.0
# 10^12 operations per second of one GPU, dense, by a part of its name: in bfloat16, in float32. The first match counts.
# Source: NVIDIA's data sheets of the A100, H100, H200, L4, L40, L40S and B200.
PEAK_TFLOPS = {
    "H100 PCIE": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "H200": (989.0, 67.0),
    "B200": (2250.0, 75.0),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
}


@dataclass
class Shape(ModelConfig):
    """A `ModelConfig` with every default resolved, the vocabulary, and the parameters of each part."""

    n_kv_head: int = 0
    head_dim: int = 0
    mlp_width: int = 0
    vocab_size: int = 50257
    more: int = 0  # parameters of an adopted model that the formula does not count

    def __post_init__(self) -> None:
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.width // self.n_head
        self.mlp_width = self.mlp_width or default_mlp_width(self.mlp, self.width)
        swiglu, bias = self.mlp == "swiglu", int(self.bias)
        # of one layer; queries, keys and values are one linear layer (`joint`), and so are gate and up (`up`)
        self.query_width, self.kv_width = self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        self.joint, self.up = self.query_width + 2 * self.kv_width, self.mlp_width * (2 if swiglu else 1)
        rotated = self.query_width + self.kv_width if self.positions == "rotary" else 0
        self.attention_units = self.joint + rotated + self.query_width  # with the output
        self.hidden_units = self.mlp_width * (4 if swiglu else 2)  # of one MLP, with what its activation makes
        self.embedding = self.vocab_size * self.width  # also the size of the unembedding

        # One block with one MLP: what multiplies a token, its biases, its norms.
        width, mlp = self.width, self.width * (self.up + self.mlp_width)
        self.block_matrices = width * (self.joint + self.query_width) + mlp
        biases = bias * (self.joint + width + self.up + width)
        norm = width * (2 if self.norm == "layernorm" and self.bias else 1)
        norms = (1 if self.block == "one_norm" else 2) * norm + (2 * self.head_dim if self.qk_norm else 0)
        self.block_size = self.block_matrices + biases + norms
        # A low-rank adapter has rank (inputs + outputs) of its linear layer (Hu et al. 2021, section 4.1).
        self.adapted = self.n_layer * (4 * width + self.joint + self.query_width + self.up + self.mlp_width)

        # Layers with several MLPs, of which a token uses one.
        layers = self.n_layer // self.expert_every if self.experts else 0
        self.routers = layers * self.experts * width
        more_experts = layers * (self.experts - 1) * (mlp + bias * (self.up + width))
        self.linear_layers = self.n_layer * (self.block_matrices + biases) + self.routers + more_experts

        positions = self.context_length * width if self.positions == "learned" else 0
        last = norm if self.block != "post" or self.attention != "causal" else 0
        self.trunk = self.embedding + positions + self.n_layer * norms + self.linear_layers + last + self.more
        self.language_model = self.trunk + (0 if self.tie_word_embeddings else self.embedding)  # policy, reference
        self.scalar_model = self.trunk + width + 1  # reward model, critic: a head with one bias


def make_shape(model: ModelConfig, vocab_size: int) -> Shape:
    """The shape that `rlhf.model.gpt.GPTConfig` would have."""
    return Shape(**asdict(model), vocab_size=vocab_size)


@lru_cache(maxsize=8)
def read_shape(source: str) -> Shape:
    """The shape of a pretrained model, from its configuration alone. Raises: UserError if it is not such a model."""
    from rlhf.model.checkpoint import UNSTATED_CONTEXT, read_checkpoint

    checkpoint = read_checkpoint(source)
    shape = shape_of_config(checkpoint.config, checkpoint.context or UNSTATED_CONTEXT)
    return replace(shape, more=checkpoint.parameters - shape.language_model)


def shape_of_config(config: Any, context: int = 0) -> Shape:
    """The shape that a configuration of ours or of transformers states; parameters that it does not are not counted."""
    if config.model_type == "rlhf_gpt":
        named = {field.name: getattr(config, field.name) for field in fields(Shape) if hasattr(config, field.name)}
        return Shape(**named)
    heads = getattr(config, "num_attention_heads", 1)
    hidden_units = [getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner")]
    names = ("hidden_act", "hidden_activation")  # Gemma 2 and 3 have the second
    activation = next(filter(None, (getattr(config, name, None) for name in names)), None)
    gated = activation in ("silu", "swiglu", "gelu_pytorch_tanh")
    return Shape(
        n_layer=config.num_hidden_layers,
        n_head=heads,
        n_kv_head=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or 0,
        width=config.hidden_size,
        mlp_width=next(filter(None, hidden_units), 4 * config.hidden_size),
        context_length=context,
        positions="rotary",
        norm="rmsnorm" if gated else "layernorm",
        mlp="swiglu" if gated else "gelu",
        bias=False,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        vocab_size=config.vocab_size,
    )


def pass_flops(multiplied: float, attention_width: float, tokens: float, context: float) -> float:
    """Operations of a forward pass over `tokens` tokens, each of which attends to `context` positions: per token 2 N, N
    the weights that multiply, and 4 n_layer D context for attention, D the width of the queries.

    multiplied: the sum of N over the tokens; attention_width: n_layer D. Banded layers count as dense ones, as they are
    computed. What checkpointing repeats is not counted, by the definition of MFU.
    Source: Kaplan et al. 2020, table 1 and equation 2.2; Chowdhery et al. 2022, appendix B.
    """
    return 2.0 * multiplied + 4.0 * attention_width * context * tokens


def shape_flops(
    shape: Shape, tokens: float, context: float, *, logits: float | None = None, scalar: bool = False
) -> float:
    """`pass_flops` of a shape: the unembedding at `logits` tokens (none: all), or a scalar head. Of several experts one counts."""
    head = shape.width * tokens if scalar else shape.embedding * (tokens if logits is None else logits)
    blocks = (shape.n_layer * shape.block_matrices + shape.routers) * tokens
    return pass_flops(blocks + head, shape.n_layer * shape.query_width, tokens, context)


def decode_seconds(
    shape: Shape, rows: int, prompt: int, answer: int, dtype: str, *, flops: float, bandwidth: float
) -> float:
    """Seconds in which one GPU of `flops` operations and `bandwidth` bytes per second samples one batch of `rows`
    responses.

    Each of the `answer` steps takes as long as its operations or as reading the weights and the cache (half full on
    average beyond the prompt), whichever is longer. Source: Pope et al. 2022, section 2 (the roofline of a decoding
    step).
    """
    prefill = shape_flops(shape, rows * prompt, prompt, logits=rows) / flops
    middle = prompt + answer / 2
    read = (ELEMENT[dtype] * shape.language_model + kv_cache_bytes(shape, rows, middle, dtype)) / bandwidth
    return prefill + answer * max(read, shape_flops(shape, rows, middle) / flops)


def model_state_bytes(parameters: int, world: int, zero: int, dtype: str, *, offload: bool = False) -> dict[str, int]:
    """Bytes of a trained model's states on one rank: weights, gradients, optimizer, and host if offloaded.

    ZeRO-1 divides the optimizer's states by the number of ranks, ZeRO-2 the gradients too, ZeRO-3 the weights too. With
    offload, ZeRO-2 keeps only the weights on the device and ZeRO-3 only the gathered ones; the rest is `host`.
    Source: Rajbhandari et al. 2020, section 5 and figure 1; Ren et al. 2021 (ZeRO-Offload), section 3.
    Differs: in float32 too, DeepSpeed's optimizer keeps a copy of the weights that it updates. Without ZeRO, bf16 is
    autocast's: the 2 bytes of `weights` are its casts, and gradients are those of the float32 weights, 4 bytes.
    """
    weights, gradients, optimizer = STATE_BYTES[dtype]
    share = -(-parameters // world)
    if zero >= 1 and dtype == "fp32":
        optimizer += 4
    if zero == 0:
        gradients = ELEMENT["fp32"]
    held = {
        "weights": weights * (share if zero == 3 else parameters),
        "gradients": gradients * (share if zero >= 2 else parameters),
        "optimizer": optimizer * (share if zero >= 1 else parameters),
    }
    moved = ("gradients", "optimizer") + (("weights",) if zero == 3 else ()) if offload else ()
    return {**held, **dict.fromkeys(moved, 0), "host": sum(held[part] for part in moved)}


def frozen_bytes(parameters: int, linear: int, world: int, zero: int, dtype: str) -> int:
    """Bytes of a frozen model's weights on one rank, divided under ZeRO-3 only.

    linear: of the parameters those in linear layers; without ZeRO, the others stay in float32 in bf16 too.
    """
    if zero == 0:
        return ELEMENT[dtype] * linear + ELEMENT["fp32"] * (parameters - linear)
    return ELEMENT[dtype] * (-(-parameters // world) if zero == 3 else parameters)


def gathered_bytes(shape: Shape, dtype: str) -> int:
    """Bytes of whole weights that ZeRO-3 has gathered at one time: a block, the next one, and an embedding matrix."""
    return ELEMENT[dtype] * (min(2, shape.n_layer) * shape.block_size + shape.embedding)


def buffer_bytes(parameters: int, world: int, zero: int, dtype: str, bucket: int) -> int:
    """Bytes of communication buffers on one rank: without ZeRO all gradients in float32; with it a bucket to reduce
    and, in ZeRO-1 and 2, one to gather the new weights, each of at most `bucket` elements. ZeRO-2 fills a second one
    while it sums the first.
    """
    if world == 1 and zero == 0:
        return 0
    if zero == 0:
        return ELEMENT["fp32"] * parameters
    return ELEMENT[dtype] * min(bucket, parameters) * {1: 2, 2: 3, 3: 1}[zero]


def block_activation_bytes(shape: Shape, dtype: str, dropout: float = 0.0) -> int:
    """Bytes per token that one block keeps for its backward pass.

    With multi-head attention, GELU, 4 D hidden units, learned positions, dropout and 16 bits it is the paper's
    D (34 + 5 H T / D), but for the T term, in place of which fused attention keeps a float32 log-sum per head. Rotary
    positions add the rotated queries and keys; SwiGLU keeps gate, up, silu(gate) and the product; RMSNorm its output
    before the scale too.
    Source: Korthikanti et al. 2022, section 4.1, equation 1 and the list above it.
    Differs: counts the widths of this model's attention and MLP, the norms' statistics, and masks only if dropout > 0.
    """
    width, element = shape.width, ELEMENT[dtype]
    norms = 2 * width * (2 if shape.norm == "layernorm" else 3)  # input and output of both
    elements = norms + shape.attention_units + shape.hidden_units
    statistics = 2 * 4 * (2 if shape.norm == "layernorm" else 1)
    return element * elements + statistics + (2 * width if dropout > 0 else 0) + 4 * shape.n_head


def working_bytes(shape: Shape, dtype: str) -> int:
    """Peak bytes per token of a block if nothing is kept for a backward pass: the residual stream, its norm, and the
    attention's projection, rotated copy and output, or the MLP's hidden units.
    """
    return ELEMENT[dtype] * (2 * shape.width + max(shape.attention_units, shape.hidden_units))


def activation_bytes(shape: Shape, tokens: int, dtype: str, checkpointing: bool, dropout: float = 0.0) -> int:
    """Bytes that the trunk keeps for the backward pass of padded tokens; with checkpointing every block's input, and
    one complete block while it is recomputed. Source: Korthikanti et al. 2022, sections 4.1 and 5.
    """
    block = block_activation_bytes(shape, dtype, dropout)
    entry = ELEMENT[dtype] * shape.width
    last_norm = entry * (2 if shape.norm == "layernorm" else 3)
    blocks = shape.n_layer * entry + block - entry if checkpointing else shape.n_layer * block
    return tokens * (blocks + last_norm)


def logit_bytes(tokens: int, vocab_size: int) -> int:
    """Peak bytes of a cross-entropy's backward pass, 12 per logit of a chunk: in bfloat16 the logits, their float32
    log-softmax, its gradient, and that in bfloat16 (2 + 4 + 4 + 2); in float32 the first three (4 + 4 + 4).
    """
    return 12 * min(tokens * vocab_size, GPU_CHUNK)


# logits that a CPU (but of at least 256 tokens) and a GPU compute at once (rlhf/ops/unembedding.py)
CHUNK, GPU_CHUNK = 2**20, 2**27
ROOM = 0.95  # the share of a budget that an estimate may fill
# What a CPU's process takes for each byte that autograd keeps, with and without adapters: freed blocks that no other fits.
CPU_GAPS = {False: 1.1, True: 1.45}


def loss_bytes(shape: Shape) -> int:
    """Peak bytes of a loss in chunks: logits, probabilities and their product of a chunk, and the unembedding's gradient."""
    return 4 * (3 * max(CHUNK, 256 * shape.vocab_size) + shape.embedding)


def sampling_logit_bytes(rows: int, vocab_size: int, dtype: str) -> int:
    """Bytes of one decoding step's logits: the logits, and in float32 the scaled ones, log-softmax, probabilities and sums."""
    return rows * vocab_size * (ELEMENT[dtype] + 4 * 4)


def kv_cache_bytes(shape: Shape, rows: int, tokens: float, dtype: str) -> int:
    """Bytes of keys and values of (rows, tokens) over all layers: 2 n_layer kv_width per token (Pope et al. 2022, 3.3)."""
    return round(2 * shape.n_layer * shape.kv_width * rows * tokens * ELEMENT[dtype])

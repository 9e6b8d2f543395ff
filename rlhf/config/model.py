"""Settings of the model and its tokenizer: the GPT's shape and the kind of its blocks."""

from dataclasses import dataclass, fields
from typing import Any

from rlhf.config.setting import setting

BLOCKS = ("pre", "post", "parallel", "one_norm")
ATTENTION = ("causal", "bidirectional")


@dataclass(repr=False)  # transformers writes that of its configurations
class GPTShape:
    """The shape of the GPT and the kinds of its parts: what `rlhf.model.GPTConfig` has too."""

    n_layer: int = setting(12, "blocks", min=1)
    n_head: int = setting(12, "attention heads", min=1)
    n_kv_head: int | None = setting(None, "key and value heads; fewer than n_head: grouped-query attention", min=1)
    head_dim: int | None = setting(None, "width of a head; none: width / n_head", min=1)
    width: int = setting(768, "width of the residual stream, a multiple of n_head if head_dim is not set", min=1)
    mlp_width: int | None = setting(None, "hidden units of the MLP; none: 4 x width, SwiGLU 8/3 x width", min=1)
    context_length: int = setting(1024, "tokens per row", min=1)
    attention: str = setting("causal", "bidirectional: an encoder, pretrained on masked tokens", choices=ATTENTION)
    positions: str = setting("learned", "position encoding", choices=("learned", "rotary", "sinusoidal"))
    block: str = setting("pre", "norms' place; parallel, one_norm: MLP beside attention, 2 norms or 1", choices=BLOCKS)
    window: int | None = setting(None, "tokens that a banded layer attends to; none: no banded layers", min=1)
    window_every: int = setting(2, "with window, the last of every window_every layers is banded", min=1)
    norm: str = setting("layernorm", "normalisation", choices=("layernorm", "rmsnorm"))
    qk_norm: bool = setting(False, "an RMS norm on each head's queries and keys")
    mlp: str = setting("gelu", "activation of the MLP", choices=("gelu", "gelu_erf", "relu", "swiglu"))
    experts: int = setting(0, "MLPs per layer of experts; each token uses one; 0: no such layers", min=0)
    expert_every: int = setting(2, "with experts, the last of every expert_every layers has them", min=1)
    expert_capacity: float = setting(1.25, "pretraining: most tokens of an expert over its even share", above=0)
    balance_coef: float = setting(0.01, "weight alpha of the loss in pretraining that balances the experts", min=0)
    bias: bool = setting(True, "biases in linear layers and LayerNorm")
    tie_word_embeddings: bool = setting(True, "embedding and unembedding share one matrix")
    dropout: float = setting(0.0, "dropout probability", min=0, below=1)
    initializer_range: float = setting(0.02, "standard deviation of the initial weights", above=0, max=10)


@dataclass
class ModelConfig(GPTShape):
    """The GPT to pretrain, or the pretrained model to adopt, whose shape is its own."""

    pretrained: str | None = setting(None, "adopt this model: a hub id (@revision), a folder, a .gguf file")
    native: Any = setting("auto", "run an adopted model as our GPT (auto: if the logits are the same)", kind="switch")


@dataclass(slots=True)
class TokenizerSettings:
    vocab_size: int = setting(50257, "entries, special tokens included", min=262)  # 256 bytes and 6 special tokens
    digits: str = setting("together", "together as they come, or single, as PaLM's", choices=("together", "single"))
    max_characters: int = setting(200_000_000, "characters of text that the BPE is trained on", min=1)


def default_mlp_width(mlp: str, width: int) -> int:
    """4 width; for SwiGLU, which has a third matrix, 8/3 width rounded up to a multiple of 16."""
    return -(-8 * width // 48) * 16 if mlp == "swiglu" else 4 * width


def shape_of(model: ModelConfig) -> dict[str, Any]:
    """The fields that `rlhf.model.GPTConfig` has too."""
    return {item.name: getattr(model, item.name) for item in fields(GPTShape)}


def shape_settings() -> tuple[str, ...]:
    """The keys of `model` and of its tokenizer that shape a model trained here; an adopted one has its own."""
    shape = [f"model.{item.name}" for item in fields(GPTShape)]
    return (*shape, *(f"tokenizer.{item.name}" for item in fields(TokenizerSettings)))

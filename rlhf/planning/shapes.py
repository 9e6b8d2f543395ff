"""The number of parameters of a GPT as a closed formula, without building it.

`tests/planning` compares the counts with the model itself on the meta device.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from rlhf.config.model import ModelConfig, default_mlp_width


@dataclass(slots=True)
class Shape(ModelConfig):
    """A `ModelConfig` with every default resolved, and the vocabulary."""

    n_kv_head: int = 0
    head_dim: int = 0
    mlp_width: int = 0
    vocab_size: int = 50257
    more: int = 0  # parameters of an adopted model that the formula does not count

    def __post_init__(self) -> None:
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.width // self.n_head
        self.mlp_width = self.mlp_width or default_mlp_width(self.mlp, self.width)

    @property
    def expert_layers(self) -> int:
        """Layers that have several MLPs."""
        return self.n_layer // self.expert_every if self.experts else 0

    @property
    def query_width(self) -> int:
        """Width of the queries of one layer."""
        return self.n_head * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of one layer, and of its values."""
        return self.n_kv_head * self.head_dim

    @property
    def norm_size(self) -> int:
        """Parameters of one normalisation."""
        return self.width * (2 if self.norm == "layernorm" and self.bias else 1)

    @property
    def swiglu(self) -> bool:
        return self.mlp == "swiglu"

    @property
    def block_matrices(self) -> int:
        """Parameters of one block that multiply a token: queries, keys, values, output, one MLP."""
        attention = self.width * (2 * self.query_width + 2 * self.kv_width)
        return attention + self.width * self.mlp_width * (3 if self.swiglu else 2)

    @property
    def block_size(self) -> int:
        """Parameters of one block with one MLP."""
        up = self.mlp_width * (2 if self.swiglu else 1)
        biases = (self.query_width + 2 * self.kv_width) + self.width + up + self.width if self.bias else 0
        return self.block_matrices + biases + self.norms

    @property
    def norms(self) -> int:
        """Parameters of one block's norms."""
        return (1 if self.block == "one_norm" else 2) * self.norm_size + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def routers(self) -> int:
        """Parameters of all routers to experts."""
        return self.expert_layers * self.experts * self.width

    @property
    def more_experts(self) -> int:
        """Parameters of the experts that a token does not use, in all layers."""
        up = 2 if self.swiglu else 1
        mlp = self.width * self.mlp_width * (up + 1) + (up * self.mlp_width + self.width if self.bias else 0)
        return self.expert_layers * (self.experts - 1) * mlp

    @property
    def linear_layers(self) -> int:
        """Parameters of the blocks' linear layers: their matrices and biases."""
        return self.n_layer * (self.block_size - self.norms) + self.routers + self.more_experts

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding, which is also the size of the unembedding."""
        return self.vocab_size * self.width

    @property
    def trunk(self) -> int:
        """Parameters without an unembedding of its own: embeddings, blocks, last norm."""
        positions = self.context_length * self.width if self.positions == "learned" else 0
        last = self.norm_size if self.block != "post" else 0
        return self.embedding + positions + self.n_layer * self.norms + self.linear_layers + last + self.more

    @property
    def language_model(self) -> int:
        """Parameters of the policy, which are those of the reference."""
        return self.trunk + (0 if self.tie_word_embeddings else self.embedding)

    @property
    def scalar_model(self) -> int:
        """Parameters of the reward model, which are those of the critic: a trunk and a head with one bias."""
        return self.trunk + self.width + 1


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
    heads = config.num_attention_heads
    hidden_units = [getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner")]
    gated = getattr(config, "hidden_act", None) in ("silu", "swiglu", "gelu_pytorch_tanh")
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

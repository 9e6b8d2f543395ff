"""The configuration of the GPT, as a transformers configuration."""

from __future__ import annotations

from typing import Any, Literal, get_args

from transformers import PreTrainedConfig

from rlhf.model.loading import MOST_LAYERS

Positions = Literal["learned", "rotary"]
Norm = Literal["layernorm", "rmsnorm"]
MLPKind = Literal["gelu", "gelu_erf", "swiglu"]
BlockKind = Literal["pre", "post", "parallel"]


class GPTConfig(PreTrainedConfig):
    """Shape and kind of a GPT; the defaults are GPT-2 small.

    `n_kv_head` None means `n_head`, `head_dim` None width / n_head, `qkv_bias` None `bias`; `mlp_width` None means
    4 width for gelu (tanh form) and gelu_erf (exact), and 8/3 width, rounded up to a multiple of 16, for swiglu.
    `qk_norm` puts an RMS norm on each query and key head. `rotary_share` of each head's pairs of channels turn.
    `block`: where the norms are, see the three block classes. `origin`: the configuration fields of the
    architecture that the weights came from, which these do not express; export writes them back.

    Raises: ValueError when widths, heads and kinds do not fit together; every problem is in the one message.
    """

    model_type = "rlhf_gpt"
    # without annotations, which would make these fields of the configuration
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "intermediate_size": "mlp_width",
        "max_position_embeddings": "context_length",
    }

    vocab_size: int = 50257
    context_length: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    width: int = 768
    mlp_width: int = None  # type: ignore[assignment]
    positions: Positions = "learned"
    norm: Norm = "layernorm"
    mlp: MLPKind = "gelu"
    block: BlockKind = "pre"
    bias: bool = True
    qkv_bias: bool = None  # type: ignore[assignment]
    qk_norm: bool = False
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rotary_share: float = 1.0
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    origin: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.mlp_width is None:
            self.mlp_width = -(-8 * self.width // 48) * 16 if self.mlp == "swiglu" else 4 * self.width
        if self.qkv_bias is None:
            self.qkv_bias = self.bias
        self._check_shape()
        if self.head_dim is None:
            self.head_dim = self.width // self.n_head
        super().__post_init__(**kwargs)

    def _check_shape(self) -> None:
        kinds = {"positions": Positions, "norm": Norm, "mlp": MLPKind, "block": BlockKind}
        problems = [
            f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(kind))}"
            for name, kind in kinds.items()
            if getattr(self, name) not in get_args(kind)
        ]
        if not 0 < self.n_layer <= MOST_LAYERS:
            problems.append(f"n_layer={self.n_layer} must be from 1 to {MOST_LAYERS:,}")
        head_dim = self.head_dim or self.width // self.n_head
        if self.head_dim is None and self.width % self.n_head:
            problems.append(f"width={self.width} must be a multiple of n_head={self.n_head}")
        elif self.positions == "rotary" and (head_dim % 2 or int(head_dim * self.rotary_share) % 2):
            problems.append(f"rotary positions need an even number of turning channels per head, not {head_dim}")
        if not 0.0 < self.rotary_share <= 1.0:
            problems.append(f"rotary_share={self.rotary_share} must be in (0, 1]")
        if self.n_head % self.n_kv_head:
            problems.append(f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout={self.dropout} must be in [0, 1)")
        if problems:
            raise ValueError("GPTConfig: " + "; ".join(problems))

"""The configuration of the GPT, as a transformers configuration."""

from collections.abc import Iterator
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model
from transformers import PreTrainedConfig

from rlhf.config.model import GPTShape, default_mlp_width
from rlhf.config.setting import Setting, settings_in
from rlhf.system.schemas import first_problem

MOST_LAYERS = 10_000
# Of fields that are no settings, or have a wider range there.
RANGES = {
    "n_layer": Setting("", min=1, max=MOST_LAYERS),
    "vocab_size": Setting("", min=1, max=2**31), "norm_eps": Setting("", min=0), "rope_theta": Setting("", above=0),
    "rotary_share": Setting("", above=0, max=1),
}  # fmt: skip
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of rotary frequencies


class GPTConfig(GPTShape, PreTrainedConfig):
    """Shape and kind of a GPT, by default GPT-2 small.

    `n_kv_head` None means `n_head`, `head_dim` None width / n_head, `qkv_bias` None `bias`, `mlp_width` None
    `default_mlp_width`; gelu is the tanh form, gelu_erf the exact one. `qk_norm` puts an RMS norm on each query and key
    head. `rotary_share` of each head's pairs of channels turn; `rotary_scaling`: see
    `rlhf.model.attention.scale_frequencies`.
    `attention`: causal, or bidirectional in an encoder, whose tokens attend to all. `block`: where the norms are, see
    rlhf/model/blocks.py. `window`: the last of every `window_every` layers attend to so many tokens, themselves
    included; None: all layers to all. `experts`: the last of every `expert_every` layers have so many MLPs, see
    rlhf/model/blocks.py, which also says what `expert_capacity` and `balance_coef` are; 0: one. `origin`: the
    configuration fields of the architecture that the weights came from, which these do not express; export writes them
    back.
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
    n_kv_head: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    mlp_width: int = None  # type: ignore[assignment]
    qkv_bias: bool = None  # type: ignore[assignment]
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rotary_share: float = 1.0
    rotary_scaling: dict[str, float] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    origin: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        try:  # transformers converts and checks nothing
            TYPES.model_validate({name: getattr(self, name) for name in TYPES.model_fields})
        except ValidationError as error:
            raise ValueError(f"GPTConfig: {first_problem(error)[1]}") from None
        ranges = {**settings_in(GPTShape), **RANGES}
        problems = [stated.problem(name, getattr(self, name)) for name, stated in ranges.items()]
        if not any(problems):
            self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
            self.qkv_bias = self.bias if self.qkv_bias is None else self.qkv_bias
            if self.mlp_width is None:
                self.mlp_width = default_mlp_width(self.mlp, self.width)
            problems = list(self._misfits())
        if found := [problem for problem in problems if problem is not None]:
            raise ValueError("GPTConfig: " + "; ".join(found))
        self.head_dim = self.head_dim or self.width // self.n_head
        super().__post_init__(**kwargs)

    def _misfits(self) -> Iterator[str]:
        """Values that do not fit together."""
        head_dim = self.head_dim or self.width // self.n_head
        if self.head_dim is None and self.width % self.n_head:
            yield f"width={self.width} must be a multiple of n_head={self.n_head}"
        elif self.positions == "rotary" and (head_dim % 2 or int(head_dim * self.rotary_share) % 2):
            yield f"rotary positions need an even number of turning channels per head, not {head_dim}"
        if self.n_head % self.n_kv_head:
            yield f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}"
        if not self.causal and (self.window is not None or self.experts):
            yield "attention=bidirectional goes with neither window nor experts"
        if self.positions == "sinusoidal" and self.width % 2:
            yield f"sinusoidal positions need an even width, not {self.width}"
        scaling = self.rotary_scaling
        if scaling is not None and not all(scaling.get(name, 0) > 0 for name in SCALING):
            yield f"rotary_scaling={scaling} must have {', '.join(SCALING)}, each above 0"

    @property
    def causal(self) -> bool:
        return self.attention == "causal"


FIELDS: dict[str, Any] = {
    name: (kind | None if getattr(GPTConfig, name) is None else kind, ...)
    for name, kind in {**GPTShape.__annotations__, **GPTConfig.__annotations__}.items()
}
TYPES: Any = create_model("GPTConfig", __config__=ConfigDict(strict=True), **FIELDS)
